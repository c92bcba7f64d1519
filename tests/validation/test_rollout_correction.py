"""Options of a rollout correction: which go together, and what is told where they do not."""

from __future__ import annotations

import pytest

from dagrl.config.schema import LossSpec
from dagrl.validation import check_file

UPDATE = "loss: {kl_coef: 0.01}}"
PLACE = "nodes.update.rollout_correction"
OLD = "nodes.old={op: logprob, engine: actor, write: old_logprob}"


@pytest.mark.parametrize(
    ("options", "place", "fragments"),
    [
        ("{}", "", ["option-without-effect"]),
        ("{rollout_rs_threshold: 2.0}", ".rollout_rs_threshold", ["without"]),
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
        ("{rollout_rs: [token, seq_max_k2]}", ".rollout_rs", ["missing-threshold", "[2.0, 0.01]"]),
        ("{rollout_rs: [token], rollout_rs_threshold: [2.0, 3.0]}", ".rollout_rs_threshold", ["2 bounds for 1"]),
        (
            "{rollout_rs: [token, token_k3], rollout_rs_threshold: 2.0, rollout_rs_threshold_lower: [0.5]}",
            ".rollout_rs_threshold_lower",
            ["missing-threshold", "1 bounds for 2"],
        ),
        (
            "{rollout_rs: [token, token_k3], rollout_rs_threshold: 2.0, rollout_rs_threshold_lower: 0.5}",
            ".rollout_rs_threshold_lower",
            ["option-without-effect", "token_k3", "null"],
        ),
        (
            "{rollout_rs: [token_k3, geometric], rollout_rs_threshold: [0.1, 0.9]}",
            ".rollout_rs_threshold",
            ["bounds-not-around-1", "geometric"],
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


@pytest.mark.parametrize("name", ["seq_mean_k1", "sequnce", "[]", "[token, seq_mean_k1]"])
def test_a_criterion_that_there_is_not(project, name):
    path = project.pipeline((UPDATE, f"rollout_correction: {{rollout_rs: {name}, rollout_rs_threshold: 2}}}} #!"))
    assert project.only_problem(path).place.startswith(f"{PLACE}.rollout_rs")


@pytest.mark.parametrize(
    "options",
    [
        "{rollout_is: token}",
        "{rollout_is: token, rollout_is_threshold: 5.0, rollout_is_threshold_lower: 0.5}",
        "{rollout_is: sequence, rollout_rs: sequence, rollout_rs_threshold: 2.0, rollout_rs_threshold_lower: 0.4}",
        "{rollout_rs: seq_max_k3, rollout_rs_threshold: 0.1, rollout_token_veto_threshold: 1.0e-4}",
        "{rollout_rs: [token, geometric], rollout_rs_threshold: 2.0, rollout_rs_threshold_lower: 0.4}",
        "{rollout_rs: [token, seq_max_k2], rollout_rs_threshold: [1.6, 2.5], rollout_rs_threshold_lower: [0.6, null]}",
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
    (problem,) = project.problems(project.folder / "p.yaml", normalized, bypass, "nodes.update.loss.policy=reinforce")
    assert problem.code == "missing-old-logprob"


def test_the_generators_log_probs_may_replace_the_old_ones(project):
    overrides = ["nodes.update.read={old_logprob: rollout_logprob}", "nodes.update.mini_batch=4"]
    checked = check_file(project.folder / "p.yaml", overrides)
    update = checked.loaded.pipeline.nodes["update"]
    assert update.takes_rollout_for_old
    assert checked.graph.nodes["update"].inputs["old_logprob"].node == "rollout"
    named = check_file(project.folder / "p.yaml", ["nodes.update.read={old_logprob: rollout.rollout_logprob}"])
    assert named.loaded.pipeline.nodes["update"].takes_rollout_for_old
    assert not check_file(project.folder / "p.yaml", [OLD]).loaded.pipeline.nodes["update"].takes_rollout_for_old


@pytest.mark.parametrize("policy", ["ppo_clip", "topr", "reinforce"])
@pytest.mark.parametrize(
    ("read", "is_old"),
    [
        ("{old_logprob: rollout_logprob}", True),
        ("{old_logprob: rollout.rollout_logprob}", True),
        ("{rollout_logprob: old_logprob}", True),
        ("{old_logprob: old.old_logprob}", False),
        # Ratios to the reference, and weights of the reference over the generator: together that of the policy.
        ("{old_logprob: ref_logprob}", False),
        ("{}", False),
    ],
)
def test_the_ratio_to_the_generator_is_counted_once(project, read, is_old, policy):
    overrides = [OLD, f"nodes.update.read={read}", f"nodes.update.loss.policy={policy}"]
    overrides += ["nodes.update.rollout_correction={rollout_is: token}"]
    path = project.folder / "p.yaml"
    if not is_old or not LossSpec(policy=policy).has_ratio:
        check_file(path, overrides)
        return
    assert [problem.code for problem in project.problems(path, *overrides)] == ["ratio-counted-twice"]
    check_file(path, [*overrides, "nodes.update.rollout_correction={rollout_rs: token, rollout_rs_threshold: 2.0}"])


def test_columns_of_one_name_of_two_nodes_are_not_the_same(project):
    nodes = ["nodes.old={op: logprob, engine: actor}", "nodes.other={op: logprob, engine: reference}"]
    read = "nodes.update.read={old_logprob: old.logprob, rollout_logprob: other.logprob}"
    checked = check_file(project.folder / "p.yaml", [*nodes, read])
    assert not checked.loaded.pipeline.nodes["update"].takes_rollout_for_old


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
