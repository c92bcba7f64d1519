"""Models compute what Hugging Face computes, and learn what it learns; logits of dense models are in `test_model`."""

import copy
from typing import Any

import pytest
import torch
from packs import run_packed, sequences
from tiny_models import ONE_EXPERT

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
        return _exported_gradients(chunks, run_packed(chunks[0], rows), rows, hf_any, export_chunks)

    expected = _expected_gradients(hf_any, rows, weights_of)
    (found,) = run_ranks(1, on_rank)
    assert found.keys() == expected.keys()
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        if not name.endswith("e_score_correction_bias"):
            difference = (torch.from_numpy(found[name]) - gradient).abs().max()
            # Queries and keys of late layers have gradients of sums that nearly cancel: in float32, on some processors,
            # those of transformers are 2e-5 of the tensor's largest off its own in float64, and Megatron's 1.4e-5.
            assert difference <= 1e-5 * gradient.abs().max() + 1e-7 * largest, f"{name}: {difference:.1e}"


@pytest.mark.parametrize("name", ONE_EXPERT)
def test_a_single_expert_a_token_is_weighed_and_learns_as_in_hugging_face(
    run_ranks, load_chunks, export_chunks, megatron_spec, hf_model_of, weights_of, name
):
    """Where the weight is normalised it is 1, and the router has no gradient in either library."""
    model = hf_model_of(name)
    rows = sequences(model.config.vocab_size)

    def on_rank(rank: int) -> tuple[Any, dict[str, Any]]:
        chunks = load_chunks(model, megatron_spec())
        logits = run_packed(chunks[0], rows)
        logprobs = logits[:, :59].log_softmax(-1).detach().numpy()
        return logprobs, _exported_gradients(chunks, logits, rows, model, export_chunks)

    with torch.no_grad():
        alone = torch.cat([model(row[None]).logits[0] for row in rows]).log_softmax(-1)
    expected = _expected_gradients(model, rows, weights_of)
    ((logprobs, found),) = run_ranks(1, on_rank)
    torch.testing.assert_close(torch.from_numpy(logprobs), alone, atol=1e-5, rtol=0)
    largest = max(gradient.abs().max() for gradient in expected.values())
    for parameter, gradient in expected.items():
        if not parameter.endswith("e_score_correction_bias"):
            error = (torch.from_numpy(found[parameter]) - gradient).abs().max() / largest
            assert error < 1e-6, f"{parameter}: {error:.1e}"


def _exported_gradients(chunks, logits, rows, hf_model, export_chunks) -> dict[str, Any]:
    """Gradients of the mean negative log-likelihood, exported as weights are."""
    torch.nn.functional.cross_entropy(logits[:-1, :59], torch.cat(rows)[1:]).backward()
    for parameter in chunks[0].parameters():
        parameter.data = parameter.grad
    buckets = export_chunks(chunks, hf_model, 1 << 20)
    return {name: tensor.numpy() for bucket in buckets for name, tensor in bucket}


def _expected_gradients(hf_model, rows, weights_of) -> dict[str, Any]:
    model = copy.deepcopy(hf_model)
    logits = torch.cat([model(row[None]).logits[0] for row in rows])[:-1]
    torch.nn.functional.cross_entropy(logits, torch.cat(rows)[1:]).backward()
    for parameter in model.parameters():
        parameter.data = parameter.grad
    return weights_of(model)
