"""Low-rank adapters: the log-probs and gradients of PEFT's, in any layout, and what they leave as it is."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from gradients import assert_same, gradients_of, hf_gradients
from layout_cases import DENSE, LATENT, LATENT_SHAPE, MIXTURE, parallel_of
from weighted_likelihood import WeightedLikelihood

from dagrl.backends.families.registry import shape_of
from dagrl.backends.families.tensors import model_tensors
from dagrl.backends.megatron.lora import LoraSpec, adapters
from dagrl.backends.megatron.section import MegatronEngineSpec, ParallelSpec, coordinates
from dagrl.config.schema import ModelSpec

if TYPE_CHECKING:
    from dagrl.data.batch import Batch

LORA = {"rank": 4, "alpha": 8}
BUDGET = 48


def model_of(folder: Path) -> ModelSpec:
    return ModelSpec.model_validate({"path": folder, "tokenizer": {"kind": "characters", "alphabet": "ab"}})


SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
GATED_LAYERS = ["linear_attention", "full_attention"] * 2
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("dense"), model_type="qwen3", num_key_value_heads=2, head_dim=8)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    return saved(folder, model_type="qwen3_moe", num_key_value_heads=2, head_dim=8, **EXPERTS)


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("latent"), model_type="deepseek_v3", num_key_value_heads=4, **LATENT_SHAPE)


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of its layers are gated delta nets, whose projections have no adapters."""
    fields = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "layer_types": GATED_LAYERS}
    widths = {"head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    folder = tmp_path_factory.mktemp("gated")
    return saved(folder, model_type="qwen3_5_text", num_key_value_heads=2, **fields, **widths)


def saved(folder: Path, **fields: Any) -> Path:
    """`folder` with a model with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    config = AutoConfig.for_model(**SIZES, **fields)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def _filled(engine: Any) -> Any:
    """Adapters of which no part is zero, the same in all layouts; what makes an exporter of their tensors."""
    from dagrl.backends.megatron.engine.adapters import adapter_plan
    from dagrl.backends.megatron.engine.export import NativeExporter
    from dagrl.backends.megatron.engine.model import unwrap
    from dagrl.backends.megatron.engine.weight_plan import held_tensors, part_of, plan

    chunks = engine._model.chunks
    config = unwrap(chunks[0]).config
    planned = adapter_plan(plan(engine._hf_config, config, "lm"), config, LoraSpec.model_validate(LORA))
    held = held_tensors(chunks, planned)
    with torch.no_grad():
        for number, tensor in enumerate(planned):
            if tensor.mapped.megatron in held:
                generator = torch.Generator().manual_seed(number)
                full = [torch.randn(shape, generator=generator) * 0.1 for shape in tensor.mapped.shapes]
                part = tensor.mapped.map.shard(full, part_of(tensor), tensor.parts)
                held[tensor.mapped.megatron].copy_(part)
    return lambda: NativeExporter(chunks, planned, 1 << 20)


def measured(
    run_engine: Any,
    folder: Path,
    layout: dict[str, Any],
    ranks: int,
    rows: "Batch",
    objective: Any,
    **fields: Any,
) -> Any:
    """Log-probs by row, and the gradients and the values of the adapters' tensors."""
    parallel = ParallelSpec.model_validate(parallel_of(layout))
    places, replicas = coordinates(parallel, ranks), parallel.data_parallel_size(ranks)

    def on_rank(engine: Any) -> Any:
        from dagrl.backends.megatron.engine.optimizer import clear_gradients
        from dagrl.weight_sync.exporter import exported

        place = places[torch.distributed.get_rank()]
        assert trained_numbers(engine) == counted_by_the_plan(engine, parallel, place.pp)
        mine = rows.take(np.arange(place.dp, len(rows), replicas))
        exporter = _filled(engine)
        values = {
            name: tensor.clone()
            for bucket in exported(exporter(), is_root=torch.distributed.get_rank() == 0)
            for name, tensor in bucket
        }
        merged = {name: tensor.clone() for bucket in engine.export_weights(1 << 14) for name, tensor in bucket}
        logprobs = engine.logprobs(mine, temperature=0.8, tokens_per_micro_batch=BUDGET)
        training = engine._own_training()
        clear_gradients(training.chunks, training.optimizer)
        engine._model.accumulate_gradient(mine, objective, tokens_per_micro_batch=BUDGET)
        gradients = hf_gradients(engine, exporter)
        by_row = {int(row): logprobs[i] for i, row in enumerate(mine.rows)} if place.primary else {}
        return by_row, gradients, values, merged

    optimizer = {"lr": 1e-3, "use_distributed_optimizer": False}
    answers = run_engine(
        ranks,
        on_rank,
        model=model_of(folder),
        parallel=parallel.model_dump(),
        optimizer=optimizer,
        lora=LORA,
        **fields,
    )
    logprobs = {row: values for by_row, *_ in answers for row, values in by_row.items()}
    return logprobs, *answers[0][1:]


def trained_numbers(engine: Any) -> int:
    return sum(each.numel() for chunk in engine._model.chunks for each in chunk.parameters() if each.requires_grad)


def counted_by_the_plan(engine: Any, parallel: ParallelSpec, stage: int) -> int:
    from dagrl.backends.megatron.planning.stages import rank_parameters, stages_of

    spec = MegatronEngineSpec(backend="megatron", group="train", parallel=parallel, lora=LoraSpec.model_validate(LORA))
    shape = shape_of(engine._hf_config.to_dict())
    return sum(rank_parameters(shape, spec, stages_of(spec, shape.layers)[stage]).trained)


def peft_model(folder: Path, values: dict[str, torch.Tensor]) -> Any:
    """PEFT's model with these tensors; layers that Megatron fuses have equal `A`."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=LORA["rank"], lora_alpha=LORA["alpha"], target_modules=targets))
    parameters = dict(model.named_parameters())
    for adapter in adapters(model_tensors(shape_of(base.config.to_dict()), 61), LoraSpec.model_validate(LORA)):
        for name in (*adapter.a.hf, *adapter.b.hf):
            parameters[peft_name(name)].data.copy_(values[name])
    return model


def peft_name(name: str) -> str:
    return f"base_model.model.{name.removesuffix('.weight')}.default.weight"


def peft_gradients(model: Any) -> dict[str, torch.Tensor]:
    """By this engine's names: the gradient of a shared `A` is the sum of those of its parts."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    found: dict[str, torch.Tensor] = {}
    config = model.get_base_model().config
    for adapter in adapters(model_tensors(shape_of(config.to_dict()), 61), LoraSpec.model_validate(LORA)):
        shared = torch.stack([gradients[peft_name(name)] for name in adapter.a.hf]).sum(0)
        found |= dict.fromkeys(adapter.a.hf, shared) | {name: gradients[peft_name(name)] for name in adapter.b.hf}
    return found


def likelihood(model: Any, rows: "Batch", objective: WeightedLikelihood) -> dict[int, np.ndarray]:
    """Each row's log-probs; adds the objective's gradients to the model's, by plain autograd."""
    weights, (normalizer,) = objective.token_weights(rows)
    logprobs, total = {}, torch.zeros(())
    for row in range(len(rows)):
        prompt, response = rows["prompt_tokens"][row], rows["response_tokens"][row]
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        all_of_row = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1] / objective.temperature, -1)
        chosen = all_of_row.gather(1, torch.from_numpy(response)[:, None])[:, 0]
        entropy = -(all_of_row.exp() * all_of_row).sum(-1)
        scale = torch.from_numpy(rows["advantage"][row]) + float(rows["reward"].values[row])
        loss = -scale * chosen - objective.entropy_coef * entropy
        total = total + (torch.from_numpy(weights[row]) / normalizer * loss).sum()
        logprobs[int(rows.rows[row])] = chosen.detach().numpy()
    total.backward()
    return logprobs


@pytest.mark.parametrize(
    ("layout", "fused"),
    [
        *((layout, False) for layout in ("alone", "dp2", "tp2", "tp2-sp", "pp2", "cp2", "tp2-pp2-vpp2")),
        ("tp2-sp", True),
    ],
)
def test_log_probs_and_gradients_are_those_of_peft(
    layout: str, fused: bool, qwen3: Path, run_engine: Any, samples: "Batch", objective: WeightedLikelihood
) -> None:
    ranks, sizes = DENSE[layout] if layout != "alone" else (1, {})
    fields = {"fused_linear_cross_entropy": fused}
    logprobs, gradients, values, merged = measured(run_engine, qwen3, sizes, ranks, samples, objective, **fields)
    model = peft_model(qwen3, values)
    expected = likelihood(model, samples, objective)
    assert logprobs.keys() == expected.keys()
    for row, found in logprobs.items():
        np.testing.assert_allclose(found, expected[row], rtol=0, atol=1e-5)
    assert_same(gradients, peft_gradients(model))
    for name, parameter in model.merge_and_unload().named_parameters():
        torch.testing.assert_close(merged[name], parameter.data, rtol=0, atol=1e-6)


@pytest.mark.parametrize("layout", ["alone", "ep2", "ep2-tp2", "ep2-pp2"])
def test_adapters_of_experts_follow_from_the_merged_model(
    layout: str, run_engine: Any, samples: "Batch", objective: WeightedLikelihood, tmp_path: Path, mixture: Path
) -> None:
    """PEFT has no adapters for single experts. With W' = W + s B A, dA = s B^T dW' and dB = s dW' A^T."""
    ranks, sizes = MIXTURE[layout] if layout != "alone" else (1, {})
    follows_from_the_merged_model(ranks, sizes, mixture, run_engine, samples, objective, tmp_path)


@pytest.mark.parametrize("layout", ["alone", "tp2-ep2", "pp2"])
def test_adapters_of_latent_attention_follow_from_the_merged_model(
    layout: str, run_engine: Any, samples: "Batch", objective: WeightedLikelihood, tmp_path: Path, latent: Path
) -> None:
    ranks, sizes = LATENT[layout] if layout != "alone" else (1, {})
    follows_from_the_merged_model(ranks, sizes, latent, run_engine, samples, objective, tmp_path)


def test_adapters_of_gated_attention_follow_from_the_merged_model(
    run_engine: Any, samples: "Batch", objective: WeightedLikelihood, tmp_path: Path, gated: Path
) -> None:
    """Within 3e-5, because recurrent states magnify the rounding of merged weights.

    All tensors differ, by 4e-6 to 1.3e-5 on one kind of CPU, and by half as much in one process.
    """
    ranks, sizes = DENSE["tp2"]
    follows_from_the_merged_model(ranks, sizes, gated, run_engine, samples, objective, tmp_path, bound=3e-5)


def follows_from_the_merged_model(
    ranks: int,
    sizes: Any,
    folder: Path,
    run_engine: Any,
    rows: "Batch",
    objective: Any,
    aside: Path,
    bound: float = 1e-5,
) -> None:
    from safetensors.torch import save_file
    from transformers import AutoConfig

    logprobs, gradients, values, merged = measured(run_engine, folder, sizes, ranks, rows, objective)
    whole = aside / "merged"
    whole.mkdir()
    shutil.copy(folder / "config.json", whole)
    save_file({name: tensor.contiguous() for name, tensor in merged.items()}, whole / "model.safetensors")

    def on_rank(engine: Any) -> Any:
        found = engine.logprobs(rows, temperature=0.8, tokens_per_micro_batch=BUDGET)
        optimizer_free = gradients_of(engine, rows, objective, tokens_per_micro_batch=BUDGET)
        return {int(row): found[i] for i, row in enumerate(rows.rows)}, optimizer_free

    optimizer = {"lr": 1e-3, "use_distributed_optimizer": False}
    ((expected, full),) = run_engine(1, on_rank, model=model_of(whole), optimizer=optimizer)
    assert logprobs.keys() == expected.keys()
    for row, found in logprobs.items():
        np.testing.assert_allclose(found, expected[row], rtol=0, atol=1e-5)
    lora = LoraSpec.model_validate(LORA)
    found = list(adapters(model_tensors(shape_of(AutoConfig.from_pretrained(folder).to_dict()), 61), lora))
    assert {name for each in found for name in (*each.a.hf, *each.b.hf)} == gradients.keys()
    wanted: dict[str, torch.Tensor] = {}
    for adapter in found:
        a, by_a = values[adapter.a.hf[0]], []
        for base, b in zip(adapter.base.hf, adapter.b.hf, strict=True):
            by_a.append(lora.scale * values[b].T @ full[base])
            wanted[b] = lora.scale * full[base] @ a.T
        wanted |= dict.fromkeys(adapter.a.hf, torch.stack(by_a).sum(0))
    assert_same(gradients, wanted, bound)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("qwen3", "alone"), ("qwen3", "tp2-sp"), ("qwen3", "pp2"), ("mixture", "ep2-tp2"), ("latent", "tp2-ep2")],
)
def test_an_engine_starts_from_exported_adapters_to_the_bit(
    kind: str, layout: str, run_engine: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    from dagrl.backends.megatron.stored.convert import write_adapter

    folder = request.getfixturevalue(kind)
    ranks, sizes = {**DENSE, **MIXTURE, **LATENT, "alone": (1, {})}[layout]
    parallel = ParallelSpec.model_validate(parallel_of(sizes)).model_dump()

    def exported(name: str, count: int, *, fill: bool, **fields: Any) -> Path:
        """A folder of PEFT's with what `count` ranks have saved."""

        def on_rank(engine: Any) -> None:
            if fill:
                _filled(engine)
            engine.save(tmp_path / f"{name}-saved")

        run_engine(count, on_rank, model=model_of(folder), optimizer={"lr": 1e-3}, **fields)
        (tmp_path / name).mkdir()
        lora = LoraSpec.model_validate(LORA)
        write_adapter(tmp_path / f"{name}-saved", model_of(folder), tmp_path / name, lora)
        return tmp_path / name

    first = exported("first", 1, fill=True, lora=LORA)
    again = exported("again", ranks, fill=False, lora={**LORA, "path": str(first)}, parallel=parallel)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (again / file).read_bytes() == (first / file).read_bytes()


def test_adapters_that_are_not_finite_are_refused(
    run_engine: Any, qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import save_file
    from transformers import AutoConfig

    from dagrl.backends.megatron.engine import megatron_engine

    shape = shape_of(AutoConfig.from_pretrained(qwen3).to_dict())
    tensors = {
        f"base_model.model.{name}": torch.full(size, torch.nan)
        for each in adapters(model_tensors(shape, 61), LoraSpec.model_validate(LORA))
        for side in (each.a, each.b)
        for name, size in zip(side.hf, side.shapes, strict=True)
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    messages = []

    def refused(*arguments: Any, **options: Any) -> None:
        with pytest.raises(ValueError) as caught:
            add_adapters(*arguments, **options)
        messages.append(str(caught.value))

    add_adapters = megatron_engine.add_adapters
    monkeypatch.setattr(megatron_engine, "add_adapters", refused)
    fields = {"lora": {**LORA, "path": str(tmp_path)}, "optimizer": {"lr": 1e-3}}
    (told,) = set(run_engine(2, lambda engine: messages[0], model=model_of(qwen3), **fields))
    assert told.startswith(f"{tmp_path}: tensor 'decoder.layers.0.") and "] has NaN or infinite values;" in told


def test_inputs_are_dropped_in_updates_alone(run_engine: Any, samples: "Batch", objective: WeightedLikelihood) -> None:
    """The base stays, and without its adapters the engine has the log-probs of the start."""

    def on_rank(engine: Any) -> Any:
        def logprobs() -> list[list[float]]:
            found = engine.logprobs(samples, temperature=0.8, tokens_per_micro_batch=BUDGET)
            return [found[row].tolist() for row in range(len(samples))]

        start = logprobs()
        for _ in range(2):
            engine.update([samples], objective, tokens_per_micro_batch=BUDGET)
        first = [float(engine.update([samples], objective, tokens_per_micro_batch=BUDGET)["loss"].mean)]
        trained = logprobs()
        assert trained == logprobs() != start
        with engine.start_weights():
            assert logprobs() == start
        return first

    fields = {"lora": {**LORA, "dropout": 0.5}, "optimizer": {"lr": 1e-2}}
    assert run_engine(1, on_rank, **fields) == run_engine(1, on_rank, **fields)
    assert run_engine(1, on_rank, **fields) != run_engine(1, on_rank, **{**fields, "lora": LORA})


def test_a_sync_of_adapters_alone_leaves_the_base_on_the_host(run_engine: Any, samples: "Batch") -> None:
    from dagrl.config.residency import Residency

    def on_rank(engine: Any) -> Any:
        frozen = [each for each in engine._model.chunks[0].parameters() if not each.requires_grad]
        exporter = engine.weight_exporter(1 << 20)
        with exporter.exporting():
            away = sum(each.untyped_storage().nbytes() for each in frozen)
        names = {name for bucket in engine.export_weights(1 << 14) for name, _ in bucket}
        before = engine.logprobs(samples, temperature=1.0, tokens_per_micro_batch=BUDGET).values
        engine.sleep(Residency.ASLEEP)
        engine.wake(Residency.WEIGHTS)
        same = {name for bucket in engine.export_weights(1 << 14) for name, _ in bucket} == names
        engine.wake(Residency.AWAKE)
        after = engine.logprobs(samples, temperature=1.0, tokens_per_micro_batch=BUDGET).values
        return away, names, same and np.array_equal(before, after)

    fields = {"lora": {**LORA, "merge": False}, "offload": {"param": True}, "optimizer": {"lr": 1e-2}}
    ((away, names, same),) = run_engine(1, on_rank, **fields)
    assert away == 0 and same
    assert {name.rpartition(".lora_")[2] for name in names} == {"A.weight", "B.weight"}


@pytest.mark.parametrize(("layout", "merge"), [({"ep": 2}, True), ({"pp": 2}, False)], ids=["merged", "alone"])
def test_owners_send_what_one_rank_would(run_engine: Any, mixture: Path, layout: dict[str, int], merge: bool) -> None:
    def on_rank(engine: Any) -> Any:
        from dagrl.weight_sync.exporter import packed

        _filled(engine)
        whole = {name: tensor.numpy() for bucket in engine.export_weights(1 << 12) for name, tensor in bucket}
        buckets = packed(engine.weight_exporter(1 << 12, by_owner=True), torch.distributed.get_rank())
        return whole, {name: tensor.numpy().copy() for _, bucket in buckets for name, tensor in bucket.unpack()}

    fields = {"model": model_of(mixture), "parallel": parallel_of(layout), "lora": {**LORA, "merge": merge}}
    (whole, _), *_ = answers = run_engine(2, on_rank, **fields)
    owned = [own for _, own in answers]
    assert all(owned) and sum(map(len, owned)) == len(whole)
    found = {name: tensor for own in owned for name, tensor in own.items()}
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)
