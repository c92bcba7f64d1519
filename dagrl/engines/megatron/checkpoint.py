"""A training engine's state on disk, in Megatron's distributed format: written by all ranks, read by any layout.

The start weights are not in it: they come again from where they came from. Putting the folder in its place, and
choosing which one to resume from, is the runtime's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import MegatronModule
from torch.distributed.checkpoint import CheckpointException

from dagrl.engines.megatron.model import unwrap
from dagrl.spec.schema import ParallelSpec

_FILES = "files.json"
"""Size of each file of a finished checkpoint; written last."""

_RESHARDABLE = {"distrib_optim_sharding_type": "fully_reshardable"}
"""The distributed optimizer's format that loads into any layout; its default one fails to."""


@dataclass(frozen=True, slots=True)
class TrainingState:
    """What a checkpoint holds, in the engine's own objects, which `load` changes in place."""

    chunks: list[MegatronModule]
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler
    parallel: ParallelSpec


@torch.no_grad()
def save(folder: Path, state: TrainingState, *, policy_version: int) -> None:
    """Write the state to `folder`. Collective."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    _complete(state.optimizer)
    with _rates_set_aside(state.optimizer):
        content = _tensors(state, loading=False) | {
            "rng": _rng_of_this_rank(),
            "layout": _layout(state),
            "schedule_steps": state.schedule.num_steps,
            "policy_version": policy_version,
        }
        try:
            dist_checkpointing.save(content, str(folder))
        except (CheckpointingException, CheckpointException) as error:
            # Its text is a traceback without the system's own words; space is what is lacking, nearly always.
            free = shutil.disk_usage(folder).free / 2**20
            raise OSError(
                f"cannot write the checkpoint to {folder}, where {free:.0f} MiB are free; make room, or lower run.keep"
            ) from error
    if dist.get_rank() == 0:
        sizes = {str(path.relative_to(folder)): path.stat().st_size for path in _files(folder)}
        (folder / _FILES).write_text(json.dumps(sizes, indent=1))
    dist.barrier()


@torch.no_grad()
def load(folder: Path, state: TrainingState) -> int:
    """Bring back what `save` wrote, and return its policy version. Collective.

    Random generators are brought back where the layout is the same; in another one they stay as they are. The learning
    rate follows the schedule of today's pipeline file, from the step that was saved. Raises FileNotFoundError for a
    missing folder and ValueError for one that is torn or does not fit the engine.
    """
    _check_files(folder)
    try:
        saved = dist_checkpointing.load_common_state_dict(str(folder))
        _check_optimizer(folder, saved["layout"], _layout(state))
        wanted = _tensors(state, loading=True)
        if saved["layout"] == _layout(state):
            wanted["rng"] = _rng_of_this_rank()
        loaded = dist_checkpointing.load(wanted, str(folder))
    except (CheckpointingException, CheckpointException) as error:
        raise ValueError(f"checkpoint {folder} does not fit this engine: {error}") from error
    for i, chunk in enumerate(state.chunks):
        unwrap(chunk).load_state_dict(loaded[f"model_{i}"])
    with _rates_set_aside(state.optimizer):
        state.optimizer.load_state_dict(loaded["optimizer"])
    state.schedule.num_steps = saved["schedule_steps"]
    state.schedule.step(0)
    if "rng" in loaded:
        _set_rng(loaded["rng"])
    return saved["policy_version"]


def _tensors(state: TrainingState, *, loading: bool) -> dict[str, Any]:
    models = [cast(MegatronModule, unwrap(chunk)) for chunk in state.chunks]
    model = {f"model_{i}": chunk.sharded_state_dict() for i, chunk in enumerate(models)}
    return model | {"optimizer": state.optimizer.sharded_state_dict(model, loading, metadata=_RESHARDABLE)}


def _complete(optimizer: MegatronOptimizer) -> None:
    """Give the optimizer the moments that it makes in its first step, for it may not have taken one yet."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.init_state_fn is not None:
            part.init_state_fn(part.optimizer, part.config)


@contextmanager
def _rates_set_aside(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Within the context, parameter groups have no highest and lowest learning rate of their own.

    They are today's pipeline file's, but megatron would save them, and find a saved group by them.
    """
    rates = [(group["max_lr"], group["min_lr"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["max_lr"] = group["min_lr"] = None
    try:
        yield
    finally:
        # Loading replaces the groups, in the same order.
        for group, (highest, lowest) in zip(optimizer.param_groups, rates, strict=True):
            group["max_lr"], group["min_lr"] = highest, lowest


def _layout(state: TrainingState) -> dict[str, Any]:
    distributed = state.optimizer.config.use_distributed_optimizer
    return {"ranks": dist.get_world_size(), "distributed_optimizer": distributed} | state.parallel.model_dump()


def _check_optimizer(folder: Path, saved: dict[str, Any], own: dict[str, Any]) -> None:
    name = "distributed_optimizer"
    if saved[name] != own[name]:
        raise ValueError(
            f"checkpoint {folder} was saved with optimizer.use_{name}: {saved[name]}; load it with the same setting"
        )


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _FILES)


def _check_files(folder: Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(f"checkpoint {folder} does not exist")
    if not (folder / _FILES).is_file():
        raise ValueError(f"{folder} is no finished checkpoint: it has no {_FILES}; resume from an earlier one")
    for name, size in json.loads((folder / _FILES).read_text()).items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes"
            raise ValueError(f"checkpoint {folder} is torn: {name} {state}, not {size}; resume from an earlier one")


def _rng_of_this_rank() -> ShardedObject:
    states = {
        "cpu": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject("rng", states, (dist.get_world_size(),), (dist.get_rank(),))


def _set_rng(states: dict[str, Any]) -> None:
    get_cuda_rng_tracker().set_states(states["tracker"])
    torch.cuda.set_rng_state(states["device"])
    torch.set_rng_state(states["cpu"])
