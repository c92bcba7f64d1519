"""Every parallel layout equals one process: log-probs, loss and each gradient, on a packed batch of uneven rows."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dagrl.plan.coordinates import coordinates
from dagrl.spec.schema import ModelSpec, ParallelSpec

if TYPE_CHECKING:
    from dagrl.data.batch import Batch

BOUND = 1e-5
BUDGET = 48

DENSE = {
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "tp2-sp": (2, {"tp": 2, "sp": True}),
    "pp2": (2, {"pp": 2}),
    "pp2-vpp2": (2, {"pp": 2, "vpp": 2}),
    "pp4": (4, {"pp": 4}),
    "cp2": (2, {"cp": 2}),
    "cp4": (4, {"cp": 4}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2, "sp": True}),
    "tp2-pp2-vpp2": (4, {"tp": 2, "pp": 2, "vpp": 2, "sp": True}),
    "cp2-tp2": (4, {"tp": 2, "cp": 2, "sp": True}),
    "cp2-pp2-vpp2": (4, {"cp": 2, "pp": 2, "vpp": 2}),
    "dp2-pp2": (4, {"pp": 2}),
    "tp2-pp2-cp2": (8, {"tp": 2, "pp": 2, "cp": 2, "sp": True}),
}
MIXTURE = {
    "dp2": (2, {}),
    "ep2": (2, {"ep": 2}),
    "ep2-tp2": (2, {"ep": 2, "tp": 2, "sp": True}),
    "etp2-tp2": (2, {"tp": 2, "etp": 2, "sp": True}),
    "tp2": (2, {"tp": 2, "sp": True}),
    "cp2-ep2": (2, {"cp": 2, "ep": 2}),
    "ep2-pp2": (4, {"ep": 2, "pp": 2}),
    "ep4": (4, {"ep": 4}),
    "ep2-tp2-pp2": (4, {"ep": 2, "tp": 2, "pp": 2, "sp": True}),
    "tp2-cp2-ep4": (4, {"tp": 2, "cp": 2, "ep": 4, "sp": True}),
}
_NAMES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "sp": "sequence_parallel",
}


def parallel_of(layout: dict[str, Any]) -> dict[str, Any]:
    return {_NAMES[name]: value for name, value in layout.items()}


def model_of(family: str, **changes: Any) -> ModelSpec:
    """Four layers, a vocabulary of 61 tokens that has to be padded, and weights with room between experts."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    fields = {"model_type": family, "vocab_size": 61, "initializer_range": 0.15, "pad_token_id": None, **shape, **heads}
    fields |= (experts if "moe" in family else {}) | changes
    return ModelSpec.model_validate({"init": fields, "tokenizer": {"kind": "characters", "alphabet": "ab"}})


Measure = Callable[..., tuple[dict[str, Any], dict[str, float], dict[int, np.ndarray]]]


@pytest.fixture(scope="module")
def measure(run_engine: Callable[..., list[Any]], samples: "Batch", objective: Any) -> Measure:
    """``measure(ranks, layout, model, **spec)``: gradients by name, metrics, and each row's log-probs."""

    def run(ranks: int, layout: dict[str, Any], model: ModelSpec, **spec: Any) -> Any:
        parallel = ParallelSpec.model_validate(parallel_of(layout))
        places = coordinates(parallel, ranks)
        replicas = parallel.data_parallel_size(ranks)

        def on_rank(engine: Any) -> Any:
            import torch.distributed as dist
            from gradients import gradients_and_sums

            from dagrl.engines.megatron.loss import sum_over_replicas

            place = places[dist.get_rank()]
            mine = samples.take(np.arange(place.dp, len(samples), replicas))
            logprobs = engine.logprobs(mine, temperature=0.8, tokens_per_micro_batch=BUDGET)
            gradients, sums = gradients_and_sums(engine, mine, objective, tokens_per_micro_batch=BUDGET)
            metrics = {name: total / count for name, (total, count) in sum_over_replicas(sums).items()}
            rows = {int(row): logprobs[i] for i, row in enumerate(mine.rows)}
            return gradients, metrics, rows, place.primary

        spec.setdefault("optimizer", {"lr": 1e-3, "use_distributed_optimizer": False})
        answers = run_engine(ranks, on_rank, model=model, parallel=parallel.model_dump(), **spec)
        for _, metrics, _, _ in answers:
            assert metrics == answers[0][1], "metrics are the same on every rank"
        logprobs: dict[int, np.ndarray] = {}
        for _, _, rows, primary in answers:
            if primary:
                assert not logprobs.keys() & rows.keys(), "each row has one primary"
                logprobs |= rows
        for (_, _, rows, _), place in zip(answers, places, strict=True):
            for row, values in rows.items():
                assert np.array_equal(values, logprobs[row]), f"rank at {place} reads other log-probs"
        gradients = {name: tensor.numpy() for name, tensor in answers[0][0].items()}
        return gradients, answers[0][1], logprobs

    return run


@pytest.fixture(scope="module")
def alone(measure: Measure) -> Callable[[str], Any]:
    """What one process gives, for a family."""
    return functools.cache(lambda family: measure(1, {}, model_of(family)))


@pytest.mark.parametrize("layout", DENSE)
def test_a_dense_model_in_any_layout_equals_one_process(layout: str, measure: Measure, alone: Any) -> None:
    ranks, sizes = DENSE[layout]
    assert_equal(measure(ranks, sizes, model_of("qwen3")), alone("qwen3"))


@pytest.mark.parametrize("layout", MIXTURE)
def test_a_mixture_in_any_layout_equals_one_process(layout: str, measure: Measure, alone: Any) -> None:
    ranks, sizes = MIXTURE[layout]
    assert_equal(measure(ranks, sizes, model_of("qwen3_moe")), alone("qwen3_moe"))


def assert_equal(measured: Any, expected: Any) -> None:
    gradients, metrics, logprobs = measured
    assert gradients.keys() == expected[0].keys()
    assert len(gradients) > 20
    worst = max(gradients, key=lambda name: distance(gradients[name], expected[0][name]))
    assert distance(gradients[worst], expected[0][worst]) <= BOUND, worst
    assert metrics == pytest.approx(expected[1], rel=BOUND)
    assert logprobs.keys() == expected[2].keys()
    for row, values in logprobs.items():
        np.testing.assert_allclose(values, expected[2][row], rtol=0, atol=BOUND)


def distance(tensor: np.ndarray, other: np.ndarray) -> float:
    """Relative to the largest entry of the tensor."""
    assert tensor.shape == other.shape
    return float(np.abs(tensor - other).max() / np.abs(other).max())
