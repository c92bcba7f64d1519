"""Time saves and loads of a training engine's state, beside plain writes and reads of the same disk.

    python benchmarks/checkpoint.py --out FOLDER --model 1.7b
    python benchmarks/checkpoint.py --out FOLDER --model 8b --ranks 2 --tensor-parallel 2

Prints seconds and GB/s of one save that blocks, of one in the background, and of a load, beside what one file of the
same size takes, written with fsync and read. Of the save in the background it tells the seconds until training may go
on, and those that an update which follows at once waits for the copy. The last line of the output is JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from options import parsed, parser_of
from ranks import Meetings, run_ranks
from workload import Workload

from dagrl.algorithms.objective import PolicyObjective
from dagrl.backends.families.registry import model_shape
from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.config.schema import LossSpec, ModelSpec

_BLOCK = 2**24


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    args, model = parsed(parser)
    found = args.out / "checkpoint.json"
    run_ranks(
        args.ranks,
        partial(_on_rank, Meetings(1), args.ranks, args.tensor_parallel, model, args.out / "checkpoint", found),
    )
    results = json.loads(found.read_text())
    results["plain"] = _plain(args.out, results["bytes"])
    shutil.rmtree(args.out / "checkpoint")
    line = json.dumps({"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", **results})
    for name in ("save", "background", "load"):
        share = results[name]["gb_per_s"] / results["plain"]["read" if name == "load" else "write"]
        print(f"{name}: {results[name]}, {share:.2f} of the disk's")
    print(line)
    if args.json is not None:
        args.json.write_text(line + "\n")


def _on_rank(
    meetings: Meetings, ranks: int, tensor_parallel: int, model: Path, folder: Path, found: Path, rank: int
) -> None:
    from dagrl.backends.megatron.engine.megatron_engine import MegatronEngine

    parallel = {"tensor_model_parallel_size": tensor_parallel, "sequence_parallel": tensor_parallel > 1}
    spec = MegatronEngineSpec.model_validate({"backend": "megatron", "group": "train", "parallel": parallel})
    engine = MegatronEngine(
        ModelSpec(path=model), spec, next(meetings.join(rank, ranks)), train_steps=1000, trainable=True
    )
    work = Workload(64, 1, 1)
    batch = work.batch(model_shape(ModelSpec(path=model)).vocabulary, rank // tensor_parallel)
    objective = PolicyObjective(LossSpec(), 1.0, ["old_logprob"], needs_entropy=False)

    def update() -> float:
        begun = time.perf_counter()
        engine.update([batch], objective, tokens_per_micro_batch=work.tokens_per_micro_batch)
        return time.perf_counter() - begun

    def background() -> dict[str, float]:
        begun = time.perf_counter()
        engine.save(folder / "background", asynchronous=True)
        blocked = time.perf_counter() - begun
        waits = update() - usual
        engine.finish_save(wait=True)
        return {"blocked_s": round(blocked, 2), "update_waits_s": round(waits, 2)}

    update()
    usual = min(update() for _ in range(2))

    seconds: dict[str, float] = {}
    _timed(lambda: engine.save(folder / "first"), seconds, "first save")
    shutil.rmtree(folder / "first", ignore_errors=True)
    _timed(lambda: engine.save(folder / "save"), seconds, "save")
    blocked = _timed(background, seconds, "background")
    _forget(folder / "save")
    _timed(lambda: engine.load(folder / "save"), seconds, "load")
    if rank == 0:
        size = sum(path.stat().st_size for path in (folder / "save").rglob("*") if path.is_file())
        rows: dict[str, Any] = {
            name: {"s": round(took, 2), "gb_per_s": round(size / 1e9 / took, 2)} for name, took in seconds.items()
        }
        rows["background"] |= blocked
        found.write_text(json.dumps({"bytes": size, "ranks": ranks, **rows}))
    engine.close()


def _timed[Result](step: Callable[[], Result], seconds: dict[str, float], name: str) -> Result:
    begun = time.perf_counter()
    result = step()
    seconds[name] = time.perf_counter() - begun
    return result


def _plain(folder: Path, size: int) -> dict[str, float]:
    """GB/s of one file of `size` bytes, at most 8 GB: written in blocks of 16 MiB with fsync at the end, and read."""
    size, path, block = min(size, 8 * 10**9), folder / "plain", os.urandom(_BLOCK)
    begun = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(size // _BLOCK):
            file.write(block)
        os.fsync(file.fileno())
    write = time.perf_counter() - begun
    _forget(path)
    begun = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.read(_BLOCK):
            pass
    read = time.perf_counter() - begun
    path.unlink()
    return {"write": round(size / 1e9 / write, 2), "read": round(size / 1e9 / read, 2)}


def _forget(place: Path) -> None:
    """Drop files from the page cache, so that reading them reads the disk."""
    for path in [place] if place.is_file() else place.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
