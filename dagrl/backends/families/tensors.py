"""Names and shapes of a model's tensors, in published checkpoints and in Megatron, computed from its shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dagrl.backends.families.shape import ModelShape
from dagrl.backends.families.tensor_maps import MappedTensor, Replicated, VocabParallel
from dagrl.model_files.tensor_names import OUTPUT, SCORE


def model_tensors(shape: ModelShape, padded_vocabulary: int, head: str = "lm") -> Iterator[MappedTensor]:
    """Yield all tensors of a model, layer after layer, experts one after the other.

    The vision tower comes last. An output layer that is tied to the embedding is omitted. A value or reward `head`
    takes the output layer's place.
    """
    vocabulary = VocabParallel(shape.vocabulary, padded_vocabulary)
    rows = ((shape.vocabulary, shape.hidden),)
    yield MappedTensor(
        "embedding.word_embeddings.weight", (f"{shape.text_prefix}embed_tokens.weight",), rows, vocabulary
    )
    count = shape.experts.count if shape.experts else 0
    for layer in shape.positions:
        for tensor in shape.layer_tensors(layer):
            numbers = range(count) if tensor.per_expert else [None]
            yield from (_numbered(tensor, shape.text_prefix, layer, expert) for expert in numbers)
    for kind in ("weight", "bias") if shape.norm_bias else ("weight",):
        name = f"{shape.text_prefix}norm.{kind}"
        yield MappedTensor(f"decoder.final_layernorm.{kind}", (name,), ((shape.hidden,),), Replicated())
    if head != "lm":
        yield MappedTensor("output_layer.weight", (SCORE,), ((1, shape.hidden),), Replicated())
    elif not shape.tied:
        yield MappedTensor("output_layer.weight", (OUTPUT,), rows, vocabulary)
    if shape.vision:
        yield from shape.vision.tensors()


def published_tensors(shape: ModelShape, head: str = "lm") -> Iterator[tuple[str, tuple[int, ...]]]:
    for tensor in model_tensors(shape, shape.vocabulary, head):
        yield from zip(tensor.hf, tensor.shapes, strict=True)


def _numbered(tensor: MappedTensor, prefix: str, layer: int, expert: int | None) -> MappedTensor:
    return replace(
        tensor,
        megatron=f"decoder.layers.{layer}.{tensor.megatron.format(expert=expert)}",
        hf=tuple(f"{prefix}layers.{layer}.{name.format(expert=expert)}" for name in tensor.hf),
        layer=layer,
        expert=expert,
    )
