"""What `dagrl validate` says of prompts that a teacher is told, and of the policy as its own teacher."""

from __future__ import annotations

import pytest

from dagrl.validation import check_file

LAST = "  advantage: {op: advantage, estimator: grpo}"
SELF = """
  told: {op: tell, demonstration: answer, max_prompt_tokens: 24}
  teacher: {op: logprob, engine: actor, read: {prompt_tokens: teacher_prompt_tokens}, write: teacher_logprob}"""
DISTILLED = ("loss: {kl_coef: 0.01}}", "loss: {policy: none, distillation: {}}}")
REF = ("  ref: {op: logprob, engine: reference, write: ref_logprob}\n", "")


def edits(told: str = SELF, *more: tuple[str, str]) -> list[tuple[str, str]]:
    return [(LAST, told.lstrip("\n")), DISTILLED, REF, *more]


@pytest.mark.parametrize(
    "told",
    [
        SELF,
        SELF.replace("engine: actor", "engine: average"),
        SELF.replace("demonstration: answer", "peer_reward: 0.5"),
        SELF.replace("demonstration: answer", "demonstration: extra_info.solution, message: system"),
        SELF.replace("engine: actor", "engine: actor, rows: {teacher_mask: [1]}"),
    ],
)
def test_the_policy_can_teach_itself(project, told: str) -> None:
    average = "  average: {backend: megatron, frozen_copy_of: actor, moving_average: 0.05}\n  generator:"
    checked = check_file(project.pipeline(*edits(told), ("  generator:", average)))
    codes = {warning.code for warning in checked.warnings}
    assert codes <= {"unused-engine"}
    graph = checked.graph.working
    assert graph.nodes["teacher"].inputs["prompt_tokens"].node == "told"
    assert graph.nodes["update"].inputs["prompt_tokens"].node == "prompts"
    assert {"teacher_logprob", "teacher_mask"} <= graph.nodes["update"].inputs.keys()


@pytest.mark.parametrize(
    ("told", "place", "code"),
    [
        ("{op: tell, max_prompt_tokens: 24}", "nodes.told", "nothing-to-tell"),
        (
            "{op: tell, demonstration: answer, max_prompt_tokens: 24, template: '{{ prompt'}",
            "template",
            "wrong-template",
        ),
        (
            "{op: tell, demonstration: answer, max_prompt_tokens: 24, template: '{{ answer }}'}",
            "template",
            "wrong-template",
        ),
        (
            "{op: tell, demonstration: answer, max_prompt_tokens: 24, template: '{{ prompt }}'}",
            "template",
            "wrong-template",
        ),
        (
            "{op: tell, demonstration: answer, max_prompt_tokens: 24, template: '{{ demonstration }}'}",
            "template",
            "wrong-template",
        ),
        ("{op: tell, demonstration: demonstration, max_prompt_tokens: 24}", "nodes.told", "missing-column"),
        ("{op: tell, feedback: why, max_prompt_tokens: 24}", "nodes.told", "missing-column"),
    ],
)
def test_a_node_that_tells_nothing_is_refused(project, told: str, place: str, code: str) -> None:
    whole = SELF.replace("{op: tell, demonstration: answer, max_prompt_tokens: 24}", f"{told} #!")
    place = place if place.startswith("nodes") else f"nodes.told.{place}"
    project.assert_problem(project.pipeline(*edits(whole)), place, code)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ demonstration | nofilter }}", "No filter named 'nofilter'"),
        ("{{ prompt is notest }}{{ demonstration }}", "No test named 'notest'"),
        ("{{ prompt }}{{ demonstration }}{% include 'x' %}", "no loader"),
        ("{{ prompt + 1 }}{{ demonstration }}", "concatenate str"),
        ("{{ prompt }}{{ 1 / 0 }}{{ demonstration }}", "division by zero"),
        ("{{ prompt }}{{ demonstration.nothing.more }}", "has no attribute 'nothing'"),
        ("{{ prompt() }}{{ demonstration }}", "not callable"),
        ("{{ prompt }}{{ demonstration.__class__.__mro__ }}", "unsafe"),
        ("{{ prompt | round }}{{ demonstration }}", "type str"),
    ],
)
def test_a_template_that_cannot_be_filled_in_is_refused(project, template: str, words: str) -> None:
    told = SELF.replace("max_prompt_tokens: 24}", f'max_prompt_tokens: 24, template: "{template}"}} #!')
    problem = project.only_problem(project.pipeline(*edits(told)))
    assert (problem.place, problem.code) == ("nodes.told.template", "wrong-template")
    assert words in problem.message and "\n" not in problem.message


@pytest.mark.parametrize(
    "template",
    [
        "{{ prompt | trim }} {{ demonstration.split('/') | last }}",
        "{{ prompt }}{% if response %}{{ response }}{% endif %}{{ demonstration | int + 1 }}",
        "{% set n = 10 / (demonstration | float) %}{{ prompt }}{{ n }}",
    ],
)
def test_a_template_may_compute(project, template: str) -> None:
    told = f'demonstration: answer, template: "{template}"'
    check_file(project.pipeline(*edits(SELF.replace("demonstration: answer", told))))


def test_a_system_message_needs_no_question(project) -> None:
    told = "demonstration: answer, message: system, template: '{{ demonstration }}'"
    check_file(project.pipeline(*edits(SELF.replace("demonstration: answer", told))))


def test_told_prompts_are_longer_than_others(project) -> None:
    small = SELF.replace("write: teacher_logprob", "write: teacher_logprob, tokens_per_micro_batch: 31")
    path = project.pipeline(*edits(f"{small} #!"))
    project.assert_problem(path, "nodes.teacher.tokens_per_micro_batch", "micro-batch-too-small", "32")
    check_file(project.pipeline(*edits(small.replace("31", "32"))))
    path, positions = project.pipeline(*edits()), "model.init.max_position_embeddings={}"
    without = "engines.reference=null"
    assert not check_file(path, [without, positions.format(32)]).warnings
    (warning,) = check_file(path, [without, positions.format(31)]).warnings
    assert (warning.code, warning.place) == ("sample-too-long", "nodes.told.max_prompt_tokens")


@pytest.mark.parametrize(
    ("override", "code"),
    [("nodes.rollout.agent=mine:agent", "told-agent"), ("data.image_key=images", "told-images")],
)
def test_prompts_of_agents_and_with_images_are_not_told_more(project, override: str, code: str) -> None:
    project.write("mine.py", "async def agent(row, client): ...\n")
    problems = project.problems(project.pipeline(*edits()), override)
    assert [each.place for each in problems if each.code == code] == ["nodes.told"]


TOLD = "  told: {op: tell, demonstration: answer, max_prompt_tokens: 24}\n"
DEAF = "  teacher: {op: logprob, engine: actor, rows: {teacher_mask: [1]}, write: teacher_logprob}"
HINTS = TOLD.replace("tell,", "tell, write: {teacher_prompt_tokens: hints},")
HEARD = "  heard: {op: logprob, engine: actor, read: {prompt_tokens: teacher_prompt_tokens}, write: heard_logprob}\n"
MERGED = "  merged: {op: merge, columns: [heard_logprob]}"


@pytest.mark.parametrize(
    ("told", "codes"),
    [
        (TOLD + DEAF, ["unread-prompts"]),
        (TOLD + DEAF.replace("rows: {teacher_mask: [1]}, ", ""), ["unread-prompts"]),
        (TOLD + HEARD + DEAF, ["unread-node", "unread-prompts"]),
        (TOLD + HEARD + MERGED, []),
        (HINTS + DEAF, ["unread-prompts"]),
        (HINTS + HEARD.replace("teacher_prompt_tokens", "hints") + MERGED, []),
    ],
)
def test_prompts_that_the_teacher_is_not_told_are_reported(project, told: str, codes: list[str]) -> None:
    found = [code for _, code in project.warnings(*edits(told))]
    assert sorted(set(found) - {"unused-engine", "teacher-is-student"}) == codes


def test_a_response_without_others_has_no_peer_to_tell(project) -> None:
    peer = SELF.replace("demonstration: answer", "peer_reward: 0.5")
    path = project.pipeline(*edits(peer))
    problems = project.problems(path, "nodes.rollout.n=1")
    assert ("nodes.told.peer_reward", "no-peers") in [(each.place, each.code) for each in problems]
    check_file(path, ["nodes.rollout.n=2"])
    check_file(path, ["nodes.rollout.n=1", f"data.train={{path: {path.parent / 'train.parquet'}, n: 2}}"])
