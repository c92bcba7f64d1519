"""A training engine's state on disk in Megatron's distributed format, for any layout.

The initial weights are not included. The orchestrator moves the folder into place and chooses one to resume from.
`background_save` writes it while training continues.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedStateDict,
    StateDict,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.safe_globals import SafeUnpickler
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import MegatronModule
from torch.distributed.checkpoint import CheckpointException

from dagrl.backends.megatron.engine.background_save import FILES, BackgroundWriter
from dagrl.backends.megatron.engine.model import unwrap
from dagrl.backends.megatron.engine.moving_average import MovingAverage
from dagrl.backends.megatron.engine.optimizer_state import held_states
from dagrl.backends.megatron.engine.parallel_reader import parallel_reads
from dagrl.backends.megatron.engine.stored_weights import check_fit
from dagrl.backends.megatron.lora import ADAPTER
from dagrl.backends.megatron.section import ParallelSpec
from dagrl.backends.megatron.stored.stored_tensors import COMMON, ForbiddenPickleError, StoredTensors, would_run_code


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The contents of a checkpoint as the engine's objects, which `load` changes in place."""

    chunks: list[MegatronModule]
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler
    parallel: ParallelSpec
    average: MovingAverage | None = None


@torch.no_grad()
def save(
    folder: Path, state: TrainingState, writer: BackgroundWriter, *, policy_version: int, asynchronous: bool
) -> None:
    """Write the state to `folder`, or let `writer` copy it to the host and write it in the background. Collective.

    The state may change after `writer.wait_until_copied`. RuntimeError on all ranks if the optimizer has no state yet:
    Megatron's hybrid optimizer creates it in a step.
    """
    writer.start(folder, _content(folder, state, policy_version), copy=asynchronous)
    if not asynchronous:
        writer.finish(wait=True)


@torch.no_grad()
def load(folder: Path, state: TrainingState) -> int:
    """Load a saved state and return its policy version. Collective.

    Random states are restored only if the layout is the same. Learning rate and optimizer options come from the current
    pipeline, from the saved step on. Raises FileNotFoundError for a missing folder and ValueError for a torn folder or
    another model's.
    """
    _check_files(folder)
    # Megatron's own `load` unpickles arbitrary objects of the folder.
    stored = StoredTensors(folder)
    (saved,) = stored.read_object(COMMON)
    name = "distributed_optimizer"
    if (setting := saved["layout"][name]) != _layout(state)[name]:
        raise ValueError(
            f"checkpoint {folder} was saved with optimizer.use_{name}: {setting}; load it with the same setting"
        )
    wanted, options = _tensors(state, loading=True)
    if saved["layout"] == _layout(state):
        wanted["rng"] = _rng_of_this_rank()
    loaded = _loaded(stored, wanted, state.chunks)
    _set_steps(options, saved["optimizer_steps"])
    state.optimizer.load_state_dict(merge(options, loaded["optimizer"]))
    state.schedule.num_steps = saved["schedule_steps"]
    state.schedule.step(0)
    if "rng" in loaded:
        _set_rng(loaded["rng"])
    return saved["policy_version"]


@torch.no_grad()
def load_weights(folder: Path, chunks: Sequence[MegatronModule], average: MovingAverage | None = None) -> int:
    """Load the weights alone into an engine that is not trained; returns their policy version. Errors as `load`."""
    _check_files(folder)
    stored = StoredTensors(folder)
    (saved,) = stored.read_object(COMMON)
    models = _models(chunks)
    _loaded(stored, models | _averages(models, average), chunks)
    return saved["policy_version"]


def _loaded(stored: StoredTensors, wanted: ShardedStateDict, chunks: Sequence[MegatronModule]) -> ShardedStateDict:
    """Load the saved values of a sharded state; weights go into the model, averages in place."""
    # Reading changes the shapes of entries.
    averages = [
        (part, name, entry.data) for part in wanted if part.startswith(_AVERAGE) for name, entry in wanted[part].items()
    ]
    loaded = _read(stored, wanted)
    for part, name, average in averages:
        average.copy_(loaded[part][name])
    for i, chunk in enumerate(chunks):
        model = unwrap(chunk)
        check_extra_states(stored.folder, loaded[f"model_{i}"])
        model.load_state_dict(loaded[f"model_{i}"], strict=not _has_adapters(model))
    return loaded


def _read(stored: StoredTensors, wanted: ShardedStateDict) -> ShardedStateDict:
    on_disk, held, factories = load_preprocess(wanted)
    check_fit(stored, on_disk)
    try:
        with parallel_reads(stored):
            loaded = TorchDistLoadShardedStrategy().load(on_disk, stored.folder)
    except (CheckpointingException, CheckpointException) as error:
        for cause, _ in getattr(error, "failures", {}).values():
            if isinstance(cause, ForbiddenPickleError):
                raise cause from error
        raise ValueError(f"cannot read checkpoint {stored.folder}; resume from an earlier one") from error
    merge(loaded, held)
    return apply_factory_merges(loaded, factories)


def check_extra_states(folder: Path, state: Mapping[str, object]) -> None:
    """Raise ForbiddenPickleError for pickled bytes that could run code, which Transformer Engine would unpickle."""
    for name, value in state.items():
        if name.endswith("_extra_state") and isinstance(value, torch.Tensor) and value.numel():
            try:
                SafeUnpickler(io.BytesIO(value.cpu().numpy().tobytes())).load()
            except pickle.UnpicklingError as error:
                raise would_run_code(folder, str(error)) from error


def _content(folder: Path, state: TrainingState, policy_version: int) -> ShardedStateDict:
    # Megatron's hybrid optimizer creates its float32 weights in the first step.
    if state.optimizer.config.optimizer_cpu_offload and state.schedule.num_steps == 0:
        raise RuntimeError("with optimizer.optimizer_cpu_offload there is nothing to save before the first update")
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    _complete(state.optimizer)
    tensors, options = _tensors(state, loading=False)
    return tensors | {
        "rng": _rng_of_this_rank(),
        "layout": _layout(state),
        "optimizer_steps": _steps(options),
        "schedule_steps": state.schedule.num_steps,
        "policy_version": policy_version,
    }


def _tensors(state: TrainingState, *, loading: bool) -> tuple[ShardedStateDict, StateDict]:
    """Model and optimizer state to save, and the optimizer's options.

    The options are the current pipeline's, except for the step count, and depend on the layout, so they are not saved.
    """
    model = _models(state.chunks)
    with held_states(state.optimizer):
        optimizer = state.optimizer.sharded_state_dict(model, loading, metadata=dict(_ANY_LAYOUT))
    tensors, options = extract_sharded_base(optimizer)
    return model | _averages(model, state.average) | {"optimizer": tensors}, _unwrapped(options)


def _models(chunks: Sequence[MegatronModule]) -> ShardedStateDict:
    return {f"model_{i}": _trained(cast(MegatronModule, unwrap(chunk))) for i, chunk in enumerate(chunks)}


_AVERAGE = "average_of_"


def _averages(models: ShardedStateDict, average: MovingAverage | None) -> ShardedStateDict:
    return {f"{_AVERAGE}{name}": average.sharded(model) for name, model in models.items()} if average else {}


def _trained(chunk: MegatronModule) -> ShardedStateDict:
    """The chunk's state; with adapters, without the frozen weights, which keep their start values."""
    whole = chunk.sharded_state_dict()
    parameters = dict(chunk.named_parameters())
    if not _has_adapters(chunk):
        return whole
    return {
        name: state
        for name, state in whole.items()
        # Adapters of an engine that is not trained have no gradients.
        if name in parameters and (parameters[name].requires_grad or ADAPTER in name)
    }


def _has_adapters(chunk: torch.nn.Module) -> bool:
    return any(ADAPTER in name for name, _ in chunk.named_parameters())


_ANY_LAYOUT = {
    # The distributed optimizer's format that loads into any layout, unlike the default.
    "distrib_optim_sharding_type": "fully_reshardable",
    # Otherwise the optimizer of distributed experts gets other names.
    "chained_optim_avoid_prefix": True,
}


def _unwrapped(options: StateDict) -> StateDict:
    """The options without Megatron's markers of values that are not saved."""
    if isinstance(options, dict):
        return {name: _unwrapped(value) for name, value in options.items()}
    if isinstance(options, list):
        return [_unwrapped(value) for value in options]
    return options.unwrap() if isinstance(options, LocalNonpersistentObject) else options


def _groups(options: StateDict) -> Iterator[StateDict]:
    for name, value in options.items():
        if name == "param_groups":
            yield from value
        elif isinstance(value, dict):
            yield from _groups(value)


def _steps(options: StateDict) -> int | None:
    """Optimizer steps so far, common to all groups; None before the first."""
    steps = {int(group["step"]) for group in _groups(options) if group.get("step") is not None}
    assert len(steps) <= 1, f"parameter groups disagree about their steps: {steps}"
    return max(steps, default=None)


def _set_steps(options: StateDict, steps: int | None) -> None:
    for group in _groups(options):
        group.pop("step", None)
        if steps is not None:
            group["step"] = steps


def _complete(optimizer: MegatronOptimizer) -> None:
    """Create the moments of an optimizer before its first step."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.init_state_fn is not None:
            part.init_state_fn(part.optimizer, part.config)


def _layout(state: TrainingState) -> dict[str, object]:
    distributed = state.optimizer.config.use_distributed_optimizer
    return {"ranks": dist.get_world_size(), "distributed_optimizer": distributed} | state.parallel.model_dump()


def _check_files(folder: Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(f"checkpoint {folder} does not exist")
    if not (folder / FILES).is_file():
        raise ValueError(f"{folder} is not a finished checkpoint: it has no {FILES}; resume from an earlier one")
    for name, size in json.loads((folder / FILES).read_text()).items():
        path = folder / name
        actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            state = "is missing" if actual is None else f"has {actual} bytes"
            raise ValueError(f"checkpoint {folder} is torn: {name} {state}, not {size}; resume from an earlier one")


def _rng_of_this_rank() -> ShardedObject:
    states = {
        "cpu": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject("rng", states, (dist.get_world_size(),), (dist.get_rank(),))


def _set_rng(states: StateDict) -> None:
    get_cuda_rng_tracker().set_states(states["tracker"])
    torch.cuda.set_rng_state(states["device"])
    torch.set_rng_state(states["cpu"])
