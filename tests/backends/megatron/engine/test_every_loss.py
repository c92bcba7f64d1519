"""Each policy loss, divergence and distillation from sampled tokens has the gradient of one process in any layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pytest

from dagrl.config.schema import LossSpec
from dagrl.config.schema.nodes.distillation import SampledDivergence
from dagrl.config.schema.nodes.update import KlEstimator, PolicyForm

if TYPE_CHECKING:
    from dagrl.data.batch import Batch

LAYOUTS = {"tp2": {"tensor_model_parallel_size": 2}, "cp2": {"context_parallel_size": 2}}
LOSSES: dict[str, dict[str, Any]] = {
    **{policy: {"policy": policy, "off_policy_delta": 0.1} for policy in get_args(PolicyForm) if policy != "none"},
    **{f"kl {form}": {"policy": "reinforce", "kl_coef": 0.5, "kl_estimator": form} for form in get_args(KlEstimator)},
    **{
        f"teacher {form}": {"policy": "none", "distillation": {"divergence": form, "is_clip": 1.5}}
        for form in get_args(SampledDivergence)
    },
}


@pytest.fixture(scope="module")
def rows(samples: Batch) -> Batch:
    """The samples in four groups, with log-probs of other policies and marks of some tokens."""
    from dagrl.data.batch import Column

    random, offsets = np.random.default_rng(8), samples["response_tokens"].offsets
    count = int(offsets[-1])
    # About what the untrained model says of a token.
    names = ("old_logprob", "ref_logprob", "teacher_logprob")
    columns = {name: -np.log(61) + random.normal(scale=0.5, size=count) for name in names}
    columns["clip_cov_mask"] = (random.random(count) < 0.3).astype(float)
    given = {name: Column(values.astype("float32"), offsets) for name, values in columns.items()}
    return samples.with_columns({**given, "group_id": Column(np.repeat(np.arange(4), 3))})


@pytest.fixture(scope="module")
def compute(run_engine: Any, rows: Batch) -> Any:
    """``compute(ranks, parallel)``: of each loss the gradients by name."""

    def on_rank(engine: Any) -> dict[str, dict[str, Any]]:
        from gradients import gradients_of

        from dagrl.algorithms.objective import PolicyObjective

        def gradients(options: dict[str, Any]) -> dict[str, Any]:
            objective = PolicyObjective(LossSpec.model_validate(options), 0.8, rows.columns, needs_entropy=False)
            return gradients_of(engine, rows, objective, tokens_per_micro_batch=90)

        return {name: gradients(options) for name, options in LOSSES.items()}

    def run(ranks: int, sizes: dict[str, Any]) -> dict[str, dict[str, Any]]:
        optimizer = {"lr": 1e-3, "use_distributed_optimizer": False}
        return run_engine(ranks, on_rank, parallel=sizes, optimizer=optimizer)[0]

    return run


@pytest.fixture(scope="module")
def alone(compute: Any) -> Any:
    return compute(1, {})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_one_process(layout: str, compute: Any, alone: Any) -> None:
    from gradients import assert_same

    found = compute(2, LAYOUTS[layout])
    for name, gradients in found.items():
        assert any(gradient.any() for gradient in alone[name].values()), name
        assert_same(gradients, alone[name])
