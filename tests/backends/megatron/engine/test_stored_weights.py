"""Start weights out of a Megatron folder: `dist_checkpointing_path`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TP2 = {"tensor_model_parallel_size": 2}
LAYOUTS = [(1, {}), (2, TP2), (4, {**TP2, "sequence_parallel": True})]


def exported(engine: Any) -> dict[str, Any]:
    return {name: tensor for bucket in engine.export_weights(2**20) for name, tensor in bucket}


@pytest.fixture(scope="module")
def released(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of `dagrl convert`: the weights that seed 8 draws, where engines of these tests have seed 3."""
    from dagrl.backends.megatron.stored.convert import write_megatron
    from dagrl.backends.runtime.initial_weights import weight_source
    from dagrl.model_files.library_model import load_hf_config

    folder = tmp_path_factory.mktemp("released")
    write_megatron(weight_source(tiny_model, 8), load_hf_config(tiny_model), 64, folder)
    return folder


@pytest.mark.parametrize(("ranks", "parallel"), LAYOUTS, ids=["1", "tp2", "dp2tp2sp"])
def test_weights_are_those_of_the_folder_to_the_bit(
    run_engine: Callable[..., list[Any]], tiny_model: Any, released: Path, ranks: int, parallel: dict[str, Any]
) -> None:
    import torch

    from dagrl.backends.runtime.initial_weights import weight_source

    wanted = weight_source(tiny_model, 8)
    found = run_engine(ranks, exported, parallel=parallel, dist_checkpointing_path=released)[0]
    assert found.keys() == set(wanted.names())
    assert all(torch.equal(found[name], wanted.get(name)) for name in found)


@pytest.mark.parametrize(
    ("family", "ranks", "parallel"),
    [
        ("qwen3_moe", 2, {"expert_model_parallel_size": 2}),
        ("deepseek_v3", 2, {"expert_model_parallel_size": 2}),
        ("deepseek_v3", 2, {"pipeline_model_parallel_size": 2}),
    ],
    ids=["mixture-ep2", "latent-ep2", "latent-pp2"],
)
def test_experts_and_layers_find_their_ranks(
    run_engine: Callable[..., list[Any]], tiny_model: Any, tmp_path: Path, family: str, ranks: int, parallel: Any
) -> None:
    """One model whose layers are all alike, one whose layers are not: they lie in the folder in different ways."""
    import torch

    from dagrl.backends.megatron.stored.convert import write_megatron
    from dagrl.backends.runtime.initial_weights import weight_source
    from dagrl.model_files.library_model import load_hf_config

    init = {"vocab_size": 61, "pad_token_id": None, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    init |= {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False, "num_experts_per_tok": 2}
    init |= {"model_type": family, "moe_intermediate_size": 24}
    if family == "deepseek_v3":
        init |= {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 16}
        init |= {"kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
        init |= {"first_k_dense_replace": 1}
    else:
        init |= {"num_experts": 4, "norm_topk_prob": True, "head_dim": 8}
    model = tiny_model.model_copy(update={"init": init})
    wanted = weight_source(model, 8)
    write_megatron(wanted, load_hf_config(model), 64, tmp_path)
    found = run_engine(ranks, exported, model=model, parallel=parallel, dist_checkpointing_path=tmp_path)[0]
    assert found.keys() == set(wanted.names())
    assert all(torch.equal(found[name], wanted.get(name)) for name in found)


def test_an_engines_own_checkpoint_is_taken_too_without_its_optimizer(run_engine, samples, objective, tmp_path) -> None:
    import torch

    def first(engine: Any) -> Any:
        engine.update([samples], objective, tokens_per_micro_batch=40)
        engine.save(tmp_path / "step_1")
        return exported(engine)

    def second(engine: Any) -> Any:
        return engine.policy_version, exported(engine)

    trained = run_engine(1, first, optimizer={"lr": 1e-2})[0]
    version, found = run_engine(2, second, parallel=TP2, dist_checkpointing_path=tmp_path / "step_1")[0]
    assert version == 0
    assert found.keys() == trained.keys()
    assert all(torch.equal(found[name], trained[name]) for name in found)


def test_the_optimizer_starts_from_them(run_engine, samples, objective, released: Path) -> None:
    """Its float32 copies are made after loading: a step from other ones would bring the old weights back."""
    import torch

    def on_rank(engine: Any) -> float:
        before = exported(engine)
        engine.update([samples], objective, tokens_per_micro_batch=40)
        after = exported(engine)
        return max(float((after[name] - before[name]).abs().max()) for name in before)

    options = {"optimizer": {"lr": 1e-4}, "transformer": {"bf16": True}}
    moved = run_engine(1, on_rank, dist_checkpointing_path=released, **options)[0]
    assert 0 < moved < torch.finfo(torch.bfloat16).eps * 2


def test_a_critic_starts_from_a_language_model_with_a_head_of_zeros(run_engine, tiny_model, released, tmp_path) -> None:
    import torch

    from dagrl.backends.megatron.stored.convert import StoredModel
    from dagrl.backends.runtime.initial_weights import weight_source
    from dagrl.model_files.library_model import load_hf_config

    def on_rank(engine: Any) -> None:
        engine.save(tmp_path / "step")

    run_engine(2, on_rank, head="value", parallel=TP2, dist_checkpointing_path=released)
    wanted = weight_source(tiny_model, 8)
    found = dict(StoredModel(tmp_path / "step", load_hf_config(tiny_model), "value").tensors())
    assert found.pop("score.weight").tolist() == [[0.0] * 32]
    assert found.keys() == set(wanted.names()) - {"lm_head.weight"}
    assert all(torch.equal(found[name], wanted.get(name)) for name in found)
    # And a critic's own folder brings its head along, also for a reward model.
    run_engine(1, on_rank, head="reward", dist_checkpointing_path=tmp_path / "step")
    message = refusal(run_engine, released, head="reward")
    assert message == f"head: reward needs the weights of a reward model, and {released / 'release'} has none"


def refusal(run_engine: Any, folder: Path, ranks: int = 1, **fields: Any) -> str:
    """What the engine says of a folder, on every rank."""
    from dagrl.backends.megatron.engine import megatron_engine as module

    messages = []

    def load(*arguments: Any) -> None:
        with pytest.raises(ValueError) as caught:
            module_load(*arguments)
        messages.append(str(caught.value))

    module_load, module.load_start_weights = module.load_start_weights, load
    try:
        found = run_engine(ranks, lambda engine: messages[0], dist_checkpointing_path=folder, **fields)
    finally:
        module.load_start_weights = module_load
    assert len(set(found)) == 1
    return found[0]


def test_a_folder_that_does_not_fit_is_refused_in_a_sentence(run_engine, tiny_model, released, tmp_path) -> None:
    from dagrl.backends.megatron.stored.convert import write_megatron
    from dagrl.backends.runtime.initial_weights import weight_source
    from dagrl.model_files.library_model import load_hf_config

    def changed(**fields: Any) -> Any:
        return tiny_model.model_copy(update={"init": {**tiny_model.init, **fields}})

    release = released / "release"
    assert refusal(run_engine, tmp_path).startswith(
        f"{tmp_path} has no metadata.json, so it is no checkpoint in Megatron's distributed format"
    )
    wider = refusal(run_engine, released, model=changed(intermediate_size=64), ranks=2, parallel=TP2)
    assert wider == (
        f"checkpoint {release} does not fit this engine: tensor 'decoder.layers.mlp.linear_fc1.weight' is [2, 96, 32] "
        "there and [2, 128, 32] here; is it another model's?"
    )
    llama = changed(model_type="llama")
    write_megatron(weight_source(llama, 8), load_hf_config(llama), 64, tmp_path)
    assert refusal(run_engine, tmp_path) == (
        f"checkpoint {tmp_path / 'release'} does not fit this engine: it has no tensor "
        "'decoder.layers.self_attention.q_layernorm.weight'; is it another model's?"
    )


def test_weights_that_are_no_numbers_are_refused_on_every_rank(run_engine, tiny_model, tmp_path) -> None:
    """Of the rows of the gate projection, the first rank of two holds the one that is wrong."""
    from dagrl.backends.megatron.stored.convert import write_megatron
    from dagrl.backends.runtime.initial_weights import weight_source
    from dagrl.model_files.library_model import load_hf_config

    wrong = "model.layers.1.mlp.gate_proj.weight"

    class Wrong:
        def __init__(self) -> None:
            self._right = weight_source(tiny_model, 8)
            self.names, self.shape = self._right.names, self._right.shape

        def get(self, name: str) -> Any:
            tensor = self._right.get(name)
            if name == wrong:
                tensor[0, 0] = float("nan")
            return tensor

    write_megatron(Wrong(), load_hf_config(tiny_model), 64, tmp_path)
    told = refusal(run_engine, tmp_path, ranks=2, parallel=TP2)
    assert told.startswith(f"{tmp_path / 'release'}: tensor 'decoder.layers.1.mlp.linear_fc1.weight' [")
    assert told.endswith("] has NaN or infinite values; copy it again, or use another checkpoint")


def test_weights_without_a_place_are_refused(run_engine, tiny_model, released: Path) -> None:
    tied = tiny_model.model_copy(update={"init": {**tiny_model.init, "tie_word_embeddings": True}})
    message = refusal(run_engine, released, model=tied)
    assert message.endswith("it holds 1 tensor that the model does not have, 'output_layer.weight' among them")


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_pickled_objects_beside_the_tensors_are_not_touched(run_engine, released: Path, tmp_path: Path) -> None:
    """Megatron-LM puts its arguments there, and torch would load them with all that they ask for."""
    import torch

    from dagrl.backends.megatron.stored.stored_tensors import StoredTensors
    from dagrl.backends.megatron.stored.stored_writer import TensorToWrite, write_tensors

    mark = tmp_path / "was_here"
    stored = StoredTensors(released / "release")
    content = {
        key: TensorToWrite(tensor.shape, tensor.dtype, {(): (lambda key=key: stored.read(key))})
        for key, tensor in stored.tensors.items()
    }
    folder = tmp_path / "evil"
    folder.mkdir()
    write_tensors(folder, content, {"args": Evil(mark)})
    torch.save({"args": Evil(mark)}, folder / "common.pt")
    expected = run_engine(1, exported, dist_checkpointing_path=released)[0]
    found = run_engine(1, exported, dist_checkpointing_path=folder)[0]
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not mark.exists()
