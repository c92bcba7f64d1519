"""Rollouts that share the rows of a batch: who answers whom, how often, and whose columns are meant."""

import pytest

from dagrl.validation import check_file

ROLLOUT = "  rollout: {op: rollout, engine: generator, n: 4, sampling: {max_new_tokens: 8}}\n"
ASK = "  ask: {op: 'agents_that_ask:ask', read_from: [rollout], write: question}\n"
OWN = """\
import dagrl
@dagrl.node(reads=["response_tokens"], writes=["prompt_tokens"])
def ask(batch): ...
"""
REST = (
    ("fn: exact}", "fn: exact, read_from: [rollout]}"),
    ("write: ref_logprob}", "write: ref_logprob, read_from: [rollout]}"),
    ("estimator: grpo}", "estimator: grpo, read_from: [rollout]}"),
    ("op: update,", "op: update, read_from: [rollout],"),
)
SECOND = "  second: {op: rollout, engine: generator, sampling: {max_new_tokens: 4}, "
BEHIND = SECOND + "read: {prompt_tokens: question}, max_prompt_tokens: 9"


def with_second(project, second: str):
    project.write("agents_that_ask.py", OWN)
    return project.pipeline((ROLLOUT, f"{ROLLOUT}{ASK if 'question' in second else ''}{second}}} #!\n"), *REST)


@pytest.mark.parametrize("second", [BEHIND, SECOND + "n: 4"], ids=["behind the first", "beside it"])
def test_a_second_rollout_has_the_rows_of_the_first(project, second: str) -> None:
    checked = check_file(with_second(project, second))
    pipeline = checked.loaded.pipeline
    assert list(pipeline.rollouts) == ["rollout", "second"] and pipeline.leading_rollout == "rollout"
    assert pipeline.longest_rows("second", validated=False) == {
        ("nodes", "second", "sampling"): 4 + (9 if second is BEHIND else 16)
    }
    nodes = {name: checked.graph.sampled_by(name) for name in checked.graph.nodes}
    assert nodes["prompts"] is None
    assert {name for name, node in nodes.items() if node == "second"} == {"second"}
    assert checked.graph.nodes["samples"].inputs["response_tokens"].node == "rollout"


@pytest.mark.parametrize(
    ("second", "place", "fragments"),
    [
        (BEHIND + ", n: 2", "second.n", ("different-rows",)),
        (SECOND + "n: 2", "second.n", ("different-rows", "set `n: 4`")),
        (
            BEHIND + ", over_sampling_batch_size: 16",
            "second.over_sampling_batch_size",
            ("several-rollouts", "remove it"),
        ),
        (
            SECOND + "n: 4, partial_rollout: true",
            "second.partial_rollout",
            ("several-rollouts", "remove it"),
        ),
        (
            SECOND + "n: 4, max_prompt_tokens: 9",
            "second.max_prompt_tokens",
            ("option-without-effect", "remove it"),
        ),
        (
            BEHIND + ", read_from: [rolout]",
            "second.read_from[0]",
            ("unknown-node", "did you mean `rollout`?"),
        ),
    ],
    ids=["often", "seldom", "over-sampling", "partial", "prompts of the data", "no such node"],
)
def test_sizes_that_do_not_fit_are_refused(project, second: str, place: str, fragments: tuple[str, ...]) -> None:
    project.assert_problem(with_second(project, second), f"nodes.{place}", *fragments)


def test_the_leading_rollout_says_how_often_validation_prompts_are_answered(project) -> None:
    path = with_second(project, SECOND + "n: 4, val_n: 2")
    often = "max_new_tokens: 8}, val_n: 3, val_sampling: {max_new_tokens: 8}}"
    text = path.read_text().replace("max_new_tokens: 8}}", often, 1)
    path.write_text(text)
    project.assert_problem(path, "nodes.second.val_n", "different-rows")
    for right in ("val_n: 1", "val_n: 3"):
        path.write_text(text.replace("val_n: 2", right))
        check_file(path)


def test_room_is_needed_for_the_responses_that_a_node_works_on(project) -> None:
    long = BEHIND.replace("max_prompt_tokens: 9", "max_prompt_tokens: 20000")
    check_file(with_second(project, long))
    learner = "\n  again: {op: logprob, engine: actor, read: {prompt_tokens: question}, read_from: [second]"
    problem = project.only_problem(with_second(project, f"{long}}}{learner}"))
    assert problem.place == "nodes.again.tokens_per_micro_batch"
    assert "cannot hold the longest sample, 20004" in problem.message
