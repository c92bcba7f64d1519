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


def test_a_judge_of_some_rows_needs_a_merge(project):
    some = ENDPOINT + ", rows: {data_set: [train]}, write: %s}"
    merged = f"{{op: merge, columns: [judged, right], write: reward}}\n  judged: {some % 'judged'}\n"
    merged += "  right: {op: reward, fn: exact, write: right}"
    assert check_file(project.pipeline((REWARD, merged))).warnings == ()
    path = project.pipeline((REWARD, some % "reward" + " #!"))
    project.assert_problem(path, "nodes.reward.rows", "rows-without-log-probs")


CASES = {
    "nobody": ("{op: judge, prompt: '{response}'}", "nodes.reward", "judge-source"),
    "two": (ENDPOINT + ", engine: wise}", "nodes.reward", "judge-source"),
    "no model": (
        "{op: judge, endpoint: 'http://judge:8000/v1', prompt: '{response}'}",
        "nodes.reward.endpoint",
        "judge-model",
    ),
    "a key for an engine": (
        ENGINE + ", api_key_env: KEY}",
        "nodes.reward.api_key_env",
        "option-without-effect",
    ),
    "a template for an endpoint": (
        ENDPOINT + ", chat_template_kwargs: {enable_thinking: false}}",
        "nodes.reward.chat_template_kwargs",
        "option-without-effect",
    ),
    "a trainer": (
        ENGINE.replace("wise", "actor") + "}",
        "nodes.reward.engine",
        "wrong-backend",
    ),
    "no such engine": (
        ENGINE.replace("wise", "wize") + "}",
        "nodes.reward.engine",
        "unknown-engine",
    ),
    "too long": (
        ENGINE.replace("max_prompt_tokens: 64", "max_prompt_tokens: 60000") + "}",
        "nodes.reward.max_prompt_tokens",
        "sample-too-long",
    ),
    "blind": (
        ENDPOINT.replace("Rate {response}.", "Rate {prompt}.") + "}",
        "nodes.reward.prompt",
        "judge-without-response",
    ),
    "no expression": (
        ENDPOINT + ", parser: 'score: (\\d'}",
        "nodes.reward.parser",
        "invalid-parser",
    ),
    "no module": (ENDPOINT + ", parser: 'gone:f'}", "nodes.reward.parser", "invalid-parser"),
    "a parser that is deaf": (
        ENDPOINT + ", parser: 'own_reading:deaf'}",
        "nodes.reward.parser",
        "invalid-parser",
    ),
    "a parser and scores": (
        ENDPOINT + ", parser: 'own_reading:read', scores: {a: 1}}",
        "nodes.reward.scores",
        "option-without-effect",
    ),
    "top_k": (
        ENDPOINT + ", sampling: {max_new_tokens: 8, top_k: 0}}",
        "nodes.reward.sampling.top_k",
        "invalid-value",
    ),
    "no host": (
        ENDPOINT.replace("judge:8000", "") + "}",
        "nodes.reward.endpoint",
        "invalid-value",
    ),
    "a password": (
        ENDPOINT.replace("http://judge", "http://me:secret@judge") + "}",
        "nodes.reward.endpoint",
        "secret-in-address",
    ),
    "a key in the address": (
        ENDPOINT.replace("/v1", "/v1?key=secret") + "}",
        "nodes.reward.endpoint",
        "secret-in-address",
    ),
    "an address": (
        ENDPOINT.replace("http://", "") + "}",
        "nodes.reward.endpoint",
        "invalid-value",
    ),
    "a key itself": (
        ENDPOINT + ", api_key_env: sk-1234}",
        "nodes.reward.api_key_env",
        "invalid-value",
    ),
    "scores that are no numbers": (ENDPOINT + ", scores: {a: b}}", "nodes.reward.scores.a", "number"),
}


@pytest.mark.parametrize("name", CASES)
def test_errors_are_reported_at_their_place(project, name):
    node, place, fragment = CASES[name]
    project.write("own_reading.py", "def deaf(answer): return 0\ndef read(reply): return 0\n")
    room = ("init: {model_type: qwen3,", "init: {model_type: qwen3, max_position_embeddings: 128,")
    path = project.pipeline(WISE, room, (REWARD, f"{node} #!"))
    project.assert_problem(path, place, fragment)


def test_a_classifier_is_asked_by_another_op(project):
    wise = (WISE[0], "  wise: {backend: hf, group: rollout, head: reward}\n  generator: {backend")
    path = project.pipeline(wise, (REWARD, ENGINE + "} #!"))
    project.assert_problem(path, "nodes.reward.engine", "wrong-head")


def test_possible_mistakes_are_warnings(project, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    node = ENDPOINT.replace("Rate {response}.", "Rate {response} of {promt}.") + ", api_key_env: JUDGE_KEY}"
    place = "nodes.reward"
    assert project.warnings((REWARD, node)) == [
        (f"{place}.api_key_env", "unset-variable"),
        (f"{place}.prompt", "unknown-field"),
    ]


def test_a_policy_that_judges_itself_is_a_warning(project):
    edit = (REWARD, ENGINE.replace("wise", "generator") + "}")
    assert project.warnings(edit) == [("nodes.reward.engine", "moving-judge")]


def test_one_at_an_endpoint_runs_on_the_host(project):
    checked = check_file(project.pipeline((REWARD, ENDPOINT + "}")))
    assert "judge on host" in draw_text(checked.graph)
