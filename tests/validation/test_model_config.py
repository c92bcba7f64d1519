import pytest

from dagrl.validation import check_file


@pytest.mark.parametrize(
    ("field", "fragment"),
    [
        ("num_layers: 2", "Qwen3Config has no field `num_layers`; "),
        ("rms_norm_epsilon: 1e-6", "Qwen3Config has no field `rms_norm_epsilon`; did you mean `rms_norm_eps`?"),
        ("tie_word_embeddings: 1", "expected true or false, got 1; write it so, or remove it"),
        ("num_experts: 4", "Qwen3Config has no field `num_experts`; "),
        ("base_model_tp_plan: {}", "Qwen3Config has no field `base_model_tp_plan`; "),
    ],
)
def test_fields_of_random_weights_are_held_against_transformers(project, field, fragment):
    path = project.pipeline(("  init: {model_type: qwen3,", f"  init:\n   {{model_type: qwen3,\n    {field}, #!\n   "))
    project.assert_problem(path, f"model.init.{field.partition(':')[0]}", fragment)


@pytest.mark.parametrize(
    "fields",
    [
        "rope_theta: 1e6",
        "rope_parameters: {rope_type: default, rope_theta: 1e6}",
        "dtype: bfloat16",
        "pad_token_id: null",
        "head_dim: 32",
        "num_hidden_layers: 1, layer_types: [full_attention]",
    ],
)
def test_fields_of_the_class_of_its_base_and_older_names_pass(project, fields):
    check_file(project.pipeline(("{model_type: qwen3,", f"{{model_type: qwen3, {fields},")))


def test_a_model_type_that_is_not_known_here_is_left_to_the_engine(project):
    path = project.pipeline(("model_type: qwen3", "model_type: gpt2, n_embd: 64, no_such_field: 1"))
    assert project.only_problem(path).place == "model.init.model_type"
