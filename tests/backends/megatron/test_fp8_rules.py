"""Errors of `dagrl validate` about training in fp8."""

import pytest

from dagrl.validation import check_file

GROUPS = "  train: {cpus_per_node: 2}\n"
RATE = "    optimizer: {lr: 1e-3}\n"
SHAPE = "hidden_size: 64, num_attention_heads: 4, num_key_value_heads: 2, intermediate_size: 128"


@pytest.fixture
def with_actor(project):
    """The pipeline with these fields of Megatron's config, on GPUs of this kind; further keys and sizes besides."""

    def write(transformer: str, gpu: str = "H200", keys: str = "", shape: str = SHAPE):
        group = f"  train: {{gpus_per_node: 2, gpu: {gpu}}}\n" if gpu else GROUPS
        actor = f"{RATE}    transformer: {{{transformer}}} #!\n" + (f"    {keys}\n" if keys else "")
        edits = [(RATE, actor), *([(GROUPS, group)] if gpu else [])]
        return project.pipeline(*edits, *([(SHAPE, shape)] if shape != SHAPE else []))

    return write


@pytest.mark.parametrize(
    ("transformer", "gpu"),
    [
        ("fp8: hybrid", "H200"),
        ("fp8: e4m3, fp8_recipe: blockwise", "B200"),
        ("fp8: hybrid, fp8_recipe: tensorwise", "L40S"),
        ("fp8: hybrid, fp8_recipe: delayed", "H100"),
    ],
)
def test_models_that_can_be_trained_in_fp8(with_actor, transformer: str, gpu: str) -> None:
    assert not check_file(with_actor(transformer, gpu)).warnings


WIDE = SHAPE.replace("128", "152")
FLAT = SHAPE.replace("num_key_value_heads: 2", "num_key_value_heads: 1, head_dim: 8")


@pytest.mark.parametrize(
    ("transformer", "gpu", "keys", "shape", "field", "code", "named"),
    [
        ("fp8: hybrid", "", "", SHAPE, "fp8", "needs-gpus", "train"),
        ("fp8: hybrid", "A100-80GB", "", SHAPE, "fp8", "fp8-gpu", "Ampere"),
        ("fp8: hybrid", "L4", "", SHAPE, "fp8", "fp8-gpu", "tensorwise"),
        ("fp8: hybrid, bf16: false", "H200", "", SHAPE, "fp8", "fp8-dtype", "bf16"),
        ("fp8: hybrid", "H200", "lora: {}", SHAPE, "fp8", "fp8-adapters", "adapters"),
        ("fp8: hybrid", "H200", "parallel: {tensor_model_parallel_size: 2}", WIDE, "fp8", "fp8-sizes", "intermediate"),
        ("fp8: hybrid", "H200", "", FLAT, "fp8", "fp8-sizes", "num_key_value_heads"),
        ("fp8_recipe: blockwise", "H200", "", SHAPE, "fp8_recipe", "nothing-in-fp8", "fp8: hybrid"),
    ],
)
def test_unsupported_fp8_training_is_one_sentence(
    project, with_actor, transformer, gpu, keys, shape, field, code, named
) -> None:
    path = with_actor(transformer, gpu, keys, shape)
    project.assert_problem(path, f"engines.actor.transformer.{field}", code, named)
