"""Models that megatron-bridge builds, and those with gated delta nets, equal Hugging Face's in log-probs and weights.

They learn alike in all layouts.
"""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from layout_cases import parallel_of
from tiny_models import BRIDGED, tiny_hf_model

from dagrl.backends.families.registry import family_named
from dagrl.backends.megatron.section import ParallelSpec, coordinates
from dagrl.config.schema import ModelSpec

if TYPE_CHECKING:
    from dagrl.data.batch import Batch

BOUND, MOST_OF_OWN = 1e-5, 1e-3
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tp": 2, "sp": True}),
    "pp2": (2, {"pp": 2}),
    "pp2-vpp2": (2, {"pp": 2, "vpp": 2}),
    "cp2": (2, {"cp": 2}),
    "ep2": (2, {"ep": 2}),
}
CASES = [
    *((name, layout) for name in (*BRIDGED, "qwen3_5_text") for layout in ("one", "tp2", "pp2")),
    *((name, "ep2") for name in BRIDGED if family_named(name).expert_count),
    # Windows and caps have masks of their own in context parallelism, and gated delta nets split heads.
    *((name, "cp2") for name in ("gemma2", "gpt_oss", "qwen3_next", "qwen3_5_text")),
    ("gemma2", "pp2-vpp2"),
]

Run = Callable[[str, str], tuple[dict[int, np.ndarray], dict[str, torch.Tensor], dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def rows(samples: "Batch") -> "Batch":
    """The `samples` in the vocabulary of the models."""
    from dagrl.data.batch import Batch, Column

    tokens = {
        name: Column.ragged([samples[name][row] % 59 for row in range(len(samples))], "int64")
        for name in ("prompt_tokens", "response_tokens")
    }
    return Batch(samples.rows, {**samples.columns, **tokens})


@pytest.fixture(scope="module")
def run(run_engine: Any, weights_of: Any, rows: "Batch", objective: Any, tmp_path_factory: Any) -> Run:
    """``run(name, layout)``: log-probs by row, weights and gradients; an engine starts from the model's folder."""
    import warnings

    from dagrl.backends.megatron.engine import bridge_library

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Before the ranks are forked.
        bridge_library.import_bridge()

    @functools.cache
    def folder(name: str) -> Path:
        from safetensors.torch import save_file

        path, model = tmp_path_factory.mktemp(name), tiny_hf_model(name)
        model.config.save_pretrained(path)
        save_file({name: each.contiguous() for name, each in weights_of(model).items()}, path / "model.safetensors")
        return path

    @functools.cache
    def measure(name: str, layout: str) -> Any:
        ranks, sizes = LAYOUTS[layout]
        parallel = ParallelSpec.model_validate(parallel_of(sizes))
        places, replicas = coordinates(parallel, ranks), parallel.data_parallel_size(ranks)

        def on_rank(engine: Any) -> Any:
            from gradients import gradients_of

            place = places[torch.distributed.get_rank()]
            mine = rows.take(np.arange(place.dp, len(rows), replicas))
            logprobs = engine.logprobs(mine, temperature=1.0, tokens_per_micro_batch=48)
            weights = {name: each for bucket in engine.export_weights(1 << 20) for name, each in bucket}
            gradients = gradients_of(engine, mine, objective, tokens_per_micro_batch=48)
            by_row = {int(row): logprobs[i] for i, row in enumerate(mine.rows)} if place.primary else {}
            as_arrays = [{name: each.numpy() for name, each in tensors.items()} for tensors in (weights, gradients)]
            return by_row, *as_arrays

        optimizer = {"lr": 1e-3, "use_distributed_optimizer": False}
        model = ModelSpec.model_validate({"path": str(folder(name))})
        answers = run_engine(ranks, on_rank, model=model, parallel=parallel.model_dump(), optimizer=optimizer)
        logprobs = {row: values for by_row, *_ in answers for row, values in by_row.items()}
        return logprobs, *(
            {name: torch.from_numpy(each) for name, each in tensors.items()} for tensors in answers[0][1:]
        )

    return measure


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_model_computes_what_hugging_face_does_and_learns_alike_in_any_layout(
    name: str, layout: str, run: Run, rows: "Batch", weights_of: Any, expected_of: Any
) -> None:
    logprobs, weights, gradients = run(name, layout)
    model = tiny_hf_model(name)
    assert logprobs.keys() == set(rows.rows.tolist())
    for i, row in enumerate(rows.rows):
        np.testing.assert_allclose(logprobs[int(row)], expected_logprobs(model, rows, i), rtol=0, atol=BOUND)
    published = weights_of(model)
    assert weights.keys() == published.keys()
    for weight, tensor in published.items():
        assert torch.equal(weights[weight], tensor), weight
    expected = expected_of(name)
    assert gradients.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    # Experts that no token was sent to have no gradient.
    assert sum(bool(gradient.any()) for gradient in expected.values()) > 0.8 * len(expected)
    for weight, gradient in expected.items():
        if weight.endswith("e_score_correction_bias"):
            continue
        # Weights of these norms are zero-centred in megatron-bridge's models: what is exported is 1 more.
        shift = 1.0 if family_named(name).bridged and weight.endswith("linear_attn.norm.weight") else 0.0
        error = float((gradients[weight] - shift - gradient).abs().max())
        # Those of attention's scores are small sums of large parts, which cancel.
        assert error <= BOUND * largest, f"{weight}: {error:.1e} of {largest:.1e}"
        assert error <= MOST_OF_OWN * float(gradient.abs().max()), f"{weight}: {error:.1e}"


@pytest.fixture(scope="module")
def expected_of(rows: "Batch", weights_of: Any) -> Callable[[str], dict[str, torch.Tensor]]:
    """``expected_of(name)``: `expected_gradients`, computed once."""
    return functools.cache(lambda name: expected_gradients(name, rows, weights_of))


def expected_gradients(name: str, rows: "Batch", weights_of: Any) -> dict[str, torch.Tensor]:
    """The gradient of `WeightedLikelihood` in Hugging Face's model."""
    from weighted_likelihood import WeightedLikelihood

    objective, model = WeightedLikelihood(), copy.deepcopy(tiny_hf_model(name))
    total, weight = torch.zeros(()), float(rows["response_mask"].values.sum())
    for i in range(len(rows)):
        logits, response = response_logits(model, rows, i)
        logprob = (logits / objective.temperature).log_softmax(-1)
        entropy = -(logprob.exp() * logprob).sum(-1)
        advantage = torch.from_numpy(rows["advantage"][i]) + float(rows["reward"].values[i])
        loss = -advantage * logprob.gather(1, response[:, None])[:, 0] - objective.entropy_coef * entropy
        total = total + (torch.from_numpy(rows["response_mask"][i]) * loss).sum() / weight
    total.backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return dict(weights_of(model))


def response_logits(model: Any, rows: "Batch", i: int) -> tuple[torch.Tensor, torch.Tensor]:
    prompt, response = (torch.from_numpy(rows[name][i]) for name in ("prompt_tokens", "response_tokens"))
    return model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1], response


def expected_logprobs(model: Any, rows: "Batch", i: int) -> np.ndarray:
    with torch.no_grad():
        logits, response = response_logits(model, rows, i)
    found: np.ndarray = logits.log_softmax(-1).gather(1, response[:, None])[:, 0].numpy()
    return found
