"""Options without effect are reported in the order of the schema, in each run the same."""

from dagrl.config.loading.loader import load_pipeline
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import AdvantageNode, LossSpec
from dagrl.validation.unused_options import check_unused_options


def test_problems_have_the_same_order_in_each_run(project):
    advantage = {"k": 2, "decay": 0.9, "gamma": 0.9, "lam": 0.9, "tau": 2.0, "step_coef": 0.5}
    loss = {"tau": 0.5, "ratio_cap": 2.0, "drift_coef": 0.1, "tau_pos": 1.0, "tau_neg": 1.0, "half_life": 9}
    in_schema = [name for name in AdvantageNode.model_fields if name in advantage]
    options = "".join(f", {name}: {advantage[name]}" for name in reversed(in_schema))
    losses = [name for name in LossSpec.model_fields if name in loss]
    written = ", ".join(f"{name}: {loss[name]}" for name in reversed(losses))
    loaded = load_pipeline(
        project.pipeline(("grpo}", f"grpo{options}}}"), ("loss: {kl_coef: 0.01}", f"loss: {{{written}}}"))
    )
    findings = Findings(loaded.positions)
    check_unused_options(loaded.pipeline, findings)
    assert [problem.place for problem in findings.problems] == [
        *(f"nodes.advantage.{name}" for name in in_schema),
        *(f"nodes.update.loss.{name}" for name in losses),
    ]
