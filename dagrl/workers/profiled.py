"""Evaluates the `profile` section: the profiled runs and engines, and their Python. Without torch, for the driver."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from dagrl.backends.environments import python_in
from dagrl.config.schema import NodeBase, Pipeline, ProfileSpec
from dagrl.ops.work import TaskWork
from dagrl.tracking.base import naming
from dagrl.workers.errors import RunError

FOLDER = "profile"
_NSYS_OPTIONS = (
    "--trace=cuda,nvtx",
    "--sample=none",
    "--cpuctxsw=none",
    "--capture-range=cudaProfilerApi",
    "--capture-range-end=repeat",
    "--force-overwrite=true",
)
_UNDER_NSYS = "NSYS_PROFILING_SESSION_ID"
"""nsys sets it for the processes that it profiles."""


def python_of(pipeline: Pipeline, engine: str, rank: int, run_dir: Path) -> str | None:
    """The command that replaces Python for a rank of `engine`: its environment's Python, or Python under nsys.

    None for the driver's Python. Reports of nsys go to ``profile/ENGINE-RANK.*.nsys-rep``, one for each profiled step.
    If dagrl itself runs under nsys, that one traces the workers. Raises RunError if nsys is not installed.
    """
    profile, environment = pipeline.profile, pipeline.engines[engine].environment
    python = str(python_in(environment)) if environment else None
    if profile is None or profile.tool != "nsys" or rank not in profile.ranks or _UNDER_NSYS in os.environ:
        return python
    if engine not in profiled_engines(pipeline, profile):
        return python
    nsys = shutil.which("nsys")
    if nsys is None:
        raise RunError(
            "profile.tool is nsys, and there is no nsys on the PATH",
            hint="install NVIDIA Nsight Systems, or set profile.tool: torch",
        )
    folder = run_dir / FOLDER
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    output = folder / f"{engine}-{rank}"
    return shlex.join([nsys, "profile", *_NSYS_OPTIONS, f"--output={output}", python or sys.executable])


def profiled_engines(pipeline: Pipeline, profile: ProfileSpec) -> set[str]:
    """Engines whose workers run profiled nodes. A frozen copy runs on the workers of its original."""
    named = {engine_of(node) for name, node in pipeline.nodes.items() if _is_named(profile, name)} - {""}
    return {getattr(pipeline.engines[engine], "frozen_copy_of", None) or engine for engine in named}


def is_profiled(profile: ProfileSpec, work: TaskWork) -> bool:
    """Whether a run is profiled, on the profiled ranks."""
    return work.step in profile.steps and work.node is not None and _is_named(profile, work.node)


def engine_of(node: NodeBase) -> str:
    """The engine that a node runs on; empty for CPU workers."""
    return getattr(node, "engine", None) or ""


def _is_named(profile: ProfileSpec, node: str) -> bool:
    return profile.nodes is None or node in profile.nodes
