"""Checkpoints that are written while training goes on."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagrl.data.batch import Batch

OPTIONS: dict[str, Any] = {"optimizer": {"lr": 1e-2, "adam_eps": 1e-2}}


def update(engine: Any, batch: Batch, objective: Any) -> dict[str, float]:
    from megatron.core import parallel_state

    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine = batch.take(np.arange(rank, len(batch), size))
    metrics = engine.update([mine], objective, tokens_per_micro_batch=40)
    return {name: stat.mean for name, stat in metrics.items()}


def hold_writes() -> threading.Event:
    """Let no tensor be written before the event is set."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    gate = threading.Event()
    write = filesystem_async._write_item

    # `wraps` would not do: megatron looks at the parameters' names.
    def held(
        transforms: Any, stream: Any, data: Any, write_item: Any, storage_key: Any, serialization_format: Any
    ) -> Any:
        assert gate.wait(60)
        return write(transforms, stream, data, write_item, storage_key, serialization_format)

    filesystem_async._write_item = held
    return gate


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "plain"])
def test_the_written_state_is_that_of_the_call(
    run_engine: Callable[..., list[Any]], samples: Batch, objective: Any, tmp_path: Path, distributed: bool
) -> None:
    """Training goes on before the first byte is written; a rank that loads it goes on from where the save was."""
    folder = tmp_path / "step_1"
    options = {"optimizer": {**OPTIONS["optimizer"], "use_distributed_optimizer": distributed}}

    def first(engine: Any) -> Any:
        gate = hold_writes()
        update(engine, samples, objective)
        engine.save(folder, asynchronous=True)
        after = [update(engine, samples, objective) for _ in range(2)]
        under_way = not engine.finish_save(wait=False) and not (folder / "files.json").exists()
        gate.set()
        return under_way, engine.finish_save(wait=True), (folder / "files.json").exists(), after

    def second(engine: Any) -> Any:
        engine.load(folder)
        return [update(engine, samples, objective) for _ in range(2)]

    outcomes = run_engine(2, first, **options)
    assert [outcome[:3] for outcome in outcomes] == [(True, True, True)] * 2
    assert run_engine(2, second, **options) == [outcome[3] for outcome in outcomes]


def test_an_update_waits_until_the_state_is_copied(
    run_engine: Callable[..., list[Any]], samples: Batch, objective: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "step_1"

    def first(engine: Any) -> tuple[bool, bool, Any]:
        from dagrl.backends.megatron.engine import background_save

        gate, copied = threading.Event(), background_save._copied

        def held(*args: Any) -> Any:
            assert gate.wait(60)
            return copied(*args)

        background_save._copied = held
        update(engine, samples, objective)
        engine.save(folder, asynchronous=True)
        returned_before = not gate.is_set()
        threading.Timer(0.3, gate.set).start()
        after = update(engine, samples, objective)
        waited = gate.is_set()
        engine.finish_save(wait=True)
        return returned_before, waited, after

    def second(engine: Any) -> Any:
        engine.load(folder)
        return update(engine, samples, objective)

    ((returned_before, waited, after),) = run_engine(1, first, **OPTIONS)
    assert returned_before and waited
    assert run_engine(1, second, **OPTIONS) == [after]


def test_a_copy_that_hangs_has_a_bound(run_engine, samples: Batch, objective: Any, tmp_path: Path) -> None:
    def on_rank(engine: Any) -> str:
        from dagrl.backends.megatron.engine import background_save

        background_save._copied = lambda *_: threading.Event().wait(60)
        engine._writer._timeout_s = 0.2
        engine.save(tmp_path / "step_1", asynchronous=True)
        with pytest.raises(TimeoutError) as caught:
            update(engine, samples, objective)
        return str(caught.value)

    message = f"the state for {tmp_path / 'step_1'} was not copied to the host within 0.2 s"
    assert run_engine(1, on_rank, **OPTIONS) == [message]


def test_too_little_memory_for_the_copy_is_a_sentence_on_all(run_engine, tmp_path: Path) -> None:
    def on_rank(engine: Any) -> str:
        import torch.distributed as dist

        from dagrl.backends.megatron.engine import background_save

        def refused(*_: Any) -> Any:
            raise OSError("cannot pin 9.0 GiB of host memory")

        if dist.get_rank() == 1:
            background_save._copied = refused
        engine.save(tmp_path / "step_1", asynchronous=True)
        with pytest.raises(MemoryError) as caught:
            engine.finish_save(wait=True)
        return str(caught.value)

    message = "ranks [1] could not save their state: cannot pin 9.0 GiB of host memory"
    assert run_engine(2, on_rank, parallel={"tensor_model_parallel_size": 2}) == [message] * 2
    assert not (tmp_path / "step_1" / "files.json").exists()


def test_a_second_save_waits_for_the_first(run_engine, samples: Batch, objective: Any, tmp_path: Path) -> None:
    def on_rank(engine: Any) -> bool:
        gate = hold_writes()
        engine.save(tmp_path / "step_1", asynchronous=True)
        threading.Timer(0.3, gate.set).start()
        engine.save(tmp_path / "step_2", asynchronous=True)
        first_is_whole = (tmp_path / "step_1" / "files.json").is_file()
        engine.finish_save(wait=True)
        return first_is_whole

    assert run_engine(1, on_rank, **OPTIONS) == [True]
    for step in ("step_1", "step_2"):
        assert json.loads((tmp_path / step / "files.json").read_text()).keys() >= {".metadata", "metadata.json"}


def test_a_failure_of_one_rank_is_a_sentence_on_all(run_engine, tmp_path: Path) -> None:
    folder = tmp_path / "step_1"

    def on_rank(engine: Any) -> tuple[str, bool]:
        import resource
        import signal
        import sys

        import torch.distributed as dist

        if dist.get_rank() == 1:
            sys.dont_write_bytecode = True  # or a module that is imported late would be cut short by the limit, too
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        engine.save(folder, asynchronous=True)
        with pytest.raises(OSError, match="cannot write the checkpoint") as caught:
            engine.finish_save(wait=True)
        return str(caught.value), engine.finish_save(wait=True)

    for message, raised_once in run_engine(2, on_rank, parallel={"tensor_model_parallel_size": 2}):
        assert message.startswith(f"cannot write the checkpoint to {folder}, where ")
        assert message.endswith("MiB are free; make room, or lower run.keep")
        assert raised_once
    assert not (folder / "files.json").exists()


def test_a_failure_is_for_the_one_who_waits_for_that_write(run_engine, tmp_path: Path) -> None:
    """Another save, as for a record, waits for the checkpoint too; it must not seem written after that."""

    def on_rank(engine: Any) -> list[str]:
        import resource
        import signal
        import sys

        sys.dont_write_bytecode = True  # or a module that is imported late would be cut short by the limit, too
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        engine.save(tmp_path / "step_1", asynchronous=True)
        messages = []
        for act in (lambda: engine.save(tmp_path / "record", asynchronous=True), lambda: engine.finish_save(wait=True)):
            with pytest.raises(OSError, match="cannot write the checkpoint") as caught:
                act()
            messages.append(str(caught.value).partition(", ")[0])
        assert engine.finish_save(wait=True), "told once"
        return messages

    (messages,) = run_engine(1, on_rank, **OPTIONS)
    assert messages == [f"cannot write the checkpoint to {tmp_path / 'step_1'}"] * 2


def test_a_write_that_hangs_has_a_bound(run_engine, tmp_path: Path) -> None:
    def on_rank(engine: Any) -> str:
        hold_writes()
        engine._writer._timeout_s = 0.2
        engine.save(tmp_path / "step_1", asynchronous=True)
        with pytest.raises(TimeoutError) as caught:
            engine.finish_save(wait=True)
        return str(caught.value)

    assert run_engine(1, on_rank, **OPTIONS) == [f"the checkpoint {tmp_path / 'step_1'} was not written within 0.2 s"]


def test_copies_in_pinned_memory_are_written_without_their_neighbours(
    run_engine: Callable[..., list[Any]], samples: Batch, objective: Any, tmp_path: Path
) -> None:
    """As on a GPU, whose driver is replaced: tensors share blocks of memory, and files have the tensors alone."""

    def pinned(engine: Any) -> tuple[int, int, Any]:
        import contextlib
        from types import SimpleNamespace
        from unittest import mock

        import torch

        from dagrl.backends.megatron.engine import background_save

        calls = {name: lambda *_: 0 for name in ("cudaHostRegister", "cudaHostUnregister")}
        driver = SimpleNamespace(cudaError=SimpleNamespace(success=0), **calls)
        copied = background_save._copied

        def from_gpu(*args: Any) -> Any:
            with mock.patch.object(torch.Tensor, "is_cuda", True):
                return copied(*args)

        update(engine, samples, objective)
        with contextlib.ExitStack() as patches:
            stream = SimpleNamespace(synchronize=lambda: None)
            names = {"cudart": lambda: driver, "synchronize": lambda: None, "Stream": lambda: stream}
            names |= dict.fromkeys(("device", "stream"), contextlib.nullcontext)
            patches.enter_context(mock.patch.multiple(torch.cuda, **names))
            patches.enter_context(mock.patch.object(background_save, "_copied", from_gpu))
            engine.save(tmp_path / "pinned", asynchronous=True)
            engine.finish_save(wait=True)
        engine.save(tmp_path / "plain")
        sizes = [
            sum(file.stat().st_size for file in (tmp_path / name).glob("*.distcp")) for name in ("pinned", "plain")
        ]
        return sizes[0], sizes[1], update(engine, samples, objective)

    def resumed(engine: Any) -> Any:
        engine.load(tmp_path / "pinned")
        return update(engine, samples, objective)

    ((size, plain, after),) = run_engine(1, pinned, **OPTIONS)
    assert size == plain
    assert run_engine(1, resumed, **OPTIONS) == [after]
