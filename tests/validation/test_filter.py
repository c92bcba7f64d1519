"""``op: filter``: filters that no step could be full with, or that have nothing to choose by."""

from __future__ import annotations

import pytest

from dagrl.validation import check_file

UPDATE = "  update: {op: update, engine: actor, loss: {kl_coef: 0.01}}\n"
RULES = """
def mixed(reward, response_tokens, share=0.5):
    return bool(0 < reward.mean() < share)


def of_prompts(prompt_tokens):
    return True


def of_anything(**columns):
    return True


def of_nothing(share=0.5):
    return True
"""


def with_filter(project, *nodes: str, **edits: str):
    """The small pipeline with further nodes."""
    project.write("rules.py", RULES)
    lines = "".join(f"  {node}\n" for node in nodes)
    return project.pipeline((UPDATE, UPDATE + lines), *edits.items())


CASES = {
    "the prompts alone": ("keep: {op: filter, fn: 'rules:of_prompts'} #!", "keep.fn", "filter-without-responses"),
    "bounds that cross": (
        "keep: {op: filter, lower: 0.9, upper: 0.1} #!",
        "keep.lower",
        "crossed-bounds",
    ),
    "arguments of nobody": ("keep: {op: filter, args: {share: 0.5}} #!", "keep.args", "option-without-effect"),
    "two judges": (
        "keep: {op: filter, fn: 'rules:mixed', lower: 0.1, upper: 0.9} #!",
        "keep.lower",
        "option-without-effect",
    ),
    "a wrong argument": (
        "keep: {op: filter, fn: 'rules:mixed', args: {part: 0.5}} #!",
        "keep.fn",
        "invalid-filter",
    ),
    "columns by no name": (
        "keep: {op: filter, fn: 'rules:of_anything'} #!",
        "keep.fn",
        "invalid-filter",
    ),
    "no column": ("keep: {op: filter, fn: 'rules:of_nothing'} #!", "keep.fn", "invalid-filter"),
    "no such rule": ("keep: {op: filter, fn: 'rules:mixt'} #!", "keep.fn", "invalid-filter"),
    "rounds that are too small": (
        "keep: {op: filter, prompts_per_round: 2, max_rounds: 3} #!",
        "keep.prompts_per_round",
        "too-few-prompts",
    ),
    "a name for what it writes": ("keep: {op: filter, write: kept} #!", "keep.write", "wrong-number-of-columns"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_senseless_combinations_are_refused(project, case) -> None:
    node, place, *fragments = case
    project.assert_problem(with_filter(project, node), f"nodes.{place}", *fragments)


def test_a_column_that_a_rule_reads_and_no_node_writes_is_reported(project) -> None:
    project.write("unknown_rules.py", "def keep(score):\n    return True\n")
    path = with_filter(project, "keep: {op: filter, fn: 'unknown_rules:keep'} #!")
    project.assert_problem(path, "nodes.keep", "missing-column")


def test_a_second_filter_is_refused(project) -> None:
    path = with_filter(project, "keep: {op: filter}", "again: {op: filter, lower: 0.5} #!")
    project.assert_problem(path, "nodes.again", "several-filters")


def test_a_single_response_differs_from_nothing(project) -> None:
    edits = {"n: 4": "n: 1", "estimator: grpo": "estimator: reinforce_plus_plus"}
    path = with_filter(project, "keep: {op: filter} #!", **edits)
    project.assert_problem(
        path,
        "nodes.keep",
        "group-too-small",
    )
    check_file(with_filter(project, "keep: {op: filter, lower: 0.1}", **edits))
    path = with_filter(project, "keep: {op: filter, lower: 0.1, min_std: 0} #!", **edits)
    project.assert_problem(path, "nodes.keep.min_std", "group-too-small")


def test_an_update_in_pieces_has_nothing_to_begin_with(project) -> None:
    update = "loss: {policy: reinforce}, mini_batch: 4, read: {old_logprob: rollout_logprob}}\n"
    path = project.pipeline(
        (UPDATE, f"  update: {{op: update, engine: actor, {update}  keep: {{op: filter}}\n"),
        ("  ref: {op: logprob, engine: reference, write: ref_logprob}\n", ""),
        ("run: {steps: 10}\n", "run: {steps: 10}\nschedule: {stream_update: true} #!\n"),
    )
    project.assert_problem(path, "schedule.stream_update", "update-cannot-stream", "remove one of the two")


def test_over_sampling_begins_more_than_a_round_takes(project) -> None:
    rollout = "n: 4, sampling: {max_new_tokens: 8}}"
    edits = {rollout: f"{rollout[:-1]}, over_sampling_batch_size: 12}} #!"}
    path = with_filter(project, "keep: {op: filter, prompts_per_round: 16}", **edits)
    project.assert_problem(
        path,
        "nodes.rollout.over_sampling_batch_size",
        "over-sampling-too-small",
    )
    check_file(path, ["nodes.keep.prompts_per_round=10"])


def test_behind_a_filter_a_node_may_look_at_prompts_that_are_over_sampled(project) -> None:
    project.write(
        "my_nodes.py",
        "import dagrl\n\n\n@dagrl.node(reads=['answer'], writes=['hint'])\ndef hint(batch):\n    return {}\n",
    )
    rollout = "n: 4, sampling: {max_new_tokens: 8}}"
    edits = {rollout: f"{rollout[:-1]}, over_sampling_batch_size: 12}}"}
    nodes = ("hint: {op: 'my_nodes:hint'}", "keep: {op: filter}")
    check_file(with_filter(project, *nodes, **edits))


def test_a_filter_with_a_rule_of_the_users_own_reads_what_the_rule_takes(project) -> None:
    path = with_filter(project, "keep: {op: filter, fn: 'rules:mixed', args: {share: 0.9}}")
    node = check_file(path).graph.nodes["keep"]
    assert {column: wire.node for column, wire in node.inputs.items()} == {
        "group_id": "prompts",
        "reward": "reward",
        "response_tokens": "rollout",
    }
    assert node.outputs == {}
