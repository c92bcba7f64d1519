"""Options of the rollout that contradict each other, or that would lose rows."""

import pytest

from dagrl.validation import check_file

ROLLOUT = "n: 4, sampling: {max_new_tokens: 8}}"
CASES = {
    "no more than needed": (
        "over_sampling_batch_size: 8",
        "over_sampling_batch_size",
        "over-sampling-too-small",
    ),
    "nothing to carry": (
        "partial_rollout: true",
        "partial_rollout",
        "partial-without-over-sampling",
    ),
    "mask of nothing": (
        "over_sampling_batch_size: 9, mask_offpolicy_in_partial_rollout: true",
        "mask_offpolicy_in_partial_rollout",
        "option-without-effect",
    ),
    "age of nothing": (
        "partial_rollout_max_age: 2",
        "partial_rollout_max_age",
        "option-without-effect",
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_senseless_combinations_are_refused(project, case) -> None:
    options, key, *fragments = case
    path = project.pipeline((ROLLOUT, f"{ROLLOUT[:-1]}, {options}}} #!"))
    project.assert_problem(path, f"nodes.rollout.{key}", *fragments)


def test_a_wrong_size_is_reported_once(project) -> None:
    path = project.pipeline((ROLLOUT, f"{ROLLOUT[:-1]}, over_sampling_batch_size: 0, partial_rollout: true}} #!"))
    project.assert_problem(path, "nodes.rollout.over_sampling_batch_size", "invalid-value")


def test_a_node_that_does_not_wait_for_the_rollout_is_refused_where_prompts_are_left_out(project) -> None:
    project.write(
        "nodes_before.py",
        "import dagrl\n"
        "@dagrl.node(reads=['prompt_tokens'], writes=['hard'])\n"
        "def early(batch): ...\n"
        "@dagrl.node(reads=['prompt_tokens', 'finish_reason'], writes=['hard'])\n"
        "def late(batch): ...\n"
        "@dagrl.node(reads=['hard'], writes=['reward'])\n"
        "def score(batch): ...\n",
    )
    over = (ROLLOUT, f"{ROLLOUT[:-1]}, over_sampling_batch_size: 9}}")
    old = "reward: {op: reward, fn: exact}"
    early = "reward: {op: 'nodes_before:score'}\n  difficulty: {op: 'nodes_before:early'} #!"
    project.assert_problem(
        project.pipeline(over, (old, early)),
        "nodes.difficulty",
        "reads-unsampled-prompts",
    )
    check_file(project.pipeline((old, early)))
    check_file(project.pipeline(over, (old, early.replace("early", "late"))))


def test_sensible_combinations_pass(project) -> None:
    options = "over_sampling_batch_size: 12, partial_rollout: true, partial_rollout_max_age: 2"
    options += ", mask_offpolicy_in_partial_rollout: true"
    assert check_file(project.pipeline((ROLLOUT, f"{ROLLOUT[:-1]}, {options}}}"))).warnings == ()


def test_samples_of_another_policy_are_odd(project):
    second = ("  reference: {", "  second: {backend: megatron, group: train, optimizer: {lr: 1e-3}}\n  reference: {")
    both = (second, ("run: {steps: 10}", "  learn: {op: update, engine: second}\nrun: {steps: 10}"))
    (warning,) = check_file(project.pipeline(*both)).warnings
    assert (warning.place, warning.code) == ("nodes.learn", "foreign-samples")
    own = [both[0], (both[1][0], both[1][1].replace("second}", "second, read: {old_logprob: rollout_logprob}}"))]
    assert check_file(project.pipeline(*own)).warnings == ()
