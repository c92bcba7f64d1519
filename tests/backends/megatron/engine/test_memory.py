import functools
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dagrl.backends.base import SleepReport
from dagrl.backends.megatron.engine import communicators
from dagrl.backends.megatron.engine.memory import gradient_storages, optimizer_storages, weight_storages
from dagrl.config.residency import Residency
from dagrl.data.batch import Batch

PARTS = ("param", "grad", "optimizer")
ALL = dict.fromkeys(PARTS, True)
ADAM = {"lr": 1e-2, "adam_eps": 1e-2}
TOKENS = {"tokens_per_micro_batch": 40}
LAYOUTS = {
    "tp2": (2, {"parallel": {"tensor_model_parallel_size": 2}}),
    "pp2": (
        2,
        {
            "parallel": {"pipeline_model_parallel_size": 2},
            "transformer": {"moe_token_dispatcher_type": "alltoall"},
        },
    ),
    "dp2": (2, {}),
    "dp2, overlap": (2, {"ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True}}),
    "dp2, plain optimizer": (2, {"optimizer": {**ADAM, "use_distributed_optimizer": False}}),
    "bfloat16": (1, {"transformer": {"bf16": True}}),
    "bfloat16, plain optimizer": (
        1,
        {"transformer": {"bf16": True}, "optimizer": {**ADAM, "use_distributed_optimizer": False}},
    ),
}
"""Where the memory is laid out differently: shared by weights or not, float32 weights of the optimizer's own or not."""


def exact(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().flatten().contiguous().view(torch.uint8).numpy().copy()


def mine(batch: Batch, count: int = 2) -> list[Batch]:
    from megatron.core import parallel_state

    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    return [batch.take(np.arange(first, len(batch), count)[rank::size]) for first in range(count)]


def train(engine: Any, samples: Batch, objective: Any, between: Callable[[], None]) -> dict[str, Any]:
    """Two updates of two mini-batches and all else that an engine does, with `between` after each."""
    norms, texts = [], mine(samples)
    for _ in range(2):
        norms.append(engine.update(texts, objective, **TOKENS)["grad_norm"].mean)
        between()
    with engine.start_weights():
        started = engine.logprobs(texts[0], temperature=1.0, **TOKENS).values
    between()
    now = engine.logprobs(texts[0], temperature=1.0, **TOKENS).values
    return {"norms": norms, "start": started, "now": now, "weights": exported(engine)}


def assert_identical(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left["norms"] == right["norms"]
    assert np.array_equal(left["start"], right["start"]) and np.array_equal(left["now"], right["now"])
    assert left["weights"].keys() == right["weights"].keys()
    assert all(np.array_equal(left["weights"][name], right["weights"][name]) for name in left["weights"])


def bytes_on_device(engine: Any) -> dict[str, int]:
    chunks, optimizer = engine._training.chunks, engine._training.optimizer
    found = {
        "param": weight_storages(chunks),
        "grad": gradient_storages(chunks),
        "optimizer": optimizer_storages(chunks, optimizer),
    }
    return {part: sum(storage.nbytes() for storage in storages.values()) for part, storages in found.items()}


def exported(engine: Any) -> dict[str, np.ndarray]:
    return {name: exact(tensor) for bucket in engine.export_weights(1 << 20) for name, tensor in bucket}


@pytest.fixture(scope="module")
def run(run_engine, samples: Batch, objective: Any) -> Callable[..., list[Any]]:
    """``run(layout, sleeping, **spec)``: what `train` gives on each rank, and what lay on the device in between."""

    def on_rank(engine: Any, sleeping: bool) -> dict[str, Any]:
        held: list[dict[str, int]] = [bytes_on_device(engine)]

        def between() -> None:
            if sleeping:
                assert isinstance(engine.sleep(), SleepReport)
                held.append(bytes_on_device(engine))
                engine.wake()
            held.append(bytes_on_device(engine))

        return train(engine, samples, objective, between) | {"held": held}

    def call(layout: str, *, sleeping: bool = False, **fields: Any) -> list[Any]:
        world_size, own = LAYOUTS[layout]
        options = {"optimizer": ADAM, "keep_start_weights": True, **own, **fields}
        return run_engine(world_size, lambda engine: on_rank(engine, sleeping), **options)

    return call


@pytest.fixture(scope="module")
def plain(run: Callable[..., list[Any]]) -> Callable[[str], list[Any]]:
    """``plain(layout)``: what `run` gives where nothing ever leaves."""
    return functools.cache(run)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_offload_and_sleep_change_nothing_but_where_memory_is(run, plain, layout: str) -> None:
    slept, both = run(layout, sleeping=True, keep_communicators=False), run(layout, sleeping=True, offload=ALL)
    for rank, untouched in enumerate(plain(layout)):
        for other in (slept, both):
            assert_identical(other[rank], untouched)
        present = untouched["held"][-1]
        assert present["param"] and present["grad"] and present["optimizer"]
        assert both[rank]["held"] == [dict.fromkeys(PARTS, 0)] * 7
        # It holds what it held before, save that a first step makes the moments.
        assert slept[rank]["held"][1::2] == [dict.fromkeys(PARTS, 0)] * 3
        assert slept[rank]["held"][2::2] == untouched["held"][1:]


@pytest.mark.parametrize(
    ("layout", "offload"),
    [("tp2", {}), ("pp2", {}), ("dp2, overlap", {"param": True, "optimizer": True}), ("bfloat16", {})],
)
def test_an_engine_goes_down_to_its_weights_and_gives_them_out_before_it_sleeps(
    run_engine, samples: Batch, objective: Any, plain, layout: str, offload: dict[str, bool]
) -> None:
    """As at a sync within a group, from either residency back up."""
    world_size, own = LAYOUTS[layout]

    def on_rank(engine: Any) -> dict[str, Any]:
        sent: list[dict[str, np.ndarray]] = []
        held: list[dict[str, int]] = []

        def stop_at(*ways: tuple[str, Residency]) -> None:
            for way, residency in ways:
                getattr(engine, way)(residency)
                held.append(bytes_on_device(engine))
                if residency is Residency.WEIGHTS:
                    sent.append(exported(engine))

        asleep, weights, awake = Residency.ASLEEP, Residency.WEIGHTS, Residency.AWAKE
        ways = iter(
            [
                [("sleep", weights), ("sleep", asleep), ("wake", awake)],
                [("sleep", asleep), ("wake", weights), ("wake", awake)],
                [("sleep", weights), ("wake", awake)],
            ]
        )
        return train(engine, samples, objective, lambda: stop_at(*next(ways))) | {"sent": sent, "held": held}

    fields = {"optimizer": ADAM, "keep_start_weights": True, "keep_communicators": False, **own}
    slept = run_engine(world_size, on_rank, **fields, offload=offload)
    for rank, (left, right) in enumerate(zip(plain(layout), slept, strict=True)):
        assert_identical(left, right)
        present = [{part for part, size in held.items() if size} for held in right["held"]]
        alone, whole = ({"param"}, set(PARTS)) if not offload else (set(), {"grad"})
        assert present == [alone, set(), whole, set(), alone, whole, alone, whole]
        # After the second of its two updates the engine trained no more: twice the same weights, as at the end.
        _, after, end = right["sent"]
        assert after.keys() == end.keys() == left["weights"].keys()
        assert bool(after) == (rank == 0)
        assert all(np.array_equal(after[name], left["weights"][name]) for name in after)
        assert all(np.array_equal(end[name], left["weights"][name]) for name in end)


@pytest.mark.parametrize("keep", [True, False])
def test_communicators_of_several_ranks_stay_where_they_are_kept(run_engine, keep: bool) -> None:
    def on_rank(engine: Any) -> list[bool]:
        shared = [group for group in communicators._groups if group.size() == 2]
        engine.sleep()
        there = [group._inner is not None for group in shared]
        engine.wake()
        return there

    for there in run_engine(2, on_rank, **LAYOUTS["tp2"][1], keep_communicators=keep):
        assert there and all(each is keep for each in there)


@pytest.mark.parametrize("chosen", [choice for choice in product([False, True], repeat=3) if any(choice)])
def test_each_part_stays_away_on_its_own(run, plain, chosen: tuple[bool, ...]) -> None:
    offload = dict(zip(PARTS, chosen, strict=True))
    untouched, rank = plain("bfloat16")[0], run("bfloat16", offload=offload)[0]
    assert_identical(rank, untouched)
    for held, held_plain in zip(rank["held"], untouched["held"], strict=True):
        assert held == {part: 0 if offload[part] else size for part, size in held_plain.items()}


def test_an_engine_that_is_not_awake_refuses_in_a_sentence(
    run_engine, samples: Batch, objective: Any, tmp_path: Path
) -> None:
    def on_rank(engine: Any) -> list[list[str]]:
        asked: list[Callable[[], Any]] = [
            lambda: engine.logprobs(samples, temperature=1.0, **TOKENS),
            lambda: engine.update([samples], objective, **TOKENS),
            lambda: engine.start_weights().__enter__(),
            lambda: engine.save(tmp_path / "saved"),
            lambda: engine.load(tmp_path / "saved"),
            lambda: engine.sleep(residency),
            lambda: engine.wake(residency),
        ]
        answers: list[list[str]] = []
        for residency in (Residency.WEIGHTS, Residency.ASLEEP):
            engine.sleep(residency)
            answers.append([])
            for ask in (*asked, *([lambda: exported(engine)] if residency is Residency.ASLEEP else [])):
                with pytest.raises(RuntimeError) as caught:
                    ask()
                answers[-1].append(str(caught.value))
        engine.wake()
        with pytest.raises(RuntimeError, match="the engine is awake already; wake\\(\\) comes after sleep\\(\\)"):
            engine.wake()
        engine.logprobs(samples, temperature=1.0, **TOKENS)
        return answers

    ((down, asleep),) = run_engine(1, on_rank, keep_start_weights=True)
    for answers, state in ((down, "down to its weights"), (asleep, "asleep")):
        refused = f"the engine is {state}; call wake() first"
        assert answers[:5] == [refused] * 5
        assert answers[5] == f"the engine is {state} already; wake() comes before another sleep()"
        assert answers[6] == f"the engine is {state} already; wake() comes after sleep()"
    assert asleep[7:] == ["the engine is asleep; call wake() first"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_of_an_offloaded_engine_loads_into_another(
    run_engine, samples: Batch, objective: Any, tmp_path: Path, asynchronous: bool
) -> None:
    def save(engine: Any) -> list[float]:
        engine.update(mine(samples), objective, **TOKENS)
        engine.save(tmp_path / "saved", asynchronous=asynchronous)
        if asynchronous:
            # Whoever writes has copies: the engine's own memory may come and go meanwhile.
            engine.sleep()
            engine.finish_save(wait=True)
            engine.wake()
        return [engine.update(mine(samples), objective, **TOKENS)["grad_norm"].mean for _ in range(2)]

    def load(engine: Any) -> list[float]:
        engine.load(tmp_path / "saved")
        return [engine.update(mine(samples), objective, **TOKENS)["grad_norm"].mean for _ in range(2)]

    went_on = run_engine(2, save, optimizer=ADAM, offload=ALL)
    assert run_engine(2, load, optimizer=ADAM, offload=ALL) == went_on
    assert run_engine(2, load, optimizer=ADAM) == went_on


def test_a_frozen_engine_has_weights_only_and_offloads_them(run_engine, samples: Batch) -> None:
    def on_rank(engine: Any) -> tuple[np.ndarray, list[int]]:
        sizes = []
        engine.logprobs(samples, temperature=1.0, **TOKENS)
        sizes.append(sum(storage.nbytes() for storage in weight_storages(engine._model.chunks).values()))
        engine.sleep()
        engine.wake()
        return engine.logprobs(samples, temperature=1.0, **TOKENS).values, sizes

    offloaded, sizes = run_engine(1, on_rank, trainable=False, offload={"param": True})[0]
    plain, plain_sizes = run_engine(1, on_rank, trainable=False)[0]
    assert np.array_equal(offloaded, plain)
    assert sizes == [0] and plain_sizes[0] > 0


def test_a_model_with_recorded_addresses_cannot_be_offloaded(run_engine) -> None:
    def on_rank(engine: Any) -> str:
        engine._model.chunks[0].config.cuda_graph_impl = "local"
        from dagrl.backends.megatron.engine.memory import EngineOffloader
        from dagrl.backends.megatron.section import OffloadSpec

        with pytest.raises(ValueError) as caught:
            EngineOffloader(engine._model.chunks, engine._training.optimizer, OffloadSpec(grad=True))
        memory = EngineOffloader(engine._model.chunks, engine._training.optimizer, OffloadSpec())
        with pytest.raises(RuntimeError, match="cannot sleep"):
            memory.sleep(Residency.WEIGHTS)
        return str(caught.value)

    assert "offload: transformer.cuda_graph_impl 'local' records addresses" in run_engine(1, on_rank)[0]
