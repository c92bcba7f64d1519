"""``op: buffer``: options without effect, buffers that nothing enters, and losses that need a correction."""

from __future__ import annotations

import pytest

from dagrl.validation import check_file

UPDATE = "  update: {op: update, engine: actor, loss: {kl_coef: 0.01}}\n"
BUFFER = "replay: {op: buffer, groups_per_step: 2"


def with_buffer(project, *nodes: str, **edits: str):
    """The small pipeline with further nodes."""
    lines = "".join(f"  {node}\n" for node in nodes)
    return project.pipeline((UPDATE, UPDATE + lines), *edits.items())


CASES = {
    "no size": ("replay: {op: buffer} #!", "replay.groups_per_step", "missing-key"),
    "a priority": (f"{BUFFER}, priority: reward}} #!", "replay.priority", "option-without-effect"),
    "an exponent": (f"{BUFFER}, policy: fifo, exponent: 2}} #!", "replay.exponent", "option-without-effect"),
    "a floor": (f"{BUFFER}, policy: best, floor: 0.1}} #!", "replay.floor", "option-without-effect"),
    "hard prompts": (f"{BUFFER}, hard_below: 0.1}} #!", "replay.hard_below", "option-without-effect"),
    "right responses": (f"{BUFFER}, right_above: 0.1}} #!", "replay.right_above", "option-without-effect"),
    "room for no group": (f"{BUFFER}, capacity: 3}} #!", "replay.capacity", "capacity-too-small"),
    "an unknown metric": (f"{BUFFER}, metric: points}} #!", "replay", "missing-column"),
    "an unknown policy": (f"{BUFFER}, policy: lifo}} #!", "replay.policy", "unknown-option"),
    "no age": (f"{BUFFER}, max_age: 0}} #!", "replay.max_age", "invalid-value"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_senseless_options_are_refused(project, case) -> None:
    node, place, code = case
    project.assert_problem(with_buffer(project, node), f"nodes.{place}", code)


def test_a_second_buffer_is_refused(project) -> None:
    path = with_buffer(project, f"{BUFFER}}}", "again: {op: buffer, groups_per_step: 2} #!")
    project.assert_problem(path, "nodes.again", "several-buffers")


def test_a_single_response_differs_from_nothing(project) -> None:
    edits = {"n: 4": "n: 1", "estimator: grpo": "estimator: reinforce_plus_plus"}
    project.assert_problem(with_buffer(project, f"{BUFFER}}} #!", **edits), "nodes.replay", "group-too-small")
    check_file(with_buffer(project, f"{BUFFER}, keep: all}}", **edits))


@pytest.mark.parametrize(
    ("n", "sources", "refused"),
    [
        (1, "{path: train.parquet, n: 8}", False),
        (1, "{a: {path: train.parquet, n: 8}, b: train.parquet}", False),
        (1, "{a: {path: train.parquet, n: 1}, b: train.parquet}", True),
        (4, "{path: train.parquet, n: 1}", True),
        (4, "{a: {path: train.parquet, n: 1}, b: train.parquet}", False),
    ],
)
def test_the_responses_of_sources_count(project, n: int, sources: str, refused: bool) -> None:
    edits = {"n: 4": f"n: {n}", "estimator: grpo": "estimator: reinforce_plus_plus"}
    edits["train: train.parquet"] = f"train: {sources}"
    if refused:
        project.assert_problem(with_buffer(project, f"{BUFFER}}} #!", **edits), "nodes.replay", "group-too-small")
    else:
        check_file(with_buffer(project, f"{BUFFER}}}", **edits))


def test_a_buffer_has_no_record(project) -> None:
    path = with_buffer(project, f"{BUFFER}}}", **{"run: {steps: 10}": "run: {steps: 10, record: [replay]} #!"})
    project.assert_problem(path, "run.record", "unrecordable-node")


@pytest.mark.parametrize(
    ("update", "warns"),
    [
        ("loss: {kl_coef: 0.01}", True),
        ("loss: {kl_coef: 0.01}, rollout_correction: {rollout_is: token}", False),
        ("loss: {kl_coef: 0.01}, read: {old_logprob: rollout_logprob}", False),
        ("loss: {kl_coef: 0.01, policy: opmd}", False),
        ("loss: {kl_coef: 0.01, policy: dro}", False),
        ("loss: {kl_coef: 0.01, policy: reinforce}", True),
    ],
)
def test_an_update_without_correction_is_reported(project, update, warns) -> None:
    path = with_buffer(project, f"{BUFFER}}}", **{"loss: {kl_coef: 0.01}": update})
    warnings = [problem for problem in check_file(path).warnings if problem.code == "uncorrected-replay"]
    assert len(warnings) == warns
    for problem in warnings:
        assert "rollout_correction" in problem.message
