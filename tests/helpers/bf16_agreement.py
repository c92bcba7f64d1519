"""How far Megatron's model in bfloat16 is from Hugging Face's in float32, beside Hugging Face's own in bfloat16.

Import as ``from bf16_agreement import measure``: pytest's `pythonpath` holds this folder.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from packs import run_packed, sequences

_SHRINK = 8**-0.5
"""Factor of all matrices: the tiny models' are for a hidden size of 32. Larger ones would amplify rounding."""


@dataclass(frozen=True)
class Reference:
    """A Hugging Face model whose weights are representable in bfloat16, and what it computes in both dtypes."""

    model: Any
    """In float32."""
    rows: list[torch.Tensor]
    exact: list[torch.Tensor]
    """Outputs [tokens, channels] of each layer, and the log-probs, in float32."""
    rounded: list[torch.Tensor]
    """The same by the model in bfloat16."""


def reference(model: Any, device: str) -> Reference:
    """The reference of a tiny model, which stays as it is."""
    exact = copy.deepcopy(model).to(device)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.mul_(_SHRINK if parameter.dim() > 1 else 1.0).copy_(parameter.bfloat16())
    rounded = copy.deepcopy(exact)
    for module in rounded.modules():
        # Not the buffers: published code keeps frequencies and corrections of routers in float32.
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, torch.nn.Parameter(parameter.bfloat16()))
    rows = [row.to(device) for row in sequences(model.config.vocab_size)]
    outputs = [[_outputs(each, row) for row in rows] for each in (exact, rounded)]
    joined = [[torch.cat(parts) for parts in zip(*by_row, strict=True)] for by_row in outputs]
    return Reference(exact, rows, *joined)


def megatron_outputs(chunk: Any, found: Reference) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits [tokens, vocabulary] with a gradient, and the outputs that belong to those of the reference."""
    layers: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda module, args, output: layers.append(output[0][:, 0].detach().float()))
        for layer in chunk.decoder.layers
    ]
    logits = run_packed(chunk, found.rows)[:, : found.model.config.vocab_size].float()
    for hook in hooks:
        hook.remove()
    return logits, [*layers, logits.detach().log_softmax(-1)]


def differences(outputs: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    """Mean differences: of layers as shares of the mean size of their outputs, and of log-probs."""
    means = [float((ours - theirs).abs().mean()) for ours, theirs in zip(outputs, exact, strict=True)]
    sizes = [*(float(each.abs().mean()) for each in exact[:-1]), 1.0]
    return [mean / size for mean, size in zip(means, sizes, strict=True)]


def _outputs(model: Any, row: torch.Tensor) -> list[torch.Tensor]:
    layers: list[torch.Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        layers.append((output[0] if isinstance(output, tuple) else output)[0].float())

    hooks = [layer.register_forward_hook(keep) for layer in model.model.layers]
    with torch.no_grad():
        logits = model(row[None]).logits[0].float()
    for hook in hooks:
        hook.remove()
    return [*layers, logits.log_softmax(-1)]
