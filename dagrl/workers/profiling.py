"""Profiles nodes: Chrome traces by torch's profiler, or NVTX ranges and a capture for Nsight Systems."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dagrl.config.schema import Pipeline, ProfileSpec
from dagrl.ops.work import TaskWork
from dagrl.tracking.base import naming
from dagrl.workers.messages import StartEngine
from dagrl.workers.profiled import FOLDER, engine_of, is_profiled, profiled_engines


def make_profiler(setup: StartEngine) -> TorchTraces | NvtxRanges | None:
    """The profiler of one rank of an engine, if it is profiled. Raises ValueError for nsys without a GPU."""
    profile = setup.pipeline.profile
    if profile is None or setup.engine not in profiled_engines(setup.pipeline, profile):
        return None
    if profile.tool == "nsys":
        if not torch.cuda.is_available():
            raise ValueError(
                f"profile.tool: nsys profiles GPUs, and engine {setup.engine} has none; set tool: torch instead"
            )
        return NvtxRanges(profile, setup.rank)
    if setup.rank not in profile.ranks:
        return None
    return TorchTraces(profile, setup.pipeline, setup.run_dir / FOLDER, setup.rank)


class TorchTraces:
    """One Chrome trace per profiled run: ``step_N/NODE-ENGINE-RANK.json.gz``, numbered from the second run on."""

    def __init__(self, profile: ProfileSpec, pipeline: Pipeline, folder: Path, rank: int) -> None:
        self._profile, self._pipeline, self._folder, self._rank = profile, pipeline, folder, rank
        self._runs: Counter[tuple[int, str]] = Counter()

    @contextmanager
    def around(self, work: TaskWork) -> Iterator[None]:
        """A context for one run. Raises OSError if the trace cannot be written."""
        if not is_profiled(self._profile, work):
            yield
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(
            activities=activities,
            with_stack=self._profile.with_stack,
            profile_memory=self._profile.with_memory,
            acc_events=True,
        ) as profiler:
            about = {"step": work.step, "node": work.task, "engine": self._engine(work), "engine_rank": self._rank}
            profiler.add_metadata_json("dagrl", json.dumps(about))
            with torch.profiler.record_function(_label(work)):
                yield
        self._write(profiler, work)

    def close(self) -> None:
        """Nothing is open between runs."""

    def _write(self, profiler: torch.profiler.profile, work: TaskWork) -> None:
        self._runs[work.step, work.task] += 1
        run = self._runs[work.step, work.task]
        parts = [work.task.replace("/", "-"), self._engine(work), str(self._rank), *([str(run)] if run > 1 else [])]
        path = self._folder / f"step_{work.step}" / ("-".join(parts) + ".json.gz")
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_name(f".{path.name}")
            profiler.export_chrome_trace(str(aside))
            aside.replace(path)

    def _engine(self, work: TaskWork) -> str:
        return engine_of(self._pipeline.nodes[work.node]) if work.node else ""


class NvtxRanges:
    """An NVTX range ``step N/NODE`` around every run, and a CUDA capture during profiled steps.

    A capture ends with the rank's first run of another step, so that it includes the weight sync.
    """

    def __init__(self, profile: ProfileSpec, rank: int) -> None:
        self._profile = profile
        self._captures = rank in profile.ranks
        self._capturing: int | None = None

    @contextmanager
    def around(self, work: TaskWork) -> Iterator[None]:
        if self._capturing not in (None, work.step):
            self.close()
        if self._captures and self._capturing is None and is_profiled(self._profile, work):
            torch.cuda.profiler.start()
            self._capturing = work.step
        torch.cuda.nvtx.range_push(_label(work))
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()

    def close(self) -> None:
        if self._capturing is not None:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            self._capturing = None


def _label(work: TaskWork) -> str:
    return f"step {work.step}/{work.task}"
