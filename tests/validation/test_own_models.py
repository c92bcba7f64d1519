"""Models of engines' own: found, checked and sized each by itself."""

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
