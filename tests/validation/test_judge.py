"""What nodes that ask a judge may not say."""

import pytest

from dagrl.graph.drawing.draw import draw_text
from dagrl.validation import check_file

REWARD = "{op: reward, fn: exact}"
ENDPOINT = "{op: judge, endpoint: 'http://judge:8000/v1', model: m, prompt: 'Rate {response}.'"
ENGINE = "{op: judge, engine: wise, prompt: 'Rate {response}.', max_prompt_tokens: 64, sampling: {max_new_tokens: 8}"
WISE = ("  generator: {backend", "  wise: {backend: hf, group: rollout}\n  generator: {backend")


def test_right_ones_pass(project):
    for node in (ENDPOINT, ENGINE):
        edits = [WISE] if node is ENGINE else []
        checked = check_file(project.pipeline((REWARD, node + "}"), *edits))
        assert checked.warnings == ()
        assert checked.graph.nodes["reward"].inputs["messages"].node == "prompts"
        assert "reward" in checked.graph.validation.nodes


CASES = {
    "nobody": ("{op: judge, prompt: '{response}'}", "nodes.reward", "nobody is asked; name an `engine`"),
    "two": (ENDPOINT + ", engine: wise}", "nodes.reward", "two are asked; name an `engine`"),
    "no model": (
        "{op: judge, endpoint: 'http://judge:8000/v1', prompt: '{response}'}",
        "nodes.reward.endpoint",
        "nobody says which of its models is asked; add `model: NAME`",
    ),
    "a key for an engine": (
        ENGINE + ", api_key_env: KEY}",
        "nodes.reward.api_key_env",
        "only a judge at an endpoint has this; take it out",
    ),
    "a template for an endpoint": (
        ENDPOINT + ", chat_template_kwargs: {}}",
        "nodes.reward.chat_template_kwargs",
        "only a judge at an engine has this; take it out",
    ),
    "a trainer": (
        ENGINE.replace("wise", "actor") + "}",
        "nodes.reward.engine",
        "`actor` is a megatron engine, and only hf or sglang replies in words; take `",
    ),
    "no such engine": (
        ENGINE.replace("wise", "wize") + "}",
        "nodes.reward.engine",
        "there is no engine `wize`; did you mean `wise`?",
    ),
    "too long": (
        ENGINE.replace("max_prompt_tokens: 64", "max_prompt_tokens: 60000") + "}",
        "nodes.reward.max_prompt_tokens",
        "a question of 60000 tokens and a reply of 8 (sampling.max_new_tokens) exceed the model's",
    ),
    "blind": (
        ENDPOINT.replace("Rate {response}.", "Rate {prompt}.") + "}",
        "nodes.reward.prompt",
        "the judge would never see the response; write {response} where it goes",
    ),
    "no expression": (
        ENDPOINT + ", parser: 'score: (\\d'}",
        "nodes.reward.parser",
        "it is no regular expression: missing ), unterminated subpattern",
    ),
    "no module": (ENDPOINT + ", parser: 'gone:f'}", "nodes.reward.parser", "there is no module 'gone'"),
    "a parser that is deaf": (
        ENDPOINT + ", parser: 'own_reading:deaf'}",
        "nodes.reward.parser",
        "the parser own_reading:deaf does not take `reply`",
    ),
    "a parser and scores": (
        ENDPOINT + ", parser: 'own_reading:read', scores: {a: 1}}",
        "nodes.reward.scores",
        "`own_reading:read` returns the score itself; take one of the two out",
    ),
    "top_k": (
        ENDPOINT + ", sampling: {max_new_tokens: 8, top_k: 0}}",
        "nodes.reward.sampling.top_k",
        "0 tokens to draw from",
    ),
    "half an address": (
        ENDPOINT.replace("judge:8000", "[") + "}",
        "nodes.reward.endpoint",
        "it is no address: Invalid IPv6 URL",
    ),
    "no host": (
        ENDPOINT.replace("judge:8000", "") + "}",
        "nodes.reward.endpoint",
        "the address names no host",
    ),
    "a password": (
        ENDPOINT.replace("http://judge", "http://me:secret@judge") + "}",
        "nodes.reward.endpoint",
        "the address holds more than a place, and the run folder shows it",
    ),
    "a key in the address": (
        ENDPOINT.replace("/v1", "/v1?key=secret") + "}",
        "nodes.reward.endpoint",
        "the address holds more than a place, and the run folder shows it",
    ),
    "an address": (
        ENDPOINT.replace("http://", "") + "}",
        "nodes.reward.endpoint",
        "an address begins with http:// or https://",
    ),
    "a key itself": (
        ENDPOINT + ", api_key_env: sk-1234}",
        "nodes.reward.api_key_env",
        "it is the name of an environment variable, not what it holds",
    ),
    "scores that are no numbers": (ENDPOINT + ", scores: {a: b}}", "nodes.reward.scores.a", "number"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_told_at_its_place(project, name):
    node, place, fragment = CASES[name]
    project.write("own_reading.py", "def deaf(answer): return 0\ndef read(reply): return 0\n")
    room = ("init: {model_type: qwen3,", "init: {model_type: qwen3, max_position_embeddings: 128,")
    path = project.pipeline(WISE, room, (REWARD, f"{node} #!"))
    project.assert_problem(path, place, fragment)


def test_a_classifier_is_asked_by_another_op(project):
    wise = (WISE[0], "  wise: {backend: hf, group: rollout, head: reward}\n  generator: {backend")
    path = project.pipeline(wise, (REWARD, ENGINE + "} #!"))
    project.assert_problem(path, "nodes.reward.engine", "has a reward head, and op judge needs the language model's")


def test_what_may_be_a_mistake_is_a_warning(project, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    node = ENDPOINT.replace("Rate {response}.", "Rate {response} of {promt}.") + ", api_key_env: JUDGE_KEY}"
    told = [warning.message for warning in check_file(project.pipeline((REWARD, node))).warnings]
    assert told == [
        "the environment variable JUDGE_KEY is not set here; set it where the run's workers start",
        "there is no field {promt}, so it stays as it is; did you mean `prompt`?",
    ]


def test_a_policy_may_judge_itself_and_that_is_told(project):
    checked = check_file(project.pipeline((REWARD, ENGINE.replace("wise", "generator") + "}")))
    assert [warning.message for warning in checked.warnings] == [
        "`generator` follows `actor`, so that the policy judges itself, by another measure in each step; for a judge "
        "that stays as it is, add an engine that follows none"
    ]


def test_one_at_an_endpoint_runs_on_the_host(project):
    checked = check_file(project.pipeline((REWARD, ENDPOINT + "}")))
    assert "judge on host" in draw_text(checked.graph)
