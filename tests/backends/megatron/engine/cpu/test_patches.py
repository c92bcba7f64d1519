"""The stand-ins for CUDA: there once, and invisible to code that does not ask for CUDA."""

import sys
from types import SimpleNamespace

import pytest
import torch

from dagrl.backends.megatron.engine.cpu import patches

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is changed where there is CUDA")


def test_installing_again_changes_nothing():
    before = (torch.zeros, torch.Tensor.type, torch.cuda.current_device)
    patches.install()
    assert (torch.zeros, torch.Tensor.type, torch.cuda.current_device) == before


def test_tensors_asked_for_on_cuda_are_on_the_cpu():
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.ones_like(torch.zeros(2), device=torch.device("cuda", 0)).device.type == "cpu"
    assert torch.empty(2, device=torch.cuda.current_device()).device.type == "cpu"


def test_the_meta_device_still_works():
    """Hugging Face loads models under it; with our constructors unknown to torch, buffers stayed uninitialised."""
    with torch.device("meta"):
        assert torch.arange(4).device.type == "meta"
        assert torch.empty(4).device.type == "meta"


def test_a_tensor_is_of_the_type_that_optimizers_know_and_converts_as_ever():
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1).type(torch.int64).dtype == torch.int64


def test_functions_that_megatron_fuses_are_not_changed():
    from megatron.core.fusions.fused_bias_swiglu import swiglu

    assert not hasattr(swiglu, "_torchdynamo_orig_callable")


@pytest.mark.skipif("flashinfer" in sys.modules, reason="others have asked for it before megatron was imported")
def test_kernels_for_gpus_are_neither_loaded_nor_kept_from_others():
    from megatron.core.transformer.moe import experts

    assert not experts.HAVE_FLASHINFER
    assert not {"flashinfer", "flash_attn"} & sys.modules.keys(), "who asks for them now finds them"


@pytest.mark.parametrize("rotation", [{"rotary_interleaved": False}, {"mla_rotary_interleaved": True, "mscale": 1.3}])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (2, 4)])
def test_packed_sequences_are_rotated_as_one_by_one(rank, size, rotation):
    from megatron.core.models.common.embeddings import rope_utils

    lengths = [8, 32, 16]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    freqs = torch.randn(40, 1, 1, 8, dtype=torch.float64)
    tokens = torch.randn(sum(lengths) // size, 2, 12, dtype=torch.float64, requires_grad=True)
    group = SimpleNamespace(size=lambda: size, rank=lambda: rank)
    rotate = rope_utils._apply_rotary_pos_emb_thd
    outputs = [function(tokens, bounds, freqs, **rotation, cp_group=group) for function in (rotate, rotate.__wrapped__)]
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(tokens)
    torch.testing.assert_close(
        *(torch.autograd.grad(output, tokens, direction)[0] for output in outputs), rtol=1e-12, atol=1e-12
    )


def test_parts_of_any_size_are_gathered(run_ranks):
    sizes = [2, 0, 3]

    def on_rank(rank: int) -> list[list[float]]:
        gathered = torch.full((sum(sizes), 2), -1.0)
        own = torch.full((sizes[rank], 2), float(rank))
        torch.distributed.all_gather(list(gathered.split(sizes)), own)
        return gathered.tolist()

    assert run_ranks(3, on_rank) == [[[0.0] * 2] * 2 + [[2.0] * 2] * 3] * 3


def test_an_output_that_was_given_up_is_put_back_unseen_by_autograd():
    from megatron.core.tensor_parallel.random import _get_share_storage

    weight = torch.full((3,), 2.0, requires_grad=True)
    output = torch.tensor([1.0, 2.0, 3.0])
    product = (output.view(3, 1) * weight.view(3, 1)).sum()
    output.untyped_storage().resize_(0)
    _get_share_storage()(output, torch.tensor([1.0, 2.0, 3.0]))
    product.backward()
    assert weight.grad is not None and weight.grad.tolist() == [1.0, 2.0, 3.0]
