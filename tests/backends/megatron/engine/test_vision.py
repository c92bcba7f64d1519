"""A model that sees: log-probs and gradients of Hugging Face's, in any layout, and an export of the same bits."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layout_cases import parallel_of
from seeing import DEEP, GATED_DELTA, seeing_model, seeing_samples, settings_of

from dagrl.backends.megatron.section import ParallelSpec, coordinates
from dagrl.backends.megatron.stored.stored_tensors import StoredTensors

BOUND = 1e-5
BUDGET = 64
LAYOUTS = {
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "tp2-sp": (2, {"tp": 2, "sp": True}),
    "cp2": (2, {"cp": 2}),
    "pp2": (2, {"pp": 2}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2, "sp": True}),
}
KINDS: dict[str, dict[str, Any]] = {"qwen2_5_vl": {}, "qwen3_vl": DEEP, "qwen3_5": GATED_DELTA}


@pytest.fixture(scope="module")
def measure(run_engine: Callable[..., list[Any]], objective: Any) -> Callable[..., Any]:
    """``measure(kind, ranks, layout, **spec)``: each row's log-probs, gradients by name, and the exported weights."""
    rows = seeing_samples()

    def run(kind: str, ranks: int, layout: dict[str, Any], **spec: Any) -> Any:
        parallel = ParallelSpec.model_validate(parallel_of(layout))
        places, replicas = coordinates(parallel, ranks), parallel.data_parallel_size(ranks)

        def on_rank(engine: Any) -> Any:
            import torch.distributed as dist
            from gradients import gradients_of

            place = places[dist.get_rank()]
            mine = rows.take(np.arange(place.dp, len(rows), replicas))
            logprobs = engine.logprobs(mine, temperature=0.8, tokens_per_micro_batch=BUDGET)
            weights = [(n, t.numpy().copy()) for bucket in engine.export_weights(1 << 14) for n, t in bucket]
            gradients = gradients_of(engine, mine, objective, tokens_per_micro_batch=BUDGET)
            by_row = {int(row): logprobs[i] for i, row in enumerate(mine.rows)}
            return by_row, {name: tensor.numpy() for name, tensor in gradients.items()}, dict(weights)

        spec.setdefault("optimizer", {"lr": 1e-3, "use_distributed_optimizer": False})
        model = seeing_model(**KINDS[kind])
        answers = run_engine(ranks, on_rank, model=model, parallel=parallel.model_dump(), **spec)
        return {row: each for by_row, *_ in answers for row, each in by_row.items()}, *answers[0][1:]

    return run


@pytest.fixture(scope="module")
def alone(measure: Callable[..., Any]) -> Callable[[str], Any]:
    return functools.cache(lambda kind: measure(kind, 1, {}))


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_equals_hugging_face(kind: str, alone: Callable[[str], Any], objective: Any) -> None:
    logprobs, gradients, weights = alone(kind)
    expected, slopes, source = of_hugging_face(seeing_model(**KINDS[kind]), objective)
    assert weights.keys() == source.keys()
    assert all(np.array_equal(weights[name], source[name]) for name in source)
    for row, values in expected.items():
        assert np.abs(logprobs[row] - values).max(initial=0) <= BOUND
    assert gradients.keys() == slopes.keys()
    for name, slope in slopes.items():
        assert np.abs(gradients[name] - slope).max() <= 2 * BOUND * max(1.0, np.abs(slope).max()), name
    assert all(
        np.abs(slope).max() > 0 for name, slope in slopes.items() if "visual." in name and "qkv.bias" not in name
    )


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *(("qwen2_5_vl", layout) for layout in LAYOUTS),
        ("qwen3_vl", "cp2"),
        ("qwen3_vl", "tp2-pp2"),
        ("qwen3_5", "cp2"),
        ("qwen3_5", "tp2-pp2"),
    ],
)
def test_any_layout_equals_one_process(
    kind: str, layout: str, measure: Callable[..., Any], alone: Callable[[str], Any]
) -> None:
    logprobs, gradients, weights = measure(kind, *LAYOUTS[layout])
    expected, slopes, source = alone(kind)
    assert all(np.array_equal(weights[name], source[name]) for name in source) and weights.keys() == source.keys()
    assert logprobs.keys() == expected.keys()
    for row, values in expected.items():
        assert np.abs(logprobs[row] - values).max(initial=0) <= BOUND
    for name, slope in slopes.items():
        assert np.abs(gradients[name] - slope).max() <= BOUND * max(1.0, np.abs(slope).max()), name


def test_a_frozen_tower_stays(run_engine: Callable[..., list[Any]], objective: Any, tmp_path: Path) -> None:
    rows = seeing_samples()

    def on_rank(engine: Any) -> Any:
        def weights() -> dict[str, Any]:
            return {name: tensor.clone() for bucket in engine.export_weights(1 << 28) for name, tensor in bucket}

        before = weights()
        engine.update([rows], objective, tokens_per_micro_batch=BUDGET)
        after = weights()
        engine.save(tmp_path / "saved")
        engine.load(tmp_path / "saved")
        again = weights()
        assert all(again[name].equal(after[name]) for name in after)
        return {name for name in before if not before[name].equal(after[name])}, set(before)

    ((changed, names),) = run_engine(1, on_rank, model=seeing_model(), optimizer={"lr": 1e-2}, freeze=["vision"])
    assert not any(name.startswith("visual.") for name in changed)
    assert {name for name in names if not name.startswith("visual.")} - changed == set()
    stored = StoredTensors(tmp_path / "saved").weights()
    assert {name for name in names if name.startswith("visual.")} <= stored.keys()


def test_adapters_leave_the_tower(run_engine: Callable[..., list[Any]], objective: Any) -> None:
    rows = seeing_samples()

    def on_rank(engine: Any) -> Any:
        def weights() -> dict[str, Any]:
            return {name: tensor.clone() for bucket in engine.export_weights(1 << 28) for name, tensor in bucket}

        before = weights()
        # The second step is the first in which both sides of the adapters have gradients.
        engine.update([rows, rows], objective, tokens_per_micro_batch=BUDGET)
        after = weights()
        return {name for name in before if not before[name].equal(after[name])}

    (changed,) = run_engine(1, on_rank, model=seeing_model(), optimizer={"lr": 1e-2}, lora={"rank": 4})
    layers = {name for name in changed if name.startswith("model.layers.")}
    assert layers == changed and len(layers) == 14


def of_hugging_face(spec: Any, objective: Any) -> Any:
    """Each row's log-probs by Hugging Face's model and processor code, its gradients, and the weights."""
    import torch
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from dagrl.backends.hf.weights import replace_weights
    from dagrl.backends.runtime.initial_weights import weight_source
    from dagrl.model_files.images import split_images
    from dagrl.model_files.library_model import auto_class, load_hf_config, published_tensors

    config, source, settings = load_hf_config(spec), weight_source(spec, 3), settings_of(spec)
    model = auto_class(config).from_config(config, dtype=torch.float32).eval()
    replace_weights(model, ((name, source.get(name)) for name in source.names()))
    processor = Qwen2VLImageProcessorPil(patch_size=4, do_resize=False)
    rows, expected, parts = seeing_samples(), {}, []
    for i, row in enumerate(rows.rows):
        prompt, response = rows["prompt_tokens"][i], rows["response_tokens"][i]
        tokens = torch.tensor([[*prompt, *response]])
        images = split_images(rows["pixel_values"][i], rows["image_sizes"][i])
        seen = dict(processor(list(images), return_tensors="pt")) if images else {}
        kinds = torch.zeros_like(tokens, dtype=torch.int)
        kinds[:, : len(prompt)] = tokens[:, : len(prompt)] == settings.token
        embeds = model.get_input_embeddings()(tokens)
        positions, deep = None, {}
        if seen:
            features = model.model.get_image_features(**seen)
            embeds = embeds.masked_scatter(kinds[..., None].expand_as(embeds) > 0, torch.cat(features.pooler_output))
            positions, _ = model.model.get_rope_index(tokens, kinds, seen["image_grid_thw"])
            if spec.init["model_type"] == "qwen3_vl":
                deep = {"visual_pos_masks": kinds > 0, "deepstack_visual_embeds": features.deepstack_features}
        hidden = model.model.language_model(inputs_embeds=embeds, position_ids=positions, **deep)
        logits = model.lm_head(hidden.last_hidden_state[0, len(prompt) - 1 : -1]) / 0.8
        log_p = logits.log_softmax(-1)
        parts.append((log_p.gather(-1, torch.tensor(response)[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)))
        expected[int(row)] = parts[-1][0].detach().numpy()
    loss_of(objective, rows, *(torch.cat(part) for part in zip(*parts, strict=True))).backward()
    slopes = {name: tensor.grad.numpy() for name, tensor in published_tensors(model).items()}
    return expected, slopes, {name: source.get(name).numpy() for name in source.names()}


def loss_of(objective: Any, rows: Any, logprob: Any, entropy: Any) -> Any:
    import torch

    from dagrl.backends.base import ResponseTokens

    weights, (total,) = objective.token_weights(rows)
    columns = {name: torch.from_numpy(rows[name].values) for name in objective.columns}
    row = torch.from_numpy(np.repeat(np.arange(len(rows)), weights.lengths))
    return objective(ResponseTokens(logprob, entropy, torch.from_numpy(weights.values) / total, columns, row))[0]
