"""The moving average of an engine's weights: against a plain loop, in every layout, over checkpoints and sleep."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dagrl.config.residency import Residency

if TYPE_CHECKING:
    from dagrl.data.batch import Batch

RATE = 0.3
OPTIONS: dict[str, Any] = {"optimizer": {"lr": 1e-2, "adam_eps": 1e-2}, "moving_average": RATE}
TP2 = {"parallel": {"tensor_model_parallel_size": 2}}
LORA = {"lora": {"rank": 4}}


def weights(engine: Any) -> dict[str, np.ndarray]:
    return {name: value.numpy() for bucket in engine.export_weights(2**20) for name, value in bucket}


def averages(engine: Any) -> dict[str, np.ndarray]:
    with engine.average_weights():
        return weights(engine)


def logprobs(engine: Any, batch: Batch) -> list[float]:
    return engine.logprobs(batch, temperature=1.0, tokens_per_micro_batch=40).values.tolist()


def step(engine: Any, batch: Batch, objective: Any, **options: bool) -> None:
    from megatron.core import parallel_state

    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    engine.update([batch.take(np.arange(rank, len(batch), size))], objective, tokens_per_micro_batch=40, **options)


def steps_of_a_plain_loop(engine: Any, batch: Batch, objective: Any) -> tuple[Any, ...]:
    expected = {name: value.copy() for name, value in weights(engine).items()}
    for _ in range(3):
        # The average moves once for the pieces of a step.
        step(engine, batch, objective, ends=False)
        step(engine, batch, objective, begins=False)
        for name, value in weights(engine).items():
            expected[name] = np.float32(1 - RATE) * expected[name] + np.float32(RATE) * value
    before = logprobs(engine, batch)
    with engine.average_weights():
        told = logprobs(engine, batch)
    assert logprobs(engine, batch) == before != told
    return averages(engine), expected, told


@pytest.mark.parametrize(
    ("world_size", "fields"),
    [
        (1, {}),
        (2, {}),
        (2, TP2),
        (2, {"parallel": {"pipeline_model_parallel_size": 2}}),
        (1, {"offload": {"param": True}}),
    ],
    ids=["1", "dp2", "tp2", "pp2", "offload"],
)
def test_it_is_that_of_a_plain_loop(run_engine, samples, objective, world_size: int, fields: dict[str, Any]) -> None:
    def on_rank(engine: Any) -> tuple[Any, ...]:
        return steps_of_a_plain_loop(engine, samples, objective)

    found, expected, _ = run_engine(world_size, on_rank, **OPTIONS, **fields)[0]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("fields", [{}, TP2, LORA], ids=["dp2", "tp2", "lora"])
def test_a_resumed_engine_has_the_same_average_to_the_bit(
    run_engine, samples: Batch, objective: Any, tmp_path: Path, fields: dict[str, Any]
) -> None:
    folder = tmp_path / "step_2"

    def go_on(engine: Any) -> list[Any]:
        with engine.average_weights():
            seen = [logprobs(engine, samples)]
        step(engine, samples, objective)
        with engine.average_weights():
            seen.append(logprobs(engine, samples))
        return [*seen, logprobs(engine, samples)]

    def first(engine: Any) -> list[Any]:
        for _ in range(2):
            step(engine, samples, objective)
        engine.save(folder, asynchronous=True)
        found = go_on(engine)
        assert engine.finish_save(wait=True)
        return found

    def resumed(engine: Any) -> list[Any]:
        engine.load(folder)
        return go_on(engine)

    expected = run_engine(2, first, **OPTIONS, **fields)
    assert run_engine(2, resumed, **OPTIONS, **fields) == expected
    assert len(set(map(tuple, expected[0]))) == 3, "the average moves, and not to the weights"


@pytest.mark.parametrize(
    "fields", [{}, {**LORA, "trainable": False}, {"trainable": False}], ids=["tp2", "lora", "untrained"]
)
def test_another_layout_has_the_same_average(
    run_engine, samples: Batch, objective: Any, tmp_path: Path, fields: dict[str, Any]
) -> None:
    folder = tmp_path / "step_2"

    def first(engine: Any) -> dict[str, np.ndarray]:
        for _ in range(2):
            step(engine, samples, objective)
        engine.save(folder)
        return averages(engine)

    def resumed(engine: Any) -> dict[str, np.ndarray]:
        engine.load(folder)
        return averages(engine)

    expected = run_engine(1, first, **OPTIONS, **{**fields, "trainable": True})[0]
    found = run_engine(2, resumed, **OPTIONS, **TP2, **fields)[0]
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


def test_a_sleeping_engine_keeps_it_and_a_frozen_copy_beside_it(run_engine, samples: Batch, objective: Any) -> None:
    def on_rank(engine: Any) -> None:
        start = logprobs(engine, samples)
        step(engine, samples, objective)
        with engine.average_weights():
            told = logprobs(engine, samples)
        engine.sleep(Residency.ASLEEP)
        engine.wake()
        with engine.average_weights():
            assert logprobs(engine, samples) == told
        with engine.start_weights():
            assert logprobs(engine, samples) == start != told

    run_engine(1, on_rank, **OPTIONS, keep_start_weights=True)


def test_small_changes_of_bfloat16_weights_add_up() -> None:
    """In bfloat16 the average of 1 and 1 + 2^-7 at rate 0.01 would stay 1."""
    import torch

    from dagrl.backends.megatron.engine.moving_average import MovingAverage

    model = torch.nn.Linear(3, 5, bias=False, dtype=torch.bfloat16)
    torch.nn.init.ones_(model.weight)
    average = MovingAverage([model], 0.01)
    with torch.no_grad():
        model.weight += 2**-7
    for _ in range(500):
        average.advance()
    with average.in_place():
        assert (model.weight == 1 + 2**-7).all()
    assert (model.weight == 1 + 2**-7).all()
