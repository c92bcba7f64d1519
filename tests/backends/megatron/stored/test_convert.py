"""Hugging Face folders to Megatron's format and back, without a process group; what they hold, to the bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TP2 = {"tensor_model_parallel_size": 2}


class Weights(dict[str, Any]):
    """A weight source."""

    def names(self) -> list[str]:
        return list(self)

    def get(self, name: str) -> Any:  # type: ignore[override]
        return self[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self[name].shape)


def weights_of(hf_model: Any, dtype: Any = None) -> Weights:
    from dagrl.backends.runtime.initial_weights import published_shapes
    from dagrl.model_files.library_model import published_tensors

    tensors = published_tensors(hf_model)
    return Weights((name, tensors[name].detach().to(dtype)) for name in published_shapes(hf_model.config))


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    import torch

    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


def test_every_family_comes_back_to_the_bit(hf_model: Any, tmp_path: Path) -> None:
    import torch

    from dagrl.backends.megatron.stored.convert import StoredModel, write_megatron

    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(dtype)
        folder.mkdir()
        weights = weights_of(hf_model, dtype)
        if hf_model.config.model_type == "qwen3_5_text":
            with pytest.raises(ValueError, match="engines read the Hugging Face folder itself"):
                write_megatron(weights, hf_model.config, 64, folder)
            continue
        write_megatron(weights, hf_model.config, 64, folder)
        assert same(dict(StoredModel(folder, hf_model.config).tensors()), weights)


@pytest.mark.parametrize(
    ("kind", "ranks", "parallel"),
    [("qwen3", 1, {}), ("qwen3", 2, TP2), ("qwen3_5_text", 2, TP2)],
    ids=["one", "tp2", "gated-delta-tp2"],
)
def test_a_checkpoint_holds_what_its_engine_exports(
    run_engine: Callable[..., list[Any]],
    tiny_model: Any,
    tmp_path: Path,
    kind: str,
    ranks: int,
    parallel: dict[str, int],
) -> None:
    from tiny_models import tiny_model_spec

    from dagrl.backends.megatron.stored.convert import StoredModel
    from dagrl.model_files.library_model import load_hf_config

    def on_rank(engine: Any) -> dict[str, Any]:
        engine.save(tmp_path / "step")
        return {name: tensor for bucket in engine.export_weights(2**20) for name, tensor in bucket}

    model = tiny_model if kind == "qwen3" else tiny_model_spec(kind)
    exported = run_engine(ranks, on_rank, model=model, parallel=parallel)[0]
    assert same(dict(StoredModel(tmp_path / "step", load_hf_config(model)).tensors()), exported)


def test_a_checkpoint_of_a_family_without_tables_is_written_by_the_whole_model(
    run_engine: Callable[..., list[Any]], run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """In a process that is no rank, as `dagrl export` is."""
    from tiny_models import tiny_model_spec

    from dagrl.backends.megatron.stored.convert import write_hf
    from dagrl.model_files.stored_weights import SafetensorsFolder

    model = tiny_model_spec("gpt_oss")

    def on_rank(engine: Any) -> dict[str, Any]:
        engine.save(tmp_path / "step")
        return {name: tensor for bucket in engine.export_weights(2**20) for name, tensor in bucket}

    exported = run_engine(2, on_rank, model=model, parallel={"expert_model_parallel_size": 2})[0]
    (tmp_path / "hf").mkdir()

    def alone(rank: int) -> None:
        write_hf(tmp_path / "step", model, tmp_path / "hf", None, 0)

    run_ranks(1, alone, joined=False)
    written = SafetensorsFolder(tmp_path / "hf")
    assert same({name: written.get(name) for name in written.names()}, exported)


def test_one_parameter_is_in_memory_at_a_time(qwen3: Any, tmp_path: Path) -> None:
    """Each is asked for when it is written, and not kept."""
    import gc
    import weakref

    from dagrl.backends.megatron.stored.convert import write_megatron

    alive: list[Any] = []
    most = 0

    class Lazy(Weights):
        def get(self, name: str) -> Any:  # type: ignore[override]
            nonlocal most
            gc.collect()
            most = max(most, sum(each() is not None for each in alive))
            copy = self[name].clone()
            alive.append(weakref.ref(copy))
            return copy

    weights = Lazy(weights_of(qwen3))
    # What is there already need not be looked through each time.
    gc.freeze()
    try:
        write_megatron(weights, qwen3.config, 64, tmp_path)
    finally:
        gc.unfreeze()
    # Query, key and value are one parameter; a layer earlier may still be on its way to the file.
    assert len(alive) > 20
    assert most <= 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 5}, "'decoder.layers.self_attention.linear_qkv.layer_norm_weight' is there for [4]"),
        ({"num_hidden_layers": 3}, "'decoder.layers.self_attention.linear_qkv.layer_norm_weight' is there for [4]"),
        ({"intermediate_size": 64}, "'decoder.layers.mlp.linear_fc1.weight' is [96, 32] there, and [128, 32] by the"),
        ({"tie_word_embeddings": True}, "it holds 1 tensor that the model does not have, 'output_layer.weight' among"),
    ],
    ids=["more-layers", "fewer-layers", "width", "tied"],
)
def test_another_config_is_refused_in_a_sentence(qwen3: Any, tmp_path: Path, change: dict, message: str) -> None:
    import copy

    from dagrl.backends.megatron.stored.convert import StoredModel, write_megatron

    write_megatron(weights_of(qwen3), qwen3.config, 64, tmp_path)
    config = copy.deepcopy(qwen3.config)
    for name, value in change.items():
        setattr(config, name, value)
    if "num_hidden_layers" in change:
        config.layer_types = ["full_attention"] * change["num_hidden_layers"]
    with pytest.raises(ValueError, match="is no model of this config") as caught:
        StoredModel(tmp_path, config)
    assert message in str(caught.value)
    assert str(tmp_path / "release") in str(caught.value)


def test_weights_of_another_config_are_refused_before_anything_is_written(qwen3: Any, tmp_path: Path) -> None:
    from dagrl.backends.megatron.stored.convert import write_megatron

    weights = weights_of(qwen3)
    name = "model.layers.1.mlp.up_proj.weight"
    for changed, message in (
        (
            Weights(weights | {name: weights[name][:-1]}),
            rf"tensor '{name}' is \[47, 32\], but its config says \[48, 32\]",
        ),
        (
            Weights(weights | {"extra": weights[name]}),
            "hold 1 tensor that a qwen3 of this config does not have, 'extra'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            write_megatron(changed, qwen3.config, 64, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_layers_that_predict_further_tokens_are_left_out(
    hf_model_of: Callable[[str], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the engine leaves them out; but only as many as the config says, and a layer more is a mistake."""
    import copy

    import torch

    from dagrl.backends.megatron.stored.convert import StoredModel, write_megatron

    model = hf_model_of("deepseek_v3")
    config, weights = copy.deepcopy(model.config), weights_of(model)
    config.num_nextn_predict_layers = 1
    write_megatron(Weights(weights | {"model.layers.4.enorm.weight": torch.ones(32)}), config, 64, tmp_path)
    assert same(dict(StoredModel(tmp_path, config).tensors()), weights)
    assert [message for message in caplog.messages if "model.layers.4.enorm.weight" in message]
    with pytest.raises(ValueError, match=r"1 tensor that a deepseek_v3 .* does not have, 'model.layers.5.enorm"):
        write_megatron(Weights(weights | {"model.layers.5.enorm.weight": torch.ones(32)}), config, 64, tmp_path)


def test_a_folder_without_a_model_of_this_vocabulary_is_refused(tmp_path: Path, qwen3: Any) -> None:
    import torch

    from dagrl.backends.megatron.stored.convert import StoredModel
    from dagrl.backends.megatron.stored.stored_writer import TensorToWrite, write_tensors

    def refusal(key: str) -> str:
        write_tensors(tmp_path, {key: TensorToWrite((2,), torch.float32, {(): lambda: torch.ones(2)})}, {})
        with pytest.raises(ValueError) as caught:
            StoredModel(tmp_path, qwen3.config)
        return str(caught.value)

    embedding = "embedding.word_embeddings.weight"
    assert refusal("a") == f"{tmp_path} has no model: it has no tensor '{embedding}'"
    assert refusal(embedding) == f"{tmp_path} is another model's: its vocabulary has 2 rows, and this one 59 tokens"
