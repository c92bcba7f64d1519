"""Preferences over pairs are those of one process in any layout: the two rows of a pair stay together."""

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from dagrl.data.batch import Batch

LAYOUTS = {
    "dp2": (2, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
    "dp2-pp2": (4, {"pipeline_model_parallel_size": 2}),
}
SMALL = 48
"""Tokens: no more than two pairs go into a micro-batch, and some go alone."""


@pytest.fixture(scope="module")
def pairs(samples: "Batch") -> "Batch":
    """The samples as six pairs, with the log-probs of a reference."""
    from dagrl.data.batch import Column

    random = np.random.default_rng(9)
    reference = -random.exponential(4.0, len(samples["response_tokens"].values)).astype("float32")
    columns = {"group_id": Column(np.arange(len(samples)) // 2)}
    return samples.with_columns(columns | {"ref_logprob": Column(reference, samples["response_tokens"].offsets)})


@pytest.fixture(scope="module")
def compute(run_engine: Any, pairs: "Batch") -> Any:
    """``compute(ranks, parallel, budget)``: gradients and metrics, with their extremes, of rank 0."""
    from gradients import step_of_ranks

    def objective() -> Any:
        from dagrl.algorithms.dpo import DpoObjective

        return DpoObjective(beta=0.5, label_smoothing=0.1, sft_coef=0.3)

    def shares(replicas: int) -> "list[Batch]":
        from dagrl.data.redistribute import assign

        lengths = pairs["prompt_tokens"].lengths + pairs["response_tokens"].lengths
        return [pairs.take(rows) for rows in assign(lengths, pairs["group_id"].values, replicas)]

    def run(ranks: int, sizes: dict[str, Any], budget: int) -> Any:
        options = {"objective_of": objective, "shares_of": shares, "tokens_per_micro_batch": budget}
        return step_of_ranks(run_engine, ranks, sizes, **options)

    return run


@pytest.fixture(scope="module")
def alone(compute: Any) -> Any:
    """One process, one micro-batch."""
    return compute(1, {}, 1000)


@pytest.mark.parametrize("layout", ["alone", *LAYOUTS])
def test_preferences_are_those_of_one_process(layout: str, compute: Any, alone: Any) -> None:
    from gradients import assert_same

    gradients, metrics = compute(*LAYOUTS.get(layout, (1, {})), SMALL)
    expected_gradients, expected = alone
    assert metrics.keys() == expected.keys() >= {"loss/dpo", "dpo/margin", "dpo/accuracy"}
    assert 0 < metrics["dpo/accuracy"][0] < 1, "some pairs are ranked rightly, some are not"
    for name, found in metrics.items():
        assert found == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    assert_same(gradients, expected_gradients)
