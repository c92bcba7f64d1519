"""A mixture computes what Hugging Face computes, and learns what it learns; dense models are in `test_model`."""

import copy
from typing import Any

import pytest
import torch

LENGTHS = (11, 1, 40, 7, 22, 3)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "tp2-ep2": (2, {"tp": 2, "ep": 2, "sequence_parallel": True}),
    "tp2-etp2": (2, {"tp": 2, "etp": 2, "sequence_parallel": True}),
}


def sequences(vocab_size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in LENGTHS]


def run_packed(chunk: Any, rows: list[torch.Tensor]) -> torch.Tensor:
    """Logits [tokens, this rank's columns] of the rows, one behind the other in a single pack."""
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0).int()
    longest = max(len(row) for row in rows)
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    tokens = torch.cat(rows)[None]
    return chunk(tokens, torch.zeros_like(tokens), None, packed_seq_params=params)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logprobs_of_a_pack_are_those_of_each_sequence_alone(run_ranks, load_chunks, megatron_spec, hf_mixture, layout):
    rows = sequences(hf_mixture.config.vocab_size)
    ranks, sizes = LAYOUTS[layout]

    def on_rank(rank: int) -> Any:
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

        with torch.no_grad():
            logits = run_packed(load_chunks(hf_mixture, megatron_spec(**sizes))[0], rows)
            return gather_from_tensor_model_parallel_region(logits)[:, :59].log_softmax(-1).numpy()

    with torch.no_grad():
        alone = torch.cat([hf_mixture(row[None]).logits[0] for row in rows]).log_softmax(-1)
    for logprobs in run_ranks(ranks, on_rank):
        torch.testing.assert_close(torch.from_numpy(logprobs), alone, atol=1e-5, rtol=0)


def test_gradients_are_those_of_hugging_face(run_ranks, load_chunks, megatron_spec, hf_mixture, weights_of):
    rows = sequences(hf_mixture.config.vocab_size)

    def on_rank(rank: int) -> dict[str, Any]:
        from dagrl.engines.megatron.hf_weights import export_hf_weights

        chunks = load_chunks(hf_mixture, megatron_spec())
        logits = run_packed(chunks[0], rows)[:-1, :59]
        torch.nn.functional.cross_entropy(logits, torch.cat(rows)[1:]).backward()
        for parameter in chunks[0].parameters():
            parameter.data = parameter.grad
        buckets = export_hf_weights(chunks, hf_mixture.config, bucket_bytes=1 << 20)
        return {name: tensor.numpy() for bucket in buckets for name, tensor in bucket}

    model = copy.deepcopy(hf_mixture)
    logits = torch.cat([model(row[None]).logits[0] for row in rows])[:-1]
    torch.nn.functional.cross_entropy(logits, torch.cat(rows)[1:]).backward()
    for parameter in model.parameters():
        parameter.data = parameter.grad
    expected = weights_of(model)
    (found,) = run_ranks(1, on_rank)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        if not name.endswith("e_score_correction_bias"):
            error = (torch.from_numpy(found[name]) - gradient).abs().max() / gradient.abs().max()
            assert error < 1e-5, f"{name}: {error:.1e}"
