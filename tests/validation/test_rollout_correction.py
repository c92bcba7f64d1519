"""Options of a rollout correction: which go together, and what is told where they do not."""

from __future__ import annotations

import pytest

from dagrl.validation import check_file

UPDATE = "loss: {kl_coef: 0.01}}"
PLACE = "nodes.update.rollout_correction"
OLD = "nodes.old={op: logprob, engine: actor, write: old_logprob}"


@pytest.mark.parametrize(
    ("options", "place", "fragments"),
    [
        ("{}", "", ["option-without-effect"]),
        ("{rollout_rs_threshold: 2.0}", "", ["corrects nothing"]),
        ("{rollout_rs: token, rollout_rs_threshold: 2, rollout_is_threshold: 3}", ".rollout_is_threshold", ["without"]),
        ("{rollout_is: token, rollout_rs_threshold: 2.0}", ".rollout_rs_threshold", ["option-without-effect"]),
        ("{rollout_is: token, rollout_is_threshold_lower: 2.0}", ".rollout_is_threshold_lower", ["not below", "2"]),
        ("{rollout_rs: geometric}", ".rollout_rs", ["missing-threshold", "rollout_rs_threshold: 2.0`"]),
        ("{rollout_rs: seq_mean_k3}", ".rollout_rs", ["missing-threshold"]),
        ("{rollout_rs: sequence, rollout_rs_threshold: 0.5}", ".rollout_rs_threshold", ["bounds-not-around-1"]),
        (
            "{rollout_rs: token, rollout_rs_threshold: 2.0, rollout_rs_threshold_lower: 1.5}",
            ".rollout_rs_threshold",
            ["bounds-not-around-1"],
        ),
        (
            "{rollout_rs: token_k3, rollout_rs_threshold: 2.0, rollout_rs_threshold_lower: 1.5}",
            ".rollout_rs_threshold_lower",
            ["option-without-effect"],
        ),
        (
            "{rollout_is: token, rollout_is_batch_normalize: true}",
            ".rollout_is_batch_normalize",
            ["missing-old-logprob"],
        ),
    ],
)
def test_options_that_do_not_go_together(project, options, place, fragments):
    path = project.pipeline((UPDATE, f"loss: {{kl_coef: 0.01}}, rollout_correction: {options}}} #!"))
    project.assert_problem(path, PLACE + place, *fragments)


def test_log_probs_with_dropout_are_not_corrected_by(project):
    # Without a node of old log-probs, the update's own would be compared with the generator's.
    path = project.pipeline((UPDATE, "loss: {kl_coef: 0.01}, rollout_correction: {rollout_is: token}} #!"))
    lora = "engines.actor.lora={rank: 4, dropout: 0.1}"
    (problem,) = project.problems(path, lora)
    assert (problem.place, problem.code) == (PLACE, "missing-old-logprob")
    check_file(path, [lora, OLD])


@pytest.mark.parametrize("name", ["seq_mean_k1", "sequnce"])
def test_a_criterion_that_there_is_not(project, name):
    path = project.pipeline((UPDATE, f"rollout_correction: {{rollout_rs: {name}, rollout_rs_threshold: 2}}}} #!"))
    assert project.only_problem(path).place == f"{PLACE}.rollout_rs"


@pytest.mark.parametrize(
    "options",
    [
        "{rollout_is: token}",
        "{rollout_is: token, rollout_is_threshold: 5.0, rollout_is_threshold_lower: 0.5}",
        "{rollout_is: sequence, rollout_rs: sequence, rollout_rs_threshold: 2.0, rollout_rs_threshold_lower: 0.4}",
        "{rollout_rs: seq_max_k3, rollout_rs_threshold: 0.1, rollout_token_veto_threshold: 1.0e-4}",
    ],
)
def test_options_that_go_together(project, options):
    checked = check_file(project.folder / "p.yaml", [f"nodes.update.rollout_correction={options}"])
    assert checked.warnings == ()
    assert "rollout_logprob" in checked.graph.nodes["update"].inputs


def test_bounds_that_weigh_down_what_agrees_are_a_warning(project):
    for options in (
        "{rollout_is: token, rollout_is_threshold: 0.5}",
        "{rollout_is: token, rollout_is_threshold: 5, rollout_is_threshold_lower: 2}",
    ):
        (warning,) = check_file(project.folder / "p.yaml", [f"nodes.update.rollout_correction={options}"]).warnings
        assert warning.code == "bounds-not-around-1"


def test_normalized_weights_keep_the_old_log_probs(project):
    normalized = "nodes.update.rollout_correction={rollout_is: token, rollout_is_batch_normalize: true}"
    assert check_file(project.folder / "p.yaml", [OLD]).graph.skipped
    assert not check_file(project.folder / "p.yaml", [OLD, normalized]).graph.skipped
    bypass = "nodes.update.read={old_logprob: rollout_logprob}"
    (problem,) = project.problems(project.folder / "p.yaml", normalized, bypass)
    assert problem.code == "missing-old-logprob"


def test_the_generators_log_probs_may_stand_for_the_old_ones(project):
    overrides = ["nodes.update.read={old_logprob: rollout_logprob}", "nodes.update.mini_batch=4"]
    checked = check_file(project.folder / "p.yaml", overrides)
    update = checked.loaded.pipeline.nodes["update"]
    assert update.takes_rollout_for_old
    assert checked.graph.nodes["update"].inputs["old_logprob"].node == "rollout"
    named = check_file(project.folder / "p.yaml", ["nodes.update.read={old_logprob: rollout.rollout_logprob}"])
    assert named.loaded.pipeline.nodes["update"].takes_rollout_for_old
    assert not check_file(project.folder / "p.yaml", [OLD]).loaded.pipeline.nodes["update"].takes_rollout_for_old


def test_reinforce_follows_its_policy_by_weights(project):
    """It needs no old log-probs for several steps, and with them its weights do not see the later ones."""
    several = ["nodes.update.loss.policy=reinforce", "nodes.update.mini_batch=4"]
    (warning,) = check_file(project.folder / "p.yaml", several).warnings
    assert warning.code == "off-policy-reinforce"
    weighted = [*several, "nodes.update.rollout_correction.rollout_is=token"]
    assert check_file(project.folder / "p.yaml", weighted).warnings == ()
    (warning,) = check_file(project.folder / "p.yaml", [*weighted, OLD]).warnings
    assert warning.place.startswith("override") and warning.code == "off-policy-reinforce"
    assert check_file(project.folder / "p.yaml", [*weighted, OLD, "nodes.update.mini_batch=8"]).warnings == ()
