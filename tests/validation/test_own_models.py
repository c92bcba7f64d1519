"""Models of engines' own: found, checked and sized each by itself."""

import json
from pathlib import Path

import pytest
from model_folders import write_model, write_tokenizer

from dagrl.config.loading.loader import load_pipeline
from dagrl.validation import check_file

CRITIC = "  critic: {backend: megatron, group: train, head: value, optimizer: {lr: 1e-3}"
ENGINES = "  generator: {backend: hf"


def with_critic(project, extra, *edits):
    """The pipeline with a critic that says `extra` of itself, on one line."""
    return project.pipeline((ENGINES, f"{CRITIC}, {extra}}} #!\n{ENGINES}"), *edits)


def test_an_engine_has_the_model_of_its_source_of_weights(project):
    path = project.pipeline(
        ("  actor:\n", "  actor:\n    model: {init: {model_type: qwen2, hidden_size: 32}}\n"),
        (ENGINES, f"{CRITIC}}}\n{ENGINES}"),
    )
    pipeline = load_pipeline(path).pipeline
    actor = pipeline.engines["actor"].model
    assert actor is not None
    for name in ("actor", "reference", "generator"):
        assert pipeline.model_section(name) == ("engines", "actor", "model")
        assert pipeline.model_of(name).init == actor.init
        # Weights that are drawn bring no tokenizer.
        assert pipeline.model_of(name).tokenizer == pipeline.model.tokenizer
    assert pipeline.model_section("critic") == ("model",)
    assert pipeline.model_of("critic") is pipeline.model


@pytest.mark.parametrize(
    ("model", "place", "message"),
    [
        ("{}", "engines.critic.model", "says no model; add `path:`"),
        ("{path: gone}", "engines.critic.model.path", "gone does not exist; give a Hugging Face folder"),
        ("{init: {model_type: qwen3, hiden_size: 64}}", "engines.critic.model.init.hiden_size", "did you mean"),
        ("{init: {model_type: gpt2}}", "engines.critic.model.init.model_type", "no model type 'gpt2'; choose from"),
        (
            "{init: {model_type: qwen2, hidden_size: 66, num_attention_heads: 4, num_key_value_heads: 4}}",
            "engines.critic.model.init",
            "num_attention_heads 4 does not divide hidden_size 66",
        ),
        (
            "{init: {model_type: qwen3, vocab_size: 9}}",
            "engines.critic.model.init.vocab_size",
            "vocabulary-too-small",
        ),
    ],
)
def test_it_is_checked_as_the_pipelines_is(project, model, place, message):
    path = with_critic(project, f"model: {model}")
    problem = project.only_problem(path)
    assert problem.place == place
    assert message == problem.code or message in problem.message


def test_a_layout_has_to_fit_the_engines_own_model(project):
    sizes = "{init: {model_type: qwen3, num_attention_heads: 3, num_key_value_heads: 1, hidden_size: 48, head_dim: 16}}"
    path = with_critic(project, f"model: {sizes}, parallel: {{tensor_model_parallel_size: 2}}")
    problem = project.only_problem(path)
    assert problem.place == "engines.critic.parallel.tensor_model_parallel_size"
    assert "does not divide the model's num_attention_heads, 3" in problem.message


def test_paths_and_nulls_are_read_as_in_the_models_section(project):
    folder = project.folder / "small"
    write_model(folder, model_type="qwen3")
    path = with_critic(project, "model: {path: small}")
    assert load_pipeline(path).pipeline.model_of("critic").path == folder.resolve()
    # What reads tokens has no use for a tokenizer.
    check_file(path)
    path = with_critic(project, "model: {init: {model_type: qwen3, rope_scaling: null}}")
    assert load_pipeline(path).pipeline.model_of("critic").init == {"model_type": "qwen3", "rope_scaling": None}


def test_readers_of_text_require_a_tokenizer(project):
    folder = project.folder / "small"
    write_model(folder, model_type="qwen3")
    path = project.pipeline(("rollout, weights_from: actor}", "rollout, model: {path: small}}"))
    problem = project.only_problem(path)
    assert problem.place == "engines.generator.model.path"
    assert problem.code == "missing-tokenizer"
    write_tokenizer(folder, {"<pad>": 0, "<eos>": 2})
    assert "'<eos>' is token 1 of the pipeline's tokenizer, and 2 of its own" in project.only_problem(path).message


WORDS = {"a": 0, "b": 1, "<end>": 2}
TEACHER = "{backend: megatron, group: train, model: {path: big}, optimizer: {lr: 1e-3}}"


@pytest.fixture
def taught(project):
    """``taught(tokens, rows)``: a policy of WORDS, and a teacher with its own tokens in the folder ``big``."""

    def write(tokens: dict[str, int] | None, rows: int = 3, written: str = "teacher_logprob") -> Path:
        write_model(project.folder / "big", model_type="qwen3", vocab_size=rows)
        for name, vocabulary in (("words", WORDS), ("big", tokens)):
            (project.folder / name).mkdir(exist_ok=True)
            if vocabulary is not None:
                write_tokenizer(project.folder / name, vocabulary)
        node = f"  learned: {{op: logprob, engine: teacher, write: {written}}}\n  advantage:"
        return project.pipeline(
            ('tokenizer: {kind: characters, alphabet: "0123456789+= "}', "tokenizer: words"),
            (ENGINES, f"  teacher: {TEACHER}\n{ENGINES}"),
            ("  advantage:", node),
        )

    return write


@pytest.mark.parametrize(
    ("tokens", "rows", "message"),
    [
        (WORDS, 2, "it has rows for 2 tokens, and the pipeline's tokenizer has 3; use a teacher of the same family"),
        (
            {"b": 0, "a": 1, "<end>": 2},
            3,
            "'a' is token 0 of the pipeline's tokenizer, and 1 of its own; use a teacher",
        ),
        ({"a": 0, "b": 1, "<stop>": 2}, 3, "its tokenizer has no '<end>', token 2 of the pipeline's"),
        ({"a": 0, "b": 1}, 9, "its tokenizer has no '<end>', token 2 of the pipeline's"),
        ({"x": 0, "y": 1, "z": 2, "v": 3}, 4, "its tokenizer has no 'a', token 0"),
    ],
    ids=["smaller", "moved", "another special token", "fewer", "foreign"],
)
def test_a_teacher_needs_the_tokens_of_the_policy(project, taught, tokens, rows, message):
    problem = project.only_problem(taught(tokens, rows))
    assert (problem.place, problem.code) == ("engines.teacher.model", "other-vocabulary")
    assert message in problem.message


@pytest.mark.parametrize("tokens", [WORDS, {**WORDS, "more": 3, "<think>": 4}], ids=["the same", "more"])
def test_a_teacher_may_know_further_tokens(taught, tokens):
    assert not [each for each in check_file(taught(tokens, 8)).warnings if each.place.startswith("engines.teacher")]


def test_a_teacher_whose_tokens_are_not_listed_is_warned_of(taught):
    (warning,) = [each for each in check_file(taught(None)).warnings if each.place.startswith("engines.teacher")]
    assert (warning.place, warning.code) == ("engines.teacher.model", "unknown-tokens")


def test_tokens_of_a_teacher_in_two_files_are_compared(project, taught):
    path = taught(None)
    for name, tokens in (("vocab", {"a": 0, "b": 1}), ("added_tokens", {"<end>": 2})):
        (project.folder / "big" / f"{name}.json").write_text(json.dumps(tokens))
    (project.folder / "big" / "merges.txt").write_text("")
    check_file(path)
    (project.folder / "big" / "added_tokens.json").write_text('{"<stop>": 2}')
    assert "its tokenizer has no '<end>'" in project.only_problem(path).message


def test_a_teacher_that_draws_its_weights_may_have_its_own_alphabet(project, taught):
    other = "{init: {model_type: qwen3}, tokenizer: {kind: characters, alphabet: ab}}"
    path = taught(WORDS)
    path.write_text(path.read_text().replace("{path: big}", other))
    assert "'a' is token 0 of the pipeline's tokenizer, and 3 of its own" in project.only_problem(path).message
