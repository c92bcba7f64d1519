"""What a critic's, a reward model's and GAE's nodes may not say."""

import json
from pathlib import Path

import pytest
from model_folders import write_model, write_tokenizer
from project import assert_code

from dagrl.validation import check_file

CRITIC = "  critic: {backend: megatron, group: train, head: value, optimizer: {lr: 1e-3}}\n"
NODES = (
    "  values: {op: values, engine: critic}\n"
    "  advantage: {op: advantage, estimator: gae, gamma: 0.99, lam: 0.95}\n"
    "  learn: {op: critic, engine: critic, mini_batch: 4}\n"
)
PPO = (
    ("  generator: {backend", CRITIC + "  generator: {backend"),
    ("  advantage: {op: advantage, estimator: grpo}\n", NODES),
    ("n: 4, sampling", "n: 1, sampling"),
)


@pytest.fixture
def ppo(project):
    """The pipeline with a critic; further edits come after those that make it so."""

    def make(*edits):
        text = project.pipeline(*PPO).read_text()
        for old, new in edits:
            assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the pipeline"
            text = text.replace(old, new)
        return project.write("p.yaml", text)

    return make


def test_a_right_one_takes_single_responses(ppo):
    checked = check_file(ppo())
    assert checked.warnings == ()
    inputs = checked.graph.nodes["learn"].inputs
    assert (inputs["value"].node, inputs["return"].node) == ("values", "advantage")
    assert checked.graph.order.index("values") < checked.graph.order.index("advantage")


CASES = {
    "another estimator's option": (
        "estimator: gae, gamma: 0.99, lam: 0.95}\n  learn: {op: critic, engine: critic, mini_batch: 4}\n",
        "estimator: reinforce_plus_plus, gamma: 0.99} #!\n",
        "nodes.advantage.gamma",
        "option-without-effect",
    ),
    "no values": (
        "  values: {op: values, engine: critic}\n  advantage: {op: advantage, estimator: gae, gamma: 0.99,",
        "  advantage: {op: advantage, estimator: gae, gamma: 0.99,",
        "nodes.advantage",
        "missing-column",
    ),
    "a policy's values": (
        "{op: values, engine: critic}",
        "{op: values, engine: actor} #!",
        "nodes.values.engine",
        "wrong-head",
    ),
    "values of a generator": (
        "{op: values, engine: critic}",
        "{op: values, engine: generator} #!",
        "nodes.values.engine",
        "wrong-backend",
    ),
    "mini-batch": ("mini_batch: 4}", "mini_batch: 3} #!", "nodes.learn.mini_batch", "uneven-mini-batches"),
    "micro-batch": (
        "{op: values, engine: critic}",
        "{op: values, engine: critic, tokens_per_micro_batch: 20} #!",
        "nodes.values.tokens_per_micro_batch",
        "micro-batch-too-small",
    ),
    "no learning rate": (
        "head: value, optimizer: {lr: 1e-3}}",
        "head: value} #!",
        "engines.critic.optimizer",
        "a node trains the engine, and it has no learning rate; add",
    ),
    "warm-up without end": (
        "engine: actor, loss",
        "engine: actor, critic_warmup: 10, loss",
        "nodes.update.critic_warmup",
        "warmup-too-long",
    ),
    "a follower": (
        "group: rollout, weights_from: actor}",
        "group: rollout, weights_from: critic} #!",
        "engines.generator.weights_from",
        "wrong-head",
    ),
}


@pytest.mark.parametrize(("old", "new", "place", "fragment"), CASES.values(), ids=CASES.keys())
def test_errors_of_a_critic_are_reported(project, ppo, old, new, place, fragment):
    problem = project.only_problem(ppo((old, new)))
    assert problem.place == place
    assert_code(problem, fragment)


def test_a_warm_up_needs_a_critic(project):
    path = project.pipeline(("engine: actor, loss", "engine: actor, critic_warmup: 2, loss"))
    assert project.only_problem(path).code == "missing-critic"


def test_a_critic_that_nothing_trains_is_a_warning(ppo):
    path = ppo(("  learn: {op: critic, engine: critic, mini_batch: 4}\n", ""))
    (warning,) = check_file(path).warnings
    assert warning.code == "untrained-critic"


JUDGE = "  judge: {backend: hf, group: rollout, head: reward, model: {path: judge}"
REWARD = ("{op: reward, fn: exact}", "{op: reward_model, engine: judge}")


@pytest.fixture
def judged(project):
    """The pipeline with a reward model, and what its folder says it is."""

    def make(classes=("Qwen3ForSequenceClassification",), extra="", reward=REWARD):
        folder = project.folder / "judge"
        write_model(folder, head="reward", model_type="qwen3", vocab_size=99, architectures=list(classes))
        write_tokenizer(folder, {"a": 0})
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        engine = f"{JUDGE}{extra}}} #!\n"
        return project.pipeline(("  generator: {backend", engine + "  generator: {backend"), reward)

    return make


def test_a_classifier_reads_messages_with_a_tokenizer_of_its_own(judged):
    checked = check_file(judged())
    assert checked.warnings == ()
    assert set(checked.graph.nodes["reward"].inputs) == {"messages", "response_tokens"}
    assert "reward" in checked.graph.validation.nodes


def test_a_language_models_folder_has_no_score(project, judged):
    path = judged(classes=["Qwen3ForCausalLM"])
    project.assert_problem(path, "engines.judge.model.path", "no-reward-head", "Qwen3ForCausalLM", "judge")


def test_a_folder_that_does_not_say_what_it_is_is_left_to_the_engine(judged):
    path = judged()
    config = path.parent / "judge" / "config.json"
    for classes in (None, []):
        config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": classes}))
        check_file(path)


def test_a_classifier_takes_weights_from_no_engine(project, judged):
    problems = {problem.place: problem.message for problem in project.problems(judged(extra=", weights_from: actor"))}
    assert "takes no weights from another" in problems["engines.judge.weights_from"]


def test_a_classifier_does_not_generate(project, judged):
    path = judged(reward=("{op: rollout, engine: generator", "{op: rollout, engine: judge"))
    problem = project.only_problem(path)
    assert problem.place == "nodes.rollout.engine"
    assert "`judge` has a reward head, and op rollout needs the language model's" in problem.message


TOKENS = {"a": 0, "b": 1, "<end>": 2}


@pytest.mark.parametrize(
    ("rows", "tokens", "message", "is_error"),
    [
        (2, TOKENS, "it has rows for 2 tokens, and the pipeline's tokenizer has 3;", True),
        (3, {"b": 0, "a": 1, "<end>": 2}, "'a' is token 0 of the pipeline's tokenizer, and 1 of its own", True),
        (3, {"a": 0, "b": 1}, "'<end>'", False),
        (9, {**TOKENS, "more": 3}, "", False),
    ],
)
def test_a_critic_reads_the_tokens_of_the_policy(project, ppo, rows, tokens, message, is_error):
    for name, vocabulary in (("words", TOKENS), ("small", tokens)):
        folder = project.folder / name
        folder.mkdir(exist_ok=True)
        write_tokenizer(folder, vocabulary)
    write_model(folder, model_type="qwen3", vocab_size=rows)
    path = ppo(
        ('tokenizer: {kind: characters, alphabet: "0123456789+= "}', "tokenizer: words"),
        ("head: value, optimizer", "head: value, model: {path: small}, optimizer"),
    )
    if is_error:
        problem = project.only_problem(path)
        assert problem.place == "engines.critic.model"
        assert message in problem.message
    else:
        warnings = [warning.message for warning in check_file(path).warnings]
        assert [message in warning for warning in warnings] == ([True] if message else [])


def test_a_critic_needs_no_rows_for_tokens_that_the_policy_has_none_for(project, ppo):
    """As the token for images in the tokenizers of Gemma's models for text."""
    folder = project.folder / "small"
    write_model(folder, model_type="qwen3", vocab_size=3)
    content = {"model": {"type": "BPE", "vocab": TOKENS, "merges": []}}
    image = {"id": 3, "content": "<image>"}
    (folder / "tokenizer.json").write_text(json.dumps({**content, "added_tokens": [image]}))
    path = ppo(
        ('tokenizer: {kind: characters, alphabet: "0123456789+= "}', "tokenizer: small"),
        ("hidden_size: 64", "hidden_size: 64, vocab_size: 3"),
        ("head: value, optimizer", "head: value, model: {path: small}, optimizer"),
    )
    check_file(path)


def test_examples_of_the_docs_are_right(project):
    document = (Path(__file__).parents[2] / "docs" / "critic.md").read_text()
    ppo, _, _ = (block.partition("```")[0] for block in document.split("```yaml\n")[1:])
    project.pipeline()
    (project.folder / "p.yaml").rename(project.folder / "base.yaml")
    path = project.write("p.yaml", f"extends: base.yaml\n{ppo}")
    assert check_file(path).warnings == ()


def test_values_of_another_critic_are_reported(project, ppo):
    path = ppo(
        (CRITIC, CRITIC + CRITIC.replace("critic:", "other:")),
        ("learn: {op: critic, engine: critic", "learn: {op: critic, engine: other"),
    )
    problem = project.only_problem(path)
    assert problem.place == "nodes.learn.engine"
    assert problem.code == "values-of-another-critic"
