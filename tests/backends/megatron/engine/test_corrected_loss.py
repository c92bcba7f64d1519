"""Corrections and metrics of the mismatch are those of one process in any layout: they see whole responses."""

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dagrl.config.schema import LossSpec, RolloutCorrectionSpec

if TYPE_CHECKING:
    from dagrl.data.batch import Batch

LAYOUTS = {
    "dp2-cp2": (4, {"context_parallel_size": 2}),
    "tp2-pp2": (
        4,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2},
    ),
}
CORRECTION = RolloutCorrectionSpec(
    rollout_is="sequence",
    rollout_is_batch_normalize=True,
    rollout_rs="geometric",
    rollout_rs_threshold=1.3,
    rollout_token_veto_threshold=0.3,
)


@pytest.fixture(scope="module")
def rows(samples: "Batch") -> "Batch":
    """The samples with log-probs of two policies that disagree here and there."""
    from dagrl.data.batch import Column

    random = np.random.default_rng(8)
    old = -random.exponential(2.0, len(samples["response_tokens"].values))
    columns = {"old_logprob": old, "rollout_logprob": old + random.normal(scale=0.4, size=len(old))}
    offsets = samples["response_tokens"].offsets
    return samples.with_columns({name: Column(values.astype("float32"), offsets) for name, values in columns.items()})


@pytest.fixture(scope="module")
def compute(run_engine: Any, rows: "Batch") -> Any:
    """``compute(ranks, parallel, budget)``: gradients and metrics, with their extremes, of rank 0."""

    from gradients import step_of_ranks

    def objective() -> Any:
        from dagrl.algorithms.objective import PolicyObjective

        # It sees the order of a response's tokens, too.
        loss = LossSpec(policy="fipo", half_life=4.0, future_low=0.5, future_high=1.0, off_policy_delta=0.05)
        return PolicyObjective(loss, 0.8, rows.columns, correction=CORRECTION)

    def shares(replicas: int) -> "list[Batch]":
        return [rows.take(np.arange(replica, len(rows), replicas)) for replica in range(replicas)]

    def run(ranks: int, sizes: dict[str, Any], budget: int) -> Any:
        options = {"objective_of": objective, "shares_of": shares, "tokens_per_micro_batch": budget}
        return step_of_ranks(run_engine, ranks, sizes, **options)

    return run


@pytest.fixture(scope="module")
def alone(compute: Any) -> Any:
    """One process, one micro-batch."""
    return compute(1, {}, 1000)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_corrected_loss_is_that_of_one_process(layout: str, compute: Any, alone: Any) -> None:
    from gradients import assert_same

    gradients, metrics = compute(*LAYOUTS[layout], 48)
    expected_gradients, expected = alone
    assert {"mismatch/logprob_diff", "correction/weight", "correction/vetoed_responses"} < metrics.keys()
    assert 0 < metrics["correction/rejected_fraction"][0] < 1
    assert 0 < metrics["ratio/off_policy_fraction"][0] < 1
    for name, (mean, _, high) in metrics.items():
        assert mean == pytest.approx(expected[name][0], rel=1e-5, abs=1e-7), name
        if name.startswith(("mismatch/", "correction/")):
            assert high == pytest.approx(expected[name][2], rel=1e-5), name
    assert_same(gradients, expected_gradients)
