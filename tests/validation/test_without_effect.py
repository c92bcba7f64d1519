"""Settings that nothing reads are told, each where it stands; the same setting that something reads is not."""

import pytest

from dagrl.validation import check_file

ACTOR = "    optimizer: {lr: 1e-3}\n"
STEPS = "run: {steps: 10}"
ROLLOUT = "n: 4, sampling: {max_new_tokens: 8}}"
VALIDATED = "data: {train: train.parquet, val: train.parquet, prompts_per_step: 8, max_prompt_tokens: 16}"


GPUS = ("train: {cpus_per_node: 2}", "train: {gpus_per_node: 2}")


def warnings(project, *edits):
    return [(warning.place, warning.message) for warning in check_file(project.pipeline(*edits)).warnings]


ENGINE = [
    # what the engine says, where the warning is, what it says, what makes it right
    (
        "transformer: {recompute_modules: [mlp]",
        "transformer.recompute_modules",
        "as nothing is recomputed; add `recompute_granularity:`, or take it out",
        ", recompute_granularity: selective",
    ),
    (
        "optimizer: {lr: 1e-3, optimizer_offload_fraction: 0.5",
        "optimizer.optimizer_offload_fraction",
        "as the optimizer is on the GPU; add `optimizer_cpu_offload: true`",
        ", optimizer_cpu_offload: true",
    ),
    (
        "optimizer: {lr: 1e-3, sgd_momentum: 0.9",
        "optimizer.sgd_momentum",
        "as the optimizer is adam; take it out",
        ", optimizer: sgd",
    ),
    ("optimizer: {lr: 1e-3, optimizer: sgd", "", "", ", sgd_momentum: 0.8"),
    (
        "ddp: {bucket_size: 1000",
        "ddp.bucket_size",
        "as gradients travel at once; add `overlap_grad_reduce: true`",
        ", overlap_grad_reduce: true",
    ),
    (
        "lr_schedule: {min_lr: 1e-4",
        "lr_schedule.min_lr",
        "as the rate stays constant; choose another `lr_decay_style`",
        ", lr_decay_style: cosine",
    ),
    (
        "lr_schedule: {lr_decay_style: linear, lr_warmup_steps: 10",
        "lr_schedule.lr_decay_style",
        "as the warm-up takes 10 steps and the run 10 (run.steps); shorten it",
        ", lr_decay_steps: 20",
    ),
]


@pytest.mark.parametrize(("said", "place", "message", "remedy"), ENGINE)
def test_fields_of_an_engine_that_another_one_turns_off(project, said, place, message, remedy):
    def engine(text):
        kept = "" if text.startswith("optimizer") else ACTOR
        return (ACTOR, f"{kept}    {text}}}\n")

    told = warnings(project, engine(said), GPUS)
    assert [each for each, _ in told] == ([f"engines.actor.{place}"] if place else [])
    assert all(text.startswith("has no effect, ") and message in text for _, text in told)
    assert warnings(project, engine(said + remedy), GPUS) == []


def test_the_first_stage_of_one(project):
    uneven = (ACTOR, f"{ACTOR}    transformer: {{num_layers_in_first_pipeline_stage: 1}}\n")
    ((place, message),) = warnings(project, uneven)
    assert place == "engines.actor.transformer.num_layers_in_first_pipeline_stage"
    assert message == "has no effect, as there is one pipeline stage; take it out"


def test_the_name_of_gpus_that_are_cpu_slots(project):
    ((place, message),) = warnings(project, ("train: {cpus_per_node: 2}", "train: {cpus_per_node: 2, gpu: H200}"))
    assert (place, message) == ("groups.train.gpu", "has no effect, as the group has CPU slots; take it out")


def test_the_best_of_one_checkpoint(project):
    best = "run: {steps: 10, keep_best: {metric: reward/mean}"
    for further in ("", ", save_every: 10"):
        ((place, message),) = warnings(project, (STEPS, f"{best}{further}}}"))
        assert place == "run.keep_best"
        assert message.startswith("has no effect, as the last step alone is saved; set `run.save_every`")
    assert warnings(project, (STEPS, f"{best}, save_every: 9}}")) == []


class TestValidation:
    def test_what_is_said_of_one_that_there_is_not(self, project):
        data = ("  max_prompt_tokens: 16\n", "  max_prompt_tokens: 16\n  val: train.parquet\n  val_prompts: 4\n")
        rollout = (ROLLOUT, "n: 4, sampling: {max_new_tokens: 8}, val_sampling: {max_new_tokens: 4}}")
        ((place, message),) = warnings(project, data, rollout)
        assert place == "data.val"
        assert message == (
            "nothing is validated, so that `data.val`, `data.val_prompts` and `nodes.rollout.val_sampling` have no "
            "effect; set `run.validate_every`"
        )
        assert warnings(project, data, rollout, (STEPS, "run: {steps: 10, validate_every: 10}")) == []

    def test_one_after_the_end(self, project):
        data = ("  max_prompt_tokens: 16\n", "  max_prompt_tokens: 16\n  val: train.parquet\n")
        ((place, message),) = warnings(project, data, (STEPS, "run: {steps: 10, validate_every: 11}"))
        assert place == "run.validate_every"
        assert message == "run.steps is 10, so that of all validations none is made; lower it"

    def test_more_samples_shown_than_there_are(self, project):
        data = ("  max_prompt_tokens: 16\n", "  max_prompt_tokens: 16\n  val: train.parquet\n")
        run = "run: {steps: 10, validate_every: 5, log_val_generations: 65"
        ((place, message),) = warnings(project, data, (STEPS, run + "}"))
        assert place == "run.log_val_generations"
        assert "they are taken from run.samples_per_step, 64; raise that, or lower this" in message
        assert warnings(project, data, (STEPS, run + ", samples_per_step: 65}")) == []


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
    project.assert_problem(
        path, "nodes.advantage.read_from[0]", "`advantage` reads no column that `ref` writes; take it out"
    )
