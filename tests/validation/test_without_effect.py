"""Settings without effect are reported where a run would be wasted, and only there."""

import pytest

from dagrl.validation import check_file

STEPS = "run: {steps: 10}"
ROLLOUT = "n: 4, sampling: {max_new_tokens: 8}}"
VAL = ("  max_prompt_tokens: 16\n", "  max_prompt_tokens: 16\n  val: train.parquet\n")


def warnings(project, *edits):
    return [(warning.place, warning.message) for warning in check_file(project.pipeline(*edits)).warnings]


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


class TestSchedule:
    def test_what_to_do_with_old_samples_that_there_are_not(self, project):
        ((place, message),) = warnings(project, (STEPS, f"{STEPS}\nschedule: {{stale_samples: drop}}"))
        assert place == "schedule.stale_samples"
        assert message == "has no effect, as with max_staleness 0 no sample is too old; take it out"
        partial = (ROLLOUT, "n: 4, over_sampling_batch_size: 10, partial_rollout: true, sampling: {max_new_tokens: 8}}")
        assert warnings(project, partial, (STEPS, f"{STEPS}\nschedule: {{stale_samples: drop}}")) == []

    @pytest.mark.parametrize(
        ("said", "place"),
        [
            ("stream_update: true", "schedule.stream_update"),
            ("stale_samples: mask, max_staleness: 1", "schedule.stale_samples"),
            ("in_flight_weight_update: true, max_staleness: 1", "schedule.in_flight_weight_update"),
        ],
    )
    def test_samples_and_updates_where_the_data_set_is_learned_from(self, said, place, tmp_path):
        path = tmp_path / "p.yaml"
        path.write_text(f"extends: tiny_dpo\nschedule: {{{said}}}\n")
        ((found, message),) = [(each.place, each.message) for each in check_file(path, with_files=False).warnings]
        assert found == place
        assert message.startswith("has no effect, as ")


def test_a_node_to_read_from_that_writes_nothing_that_is_read(project):
    path = project.pipeline(("estimator: grpo}", "estimator: grpo, read_from: [ref]} #!"))
    project.assert_problem(path, "nodes.advantage.read_from[0]", "option-without-effect")
