import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.config.schema import ModelSpec
from dagrl.data.batch import Batch

OPTIONS: dict[str, Any] = {
    "optimizer": {"lr": 1e-2, "adam_eps": 1e-2},
    # Of 10 steps, so that a run resumes from step 2 within its warm-up.
    "lr_schedule": {"lr_decay_style": "cosine", "lr_warmup_ratio": 0.35},
}
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {"virtual_pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}


def update(engine: Any, batch: Batch, objective: Any) -> dict[str, float]:
    from megatron.core import parallel_state

    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine = batch.take(np.arange(rank, len(batch), size))
    metrics = engine.update([mine, mine], objective, tokens_per_micro_batch=40)
    return {name: stat.mean for name, stat in metrics.items()}


@pytest.fixture(scope="module")
def saved(run_engine: Callable[..., list[Any]], samples: Batch, objective: Any, tmp_path_factory) -> dict[str, Any]:
    """A run on two replicas: saved after two updates, and what the two updates after it report."""
    folder = tmp_path_factory.mktemp("run") / "step_2"

    def on_rank(engine: Any) -> list[dict[str, float]]:
        for _ in range(2):
            update(engine, samples, objective)
        engine.save(folder)
        return [update(engine, samples, objective) for _ in range(2)]

    return {"folder": folder, "next": run_engine(2, on_rank, **OPTIONS)[0]}


def resumed(
    run_engine: Any, world_size: int, saved: dict[str, Any], samples: Batch, objective: Any, **fields: Any
) -> Any:
    def on_rank(engine: Any) -> tuple[int, list[dict[str, float]]]:
        engine.load(saved["folder"])
        version = engine.policy_version
        return version, [update(engine, samples, objective) for _ in range(2)]

    return run_engine(world_size, on_rank, **{**OPTIONS, **fields})[0]


def test_the_same_layout_resumes_to_the_bit(run_engine, saved, samples: Batch, objective: Any) -> None:
    assert resumed(run_engine, 2, saved, samples, objective) == (2, saved["next"])


LAYOUTS = {
    "1": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, TP2),
    "tp2-sp": (2, {**TP2, "sequence_parallel": True}),
    "dp2-tp2": (4, {**TP2, "sequence_parallel": True}),
    "pp2": (2, PP2),
    "pp2-vpp2": (2, {**PP2, **VPP2}),
    "cp2": (2, CP2),
    "tp2-pp2-vpp2": (4, {**TP2, **PP2, **VPP2, "sequence_parallel": True}),
    "ep2": (2, EP2),
    "ep2-tp2": (2, {**EP2, **TP2, "sequence_parallel": True}),
    "ep2-pp2": (4, {**EP2, **PP2}),
    "ep4": (4, {"expert_model_parallel_size": 4}),
}


@pytest.mark.parametrize(("world_size", "parallel"), [LAYOUTS["tp2"], LAYOUTS["dp2-tp2"]], ids=["tp2", "dp2-tp2"])
def test_other_layouts_resume(run_engine, saved, samples: Batch, objective: Any, world_size: int, parallel) -> None:
    version, metrics = resumed(run_engine, world_size, saved, samples, objective, parallel=parallel)
    assert version == 2
    for found, expected in zip(metrics, saved["next"], strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


def init(**fields: Any) -> dict[str, Any]:
    """Four layers: enough for two chunks on each of two stages."""
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    return {"initializer_range": 0.15, "pad_token_id": None, **sizes, **heads, **fields}


EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
MODELS = {
    "tied": init(model_type="qwen3", head_dim=8, tie_word_embeddings=True),
    "mixture": init(model_type="qwen3_moe", head_dim=8, num_experts=4, norm_topk_prob=True, **EXPERTS),
    # A dense layer, so that layers are not stored stacked, and a bias that moves without a gradient.
    "latent": init(model_type="deepseek_v3", **EXPERTS, **LATENT, **ROUTED) | {"num_key_value_heads": 4},
}
PLAIN = {"optimizer": {**OPTIONS["optimizer"], "use_distributed_optimizer": False}}
LORA = {"lora": {"rank": 4}}


def weights(engine: Any) -> dict[str, Any]:
    return {name: tensor for bucket in engine.export_weights(2**20) for name, tensor in bucket}


def exported_weights(folder: Path, model: ModelSpec, spec: MegatronEngineSpec) -> dict[str, Any]:
    from dagrl.backends.megatron.stored.convert import StoredAdapters, StoredModel, base_of
    from dagrl.model_files.library_model import load_hf_config

    config = load_hf_config(model)
    if spec.lora is None:
        return dict(StoredModel(folder, config).tensors())
    return dict(StoredAdapters(folder, config, spec.lora).merged(base_of(spec, model, 3, config)))


@pytest.mark.parametrize(
    ("model", "options", "layouts"),
    [
        ("tied", {}, ["dp2", "pp2", "tp2-pp2-vpp2", "cp2", "1"]),
        ("tied", PLAIN, ["pp2", "tp2", "pp2-vpp2"]),
        ("mixture", {}, ["1", "ep2", "ep2-tp2", "ep2-pp2", "dp2"]),
        ("mixture", PLAIN, ["ep2", "tp2-sp", "ep4"]),
        ("latent", {}, ["1", "ep2", "pp2"]),
        ("tied", LORA, ["dp2", "tp2-pp2-vpp2"]),
        ("mixture", LORA, ["1", "ep2-tp2"]),
        # Adapters of a mixture, and latent attention without adapters, have cases of their own.
        pytest.param("latent", LORA, ["ep2", "pp2"], marks=pytest.mark.soak),
    ],
    ids=["dense", "dense-plain", "mixture", "mixture-plain", "latent", "dense-lora", "mixture-lora", "latent-lora"],
)
def test_a_run_that_moves_from_layout_to_layout_takes_the_same_steps(
    run_engine, tiny_model, samples: Batch, objective: Any, tmp_path: Path, model: str, options: Any, layouts: list[str]
) -> None:
    """Each layout loads what the one before it saved; weights to the bit, metrics as of a run that never moves."""
    import torch

    fields = {**OPTIONS, **options, "model": tiny_model.model_copy(update={"init": MODELS[model]})}
    spec = MegatronEngineSpec.model_validate({"backend": "megatron", "group": "train", **options})

    def whole(engine: Any) -> list[dict[str, float]]:
        return [update(engine, samples, objective) for _ in layouts]

    def part(number: int) -> Any:
        def on_rank(engine: Any) -> tuple[dict[str, float], Any, Any]:
            if number:
                engine.load(tmp_path / f"step_{number}")
            before = weights(engine)
            metrics = update(engine, samples, objective)
            engine.save(tmp_path / f"step_{number + 1}")
            return metrics, before, weights(engine)

        return on_rank

    ranks, parallel = LAYOUTS[layouts[0]]
    expected = run_engine(ranks, whole, **fields, parallel=parallel)[0]
    saved: dict[str, Any] = {}
    for number, name in enumerate(layouts):
        ranks, parallel = LAYOUTS[name]
        metrics, before, after = run_engine(ranks, part(number), **fields, parallel=parallel)[0]
        assert metrics == pytest.approx(expected[number], rel=1e-5), f"step {number + 1} on {name}"
        for tensor, value in saved.items():
            bound = 1e-6 if "lora" in options else 0
            torch.testing.assert_close(before[tensor], value, rtol=0, atol=bound, msg=f"{tensor} loaded on {name}")
        # What `dagrl export` reads, in one process and without the layout.
        exported = exported_weights(tmp_path / f"step_{number + 1}", fields["model"], spec)
        assert exported.keys() == after.keys()
        for tensor, value in exported.items():
            # Layouts add up the product of an adapter in another order.
            bound = 1e-6 if "lora" in options else 0
            torch.testing.assert_close(after[tensor], value, rtol=0, atol=bound, msg=f"{tensor} as stored by {name}")
        saved = after


def test_an_engine_that_has_trained_goes_back(run_engine, saved, samples: Batch, objective: Any) -> None:
    def on_rank(engine: Any) -> Any:
        for _ in range(3):
            update(engine, samples, objective)
        engine.load(saved["folder"])
        return [update(engine, samples, objective) for _ in range(2)]

    assert run_engine(2, on_rank, **OPTIONS)[0] == saved["next"]


def test_todays_learning_rate_counts_when_a_run_is_resumed(run_engine, saved, samples: Batch, objective: Any) -> None:
    optimizer = {**OPTIONS["optimizer"], "lr": 3e-3}
    _, metrics = resumed(run_engine, 1, saved, samples, objective, optimizer=optimizer, lr_schedule={})
    assert [step["lr"] for step in metrics] == [3e-3, 3e-3]


def test_a_hybrid_optimizer_has_no_state_before_its_first_step(
    run_engine, samples: Batch, objective: Any, tmp_path: Path
) -> None:
    """It needs a GPU: here is another optimizer, which is only said to be one."""

    def on_rank(engine: Any) -> bool:
        engine._training.optimizer.config.optimizer_cpu_offload = True
        for asynchronous in (False, True):
            with pytest.raises(RuntimeError, match="optimizer_cpu_offload there is nothing to save before the first"):
                engine.save(tmp_path / "early", asynchronous=asynchronous)
        update(engine, samples, objective)
        engine.save(tmp_path / "saved")
        return (tmp_path / "early").exists()

    assert run_engine(1, on_rank, **OPTIONS) == [False]
    assert (tmp_path / "saved" / "metadata.json").is_file()


def test_random_generators_continue_where_they_were(run_engine, tmp_path: Path) -> None:
    def on_rank(engine: Any) -> tuple[Any, Any]:
        import torch
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        def draw() -> list[float]:
            with get_cuda_rng_tracker().fork():
                tracked = torch.rand(1).item()
            return [torch.rand(1).item(), tracked]

        draw()
        engine.save(tmp_path / "step_1")
        expected = draw()
        draw()
        engine.load(tmp_path / "step_1")
        return expected, draw()

    for expected, found in run_engine(2, on_rank, parallel=TP2):
        assert found == expected


def test_half_precision_weights_resume_from_float32_ones(run_engine, samples: Batch, objective: Any, tmp_path) -> None:
    options = {**OPTIONS, "transformer": {"bf16": True}}

    def first(engine: Any) -> Any:
        update(engine, samples, objective)
        engine.save(tmp_path / "step_1")
        return update(engine, samples, objective)

    def second(engine: Any) -> Any:
        engine.load(tmp_path / "step_1")
        return update(engine, samples, objective)

    assert run_engine(2, first, **options) == run_engine(2, second, **options)


def load_error(run_engine: Any, folder: Path, **fields: Any) -> str:
    def on_rank(engine: Any) -> str:
        with pytest.raises((ValueError, OSError)) as caught:
            engine.load(folder)
        return str(caught.value)

    return run_engine(1, on_rank, **fields)[0]


def test_a_folder_that_cannot_be_resumed_from_is_refused_in_a_sentence(run_engine, saved, tmp_path: Path) -> None:
    import shutil

    assert load_error(run_engine, tmp_path / "gone") == f"checkpoint {tmp_path / 'gone'} does not exist"
    torn = shutil.copytree(saved["folder"], tmp_path / "torn")
    name = max(json.loads((torn / "files.json").read_text()).items(), key=lambda item: item[1])[0]
    content = (torn / name).read_bytes()
    # Among the values of the file's largest tensor.
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    (torn / name).write_bytes(flipped)
    assert load_error(run_engine, torn) == f"cannot read checkpoint {torn}; resume from an earlier one"
    (torn / name).write_bytes(content[:-1])
    assert f"is torn: {name} has {len(content) - 1} bytes, not {len(content)}" in load_error(run_engine, torn)
    (torn / name).unlink()
    assert f"is torn: {name} is missing" in load_error(run_engine, torn)
    (torn / "files.json").unlink()
    assert "is not a finished checkpoint" in load_error(run_engine, torn)
    plain = load_error(run_engine, saved["folder"], optimizer={"use_distributed_optimizer": False})
    assert "was saved with optimizer.use_distributed_optimizer: True" in plain


def test_a_checkpoint_of_another_model_is_refused(run_engine, saved, tiny_model) -> None:
    wider = tiny_model.model_copy(update={"init": {**tiny_model.init, "intermediate_size": 64}})
    message = load_error(run_engine, saved["folder"], model=wider)
    assert message.startswith(f"checkpoint {saved['folder']} does not fit this engine: ")


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("where", [".metadata", "common_state/shard_0_1", "rng/shard_0_2", "common.pt", "a weight"])
def test_pickles_that_run_code_are_refused_and_do_not_run(run_engine, saved, tmp_path: Path, where: str) -> None:
    import io
    import pickle
    import shutil

    import torch
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    folder, mark = shutil.copytree(saved["folder"], tmp_path / "evil"), tmp_path / "was_here"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    if where == ".metadata":
        (folder / where).write_bytes(pickle.dumps(Evil(mark)))
    elif where == "common.pt":
        torch.save(Evil(mark), folder / where)
    else:
        key = next(iter(metadata.state_dict_metadata)) if where == "a weight" else where
        buffer = io.BytesIO()
        torch.save([Evil(mark)], buffer)
        (folder / "evil.distcp").write_bytes(buffer.getvalue())
        index = next(each for each in metadata.storage_data if each.fqn == key)
        place = type(metadata.storage_data[index])("evil.distcp", 0, len(buffer.getvalue()))
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(key)] = place
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.name != "files.json"}
    (folder / "files.json").write_text(json.dumps(sizes))

    def on_rank(engine: Any) -> str:
        try:
            engine.load(folder)
        except ValueError as error:
            return str(error)
        return ""

    (told, *_) = run_engine(2, on_rank, **OPTIONS)
    assert not mark.exists()
    assert str(folder) in told if where != "common.pt" else not told


def test_a_pickle_for_transformer_engine_that_runs_code_is_refused(tmp_path: Path) -> None:
    import pickle

    import torch

    from dagrl.backends.megatron.engine.checkpoint import check_extra_states

    def stored(content: Any) -> dict[str, Any]:
        return {"layer._extra_state": torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8)}

    check_extra_states(tmp_path, stored({"scale_fwd": torch.ones(2), "extra_fp8_variables": {"num_gemms": 1}}))
    with pytest.raises(ValueError, match="would run code when read"):
        check_extra_states(tmp_path, stored({"recipe": Evil(tmp_path / "was_here")}))
    assert not (tmp_path / "was_here").exists()


@pytest.mark.parametrize("fields", [{}, {"lora": {"rank": 4}}], ids=["whole", "adapters"])
def test_an_engine_that_is_not_trained_takes_the_weights_alone(
    run_engine, samples: Batch, objective: Any, tmp_path: Path, fields: dict[str, Any]
) -> None:
    folder = tmp_path / "step_1"

    def logprobs(engine: Any) -> list[float]:
        return engine.logprobs(samples, temperature=1.0, tokens_per_micro_batch=40).values.tolist()

    def train(engine: Any) -> list[float]:
        update(engine, samples, objective)
        engine.save(folder)
        return logprobs(engine)

    def look(engine: Any) -> tuple[list[float], int, list[float], list[float]]:
        start = logprobs(engine)
        engine.load(folder)
        loaded = logprobs(engine)
        with engine.start_weights():
            return start, engine.policy_version, loaded, logprobs(engine)

    (trained,) = run_engine(1, train, **OPTIONS, **fields)
    ((start, version, loaded, again),) = run_engine(
        1, look, trainable=False, keep_start_weights=True, **OPTIONS, **fields
    )
    assert version == 1
    assert loaded == trained != start
    assert again == start
