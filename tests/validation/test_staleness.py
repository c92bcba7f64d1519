"""What the schedule may ask for: samples of older weights, weights in the midst of a rollout, updates that stream."""

from __future__ import annotations

import pytest

from dagrl.config.loading.loader import load_pipeline
from dagrl.graph.updates import update_pieces
from dagrl.validation import check_file

CORRECTED = "nodes.update.rollout_correction={rollout_is: token}"
ROLLOUTS_OLD = "nodes.update.read={old_logprob: rollout_logprob}"
SGLANG = "engines.generator={backend: sglang, group: rollout, weights_from: actor%s}"
STREAMS = ["schedule.stream_update=true", ROLLOUTS_OLD, "nodes.update.mini_batch=4"]
RUN = "run: {steps: 10}"


def warnings(project, *overrides: str) -> list[str]:
    return [warning.code for warning in check_file(project.folder / "p.yaml", overrides).warnings]


def test_older_samples_are_allowed(project):
    assert warnings(project, "schedule.max_staleness=2", CORRECTED) == []
    assert warnings(project, "schedule.max_staleness=2", ROLLOUTS_OLD) == []


def test_older_samples_that_nothing_weighs_are_a_warning(project):
    assert warnings(project, "schedule.max_staleness=1") == ["uncorrected-staleness"]


@pytest.mark.parametrize("option", ["in_flight_weight_update: true", "stale_samples: drop", "stale_samples: stop"])
def test_options_about_older_weights_are_a_warning_where_there_are_none(project, option):
    checked = check_file(project.folder / "p.yaml", [f"schedule={{{option}}}"])
    (warning,) = checked.warnings
    assert warning.code == "option-without-effect" and "max_staleness" in warning.message
    assert warning.place == f"override schedule={{{option}}}: schedule.{option.partition(':')[0]}"


def test_partial_rollouts_may_be_of_older_weights(project):
    partial = ["nodes.rollout.partial_rollout=true", "nodes.rollout.over_sampling_batch_size=9", SGLANG % ""]
    assert warnings(project, "schedule.stale_samples=drop", *partial) == []


def test_mirror_descent_does_not_ask_whose_a_sample_is(project):
    loss = "nodes.update.loss={policy: opmd, kl_coef: 0.01}"
    assert warnings(project, "schedule.max_staleness=1", loss) == []


def test_older_samples_on_one_group_are_a_warning(project):
    assert (
        warnings(project, "schedule.max_staleness=1", CORRECTED, "engines.generator.group=train")[-1] == "shared-group"
    )


@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_weights_in_flight_are_allowed_where_responses_continue(project, pause):
    overrides = ["schedule={max_staleness: 1, in_flight_weight_update: true}", CORRECTED]
    assert warnings(project, *overrides, SGLANG % f", weight_sync: {{pause: {pause}}}") == []


def test_weights_in_flight_are_refused_where_the_engine_cannot_take_them(project):
    path = project.pipeline((RUN, f"{RUN}\nschedule: {{max_staleness: 1, in_flight_weight_update: true}} #!"))
    place = "schedule.in_flight_weight_update"
    project.assert_problem(path, place, "no-in-flight-updates")


def test_weights_in_flight_are_no_matter_to_an_engine_that_only_judges(project):
    judge = "nodes.reward={op: judge, fn: null, engine: wise, prompt: 'Rate {response}', max_prompt_tokens: 64}"
    overrides = ["schedule={max_staleness: 1, in_flight_weight_update: true}", CORRECTED, judge]
    wise = "engines.wise={backend: hf, group: rollout, weights_from: actor}"
    told = warnings(project, *overrides, wise, SGLANG % ", weight_sync: {pause: in_place}")
    assert told == ["moving-judge"]


@pytest.mark.parametrize("given", [True, False])
def test_weights_in_flight_are_refused_where_responses_would_end(project, given):
    old = "generator: {backend: hf, group: rollout, weights_from: actor}"
    engine = "generator: {backend: sglang, group: rollout, weights_from: actor"
    engine += ", weight_sync: {pause: abort}} #!" if given else "}"
    schedule = "schedule: {max_staleness: 1, in_flight_weight_update: true}" + ("" if given else " #!")
    path = project.pipeline((old, engine), (RUN, f"{RUN}\n{schedule}"))
    place = "engines.generator.weight_sync.pause" if given else "schedule.in_flight_weight_update"
    project.assert_problem(path, place, "pause-aborts")


def test_an_update_streams_where_its_mini_batches_end_with_shards(project):
    path = project.folder / "p.yaml"
    check_file(path, STREAMS)

    def pieces(*overrides):
        pipeline = load_pipeline(path, overrides).pipeline
        return update_pieces(pipeline, pipeline.nodes["update"])

    assert pieces(*STREAMS) == ((0, 1), (2, 3))
    assert pieces(*STREAMS, "nodes.update.mini_batch=2") == ((0,), (1,), (2,), (3,))
    assert pieces(*STREAMS, "nodes.update.mini_batch=8") == ()
    assert pieces(*STREAMS[1:]) == ()


def test_an_update_cannot_begin_early_on_the_group_that_generates(project):
    assert warnings(project, *STREAMS, "engines.generator.group=train")[-1] == "shared-group"


def test_an_update_that_streams_beside_rollouts_ahead_requires_weights_in_flight(project):
    assert warnings(project, "schedule={max_staleness: 1, stream_update: true}", *STREAMS[1:]) == [
        "rollout-waits-for-update"
    ]
    schedule = "schedule={max_staleness: 1, stream_update: true, in_flight_weight_update: true}"
    assert warnings(project, schedule, *STREAMS[1:], SGLANG % ", weight_sync: {pause: retract}") == []


OLD = "nodes.old={op: logprob, engine: actor, write: old_logprob}"


@pytest.mark.parametrize(
    ("overrides", "fragment"),
    [
        ([OLD, STREAMS[0], STREAMS[2]], "`old` computes log-probs of the whole step with the weights from before"),
        ([*STREAMS, "nodes.update.epochs=2"], "`update` takes 2 epochs, and the second needs the whole step"),
        (
            [*STREAMS, "schedule.shards_per_step=1"],
            "2 mini-batches from 1 shards of 8 prompts, which do not end together",
        ),
        ([*STREAMS, "schedule.shards_per_step=6"], "set schedule.shards_per_step to a multiple of 2 that divides 8"),
        (
            [*STREAMS, "nodes.advantage.estimator=reinforce_plus_plus"],
            "`advantage` needs the whole step before `update`",
        ),
    ],
)
def test_obstacles_to_a_streamed_update_are_reported(project, overrides, fragment):
    problem = project.only_problem(project.folder / "p.yaml", *overrides)
    assert problem.place == "override schedule.stream_update=true"
    assert fragment in problem.message and "; " in problem.message
