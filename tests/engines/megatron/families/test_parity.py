"""Models compute what Hugging Face computes, and learn what it learns; logits of dense models are in `test_model`."""

import copy
from typing import Any

import pytest
import torch
from packs import run_packed, sequences

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "tp2-ep2": (2, {"tp": 2, "ep": 2, "sequence_parallel": True}),
    "tp2-etp2": (2, {"tp": 2, "etp": 2, "sequence_parallel": True}),
}


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


def test_gradients_are_those_of_hugging_face(run_ranks, load_chunks, export_chunks, megatron_spec, hf_any, weights_of):
    rows = sequences(hf_any.config.vocab_size)

    def on_rank(rank: int) -> dict[str, Any]:
        chunks = load_chunks(hf_any, megatron_spec())
        logits = run_packed(chunks[0], rows)[:-1, :59]
        torch.nn.functional.cross_entropy(logits, torch.cat(rows)[1:]).backward()
        for parameter in chunks[0].parameters():
            parameter.data = parameter.grad
        buckets = export_chunks(chunks, hf_any, 1 << 20)
        return {name: tensor.numpy() for bucket in buckets for name, tensor in bucket}

    model = copy.deepcopy(hf_any)
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
