"""Models that megatron-bridge builds, on a GPU in bfloat16: log-probs near Hugging Face, weights to the bit."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from packs import run_packed, sequences
from tiny_models import BRIDGED, tiny_hf_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
"""What kernels of attention and experts take."""
MOST_MEAN_DIFFERENCE = 0.02


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """Megatron's groups in this process."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", BRIDGED)
def test_log_probs_gradients_and_weights(name: str, weights_of: Any, megatron_spec: Any) -> None:
    from dagrl.backends.megatron.engine.megatron_engine import converter
    from dagrl.backends.megatron.engine.model import build_model
    from dagrl.weight_sync.exporter import exported

    if name == "qwen3_next":
        pytest.importorskip("fla", reason="needs flash-linear-attention")
    model = tiny_hf_model(name, **SIZES).bfloat16()
    published = {weight: tensor.clone() for weight, tensor in weights_of(model).items()}
    reference = model.float().cuda()
    rows = [row.cuda() for row in sequences(model.config.vocab_size)]
    with torch.no_grad():
        expected = torch.cat([reference(row[None]).logits[0] for row in rows]).log_softmax(-1)

    class Source:
        def names(self) -> list[str]:
            return list(published)

        def get(self, weight: str) -> torch.Tensor:
            return published[weight]

        def shape(self, weight: str) -> tuple[int, ...]:
            return tuple(published[weight].shape)

    spec = megatron_spec()
    load, make_exporter = converter(model.config, spec)
    chunks = build_model(model.config, spec)
    load(chunks, model.config, Source())
    logits = run_packed(chunks[0], rows)[:, :59].float()
    logits.log_softmax(-1)[:, 0].sum().backward()
    difference = (logits.detach().log_softmax(-1) - expected).abs().mean()
    assert difference < MOST_MEAN_DIFFERENCE
    missing = [weight for weight, each in chunks[0].named_parameters() if each.requires_grad and each.grad is None]
    assert missing == []
    found = {
        weight: each.cpu()
        for bucket in exported(make_exporter(chunks, model.config, 1 << 26), is_root=True)
        for weight, each in bucket
    }
    assert found.keys() == published.keys()
    for weight, tensor in published.items():
        # The router's correction is a float32 buffer.
        assert torch.equal(found[weight].to(tensor.dtype), tensor), weight
