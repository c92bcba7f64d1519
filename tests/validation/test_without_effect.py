"""Settings without effect are reported where a run would be wasted, and only there."""

STEPS = "run: {steps: 10}"
VAL = ("  max_prompt_tokens: 16\n", "  max_prompt_tokens: 16\n  val: train.parquet\n")


def test_the_best_of_one_checkpoint(project):
    best = "run: {steps: 10, keep_best: {metric: reward/mean}"
    for further in ("", ", save_every: 10"):
        assert project.warnings((STEPS, f"{best}{further}}}")) == [("run.keep_best", "nothing-to-choose-from")]
    assert project.warnings((STEPS, f"{best}, save_every: 9}}")) == []


def test_validation_prompts_without_validations(project):
    assert project.warnings(VAL) == [("data.val", "unused-validation-set")]
    assert project.warnings(VAL, (STEPS, "run: {steps: 10, validate_every: 10}")) == []
    late = (STEPS, "run: {steps: 10, validate_every: 11}")
    assert project.warnings(VAL, late) == [("run.validate_every", "validated-never")]


def test_a_node_to_read_from_that_writes_nothing_that_is_read(project):
    path = project.pipeline(("estimator: grpo}", "estimator: grpo, read_from: [ref]} #!"))
    project.assert_problem(path, "nodes.advantage.read_from[0]", "option-without-effect")
