"""Prepares a replay: finds the record, and makes the pipeline and the plan of the engines that it needs."""

from __future__ import annotations

import fcntl
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from dagrl.backends.backend import EngineCheck
from dagrl.backends.registry import backend_of
from dagrl.config.loading.loader import load_pipeline, modules_of
from dagrl.config.loading.positions import Findings
from dagrl.config.loading.yaml_source import read_document
from dagrl.config.schema import GroupSpec, Pipeline
from dagrl.data.column_store import DamagedColumnError
from dagrl.graph.inference import build_graph
from dagrl.orchestrator.folder.checkpoint import Checkpoints
from dagrl.orchestrator.folder.examine import LOCK, PIPELINE
from dagrl.orchestrator.folder.identity import changes
from dagrl.orchestrator.records.files import (
    NodeRecord,
    RecordedInputs,
    RecordedRun,
    RecordError,
    Records,
    code_hash,
    ranges,
    versions,
)
from dagrl.plugins.isolation import isolated_imports
from dagrl.scheduler.placement import make_plan
from dagrl.scheduler.plan import HOST, Executor, Plan, PlannedTask
from dagrl.validation.model import check_models

_MOST_RANKS = 4096


@dataclass(frozen=True, slots=True)
class ReplayedRun:
    """One run of a recorded node, and the updates that lead to its initial weights."""

    record: NodeRecord
    run: RecordedRun
    task: PlannedTask
    chain: Chain | None
    """None if the node needs no trained weights."""


@dataclass(frozen=True, slots=True)
class ReplayTarget:
    """Recorded nodes of a step, and everything needed to run them again."""

    runs: tuple[ReplayedRun, ...]
    """In the order in which they started."""
    pipeline: Pipeline
    """With the groups of the engines that are needed."""
    plan: Plan
    """With the executors that are needed."""
    modules: Path
    notes: tuple[str, ...]
    """Reasons why results may differ."""


def find_target(
    run_dir: Path, step: int, node: str | None, *, layout: Sequence[str] = (), to_cpu: bool = False, debug: bool = False
) -> ReplayTarget:
    """Prepare the replay of a node, or of all recorded nodes of a step.

    `layout`: KEY=VALUE of the layout or the group of the node's engine. `debug`: engines get one rank. Raises
    RecordError, and PipelineError if an engine cannot have that layout.
    """
    if node is None and (layout or debug):
        raise RecordError("--layout and --debug are for one node; add --node")
    if not (run_dir / PIPELINE).is_file():
        raise RecordError(f"{run_dir} is no run folder: it has no {PIPELINE}; name the --run-dir of `dagrl run`")
    _refuse_running(run_dir)
    records, modules = Records(run_dir), modules_of(run_dir)
    chosen = [records.read(step, name) for name in ([node] if node else records.nodes(step) or [""])]
    record = chosen[0]
    stored = records.pipeline(record.pipeline)
    if not stored.is_file():
        raise RecordError(f"{stored}, the pipeline of that step, is missing")
    base = load_pipeline(stored).pipeline
    needed = list(dict.fromkeys(record.executor for record in chosen))
    needed += [source for name in needed if name in base.engines and (source := base.engines[name].weights_from)]
    alone = debug and not layout
    overrides = [
        override
        for name in dict.fromkeys(needed)
        for override in layout_overrides(
            base, name, layout if name == record.executor else (), to_cpu=to_cpu, alone=alone
        )
    ]
    loaded = load_pipeline(stored, overrides)
    pipeline = loaded.pipeline
    with isolated_imports():
        plan = make_plan(pipeline, build_graph(pipeline, modules, loaded.positions))
    _check(pipeline, [name for name in needed if name != HOST], Findings(loaded.positions))
    runs = [
        ReplayedRun(record, run, plan.task(record.node), _chain(run_dir, records, record, run, plan))
        for record in chosen
        for run in record.runs
    ]
    return ReplayTarget(
        tuple(sorted(runs, key=lambda run: run.run.inputs.order)),
        pipeline.model_copy(update={"groups": _groups(pipeline, needed)}),
        replace(plan, executors=_executors(plan, needed)),
        modules,
        tuple(_notes(run_dir, record, stored, modules)),
    )


def _refuse_running(run_dir: Path) -> None:
    with suppress(OSError), (run_dir / LOCK).open("r") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = lock.read().strip() or "unknown"
            raise RecordError(f"the run in {run_dir} is still going on (pid {pid}); wait until it ends") from None


def layout_overrides(
    pipeline: Pipeline, engine: str, layout: Sequence[str], *, to_cpu: bool, alone: bool = False
) -> list[str]:
    """The overrides that give an engine another layout, and a group that fits it.

    A key of `layout` is one of the group (``cpus_per_node``), of the engine, or of its ``parallel`` section. `to_cpu`
    moves it from GPUs to one CPU slot, or as many as the layout needs; `alone`: one rank. Raises RecordError for a
    wrong key or a node without an engine.
    """
    if engine not in pipeline.engines:
        if layout:
            raise RecordError("the node has no engine, and so no layout; leave out --layout")
        return []
    spec = pipeline.engines[engine]
    group = pipeline.groups[str(spec.group)]
    moves = to_cpu and not group.is_cpu
    if not layout and not moves and not (alone and group.ranks > 1):
        return []
    parallel = type(spec).model_fields.get("parallel")
    overrides = [f"engines.{engine}.parallel=null"] if parallel is not None and (moves or alone) else []
    slots = "cpus_per_node" if to_cpu or group.is_cpu else "gpus_per_node"
    own: dict[str, str] = {}
    for option in layout:
        key, equals, value = option.partition("=")
        if not equals:
            raise RecordError(f"--layout {option} is not KEY=VALUE; write for example tensor_model_parallel_size=2")
        if key in GroupSpec.model_fields:
            own[key] = value
        elif key.partition(".")[0] in type(spec).model_fields or parallel is None:
            overrides.append(f"engines.{engine}.{key}={value}")
        else:
            overrides.append(f"engines.{engine}.parallel.{key}={value}")
    if not own:
        ranks = 1 if moves or alone else group.ranks
        own = {slots: str(_fitting_ranks(pipeline, engine, overrides, ranks))}
    name = f"replay_{engine}"
    fields = ", ".join(f"{key}: {value}" for key, value in own.items())
    return [*overrides, f"groups.{name}={{{fields}}}", f"engines.{engine}.group={name}"]


def _fitting_ranks(pipeline: Pipeline, engine: str, overrides: Sequence[str], ranks: int) -> int:
    """`ranks`, or the smallest number of ranks that the layout in `overrides` divides. RecordError if there is none."""
    tree: dict[str, Any] = pipeline.engines[engine].model_dump(mode="json", exclude_unset=True)
    for override in overrides:
        key, _, value = override.removeprefix(f"engines.{engine}.").partition("=")
        *outer, last = key.split(".")
        section = tree
        for name in outer:
            section = section.setdefault(name, {})
        section[last] = int(value) if value.isdigit() else {} if value == "null" else value
    try:
        spec = type(pipeline.engines[engine]).model_validate(tree)
    except ValidationError:
        return ranks  # loading the pipeline reports it, with a better message
    for number in (ranks, *range(1, _MOST_RANKS)):
        try:
            spec.layout(GroupSpec(cpus_per_node=number))
        except (AssertionError, ZeroDivisionError):
            continue
        return number
    raise RecordError(f"no number of ranks fits the layout of {engine}")


def _check(pipeline: Pipeline, engines: Sequence[str], findings: Findings) -> None:
    if not engines:
        return
    sizes = check_models(pipeline, findings, with_files=True)
    for name in engines:
        spec = pipeline.engines[name]
        backend_of(spec).validate(EngineCheck(pipeline, name, spec, sizes[name], findings))
    findings.raise_if_any()


def _groups(pipeline: Pipeline, engines: Sequence[str]) -> dict[str, GroupSpec]:
    names = {pipeline.engines[name].group for name in engines if name in pipeline.engines}
    return {name: group for name, group in pipeline.groups.items() if name in names}


def _executors(plan: Plan, needed: Sequence[str]) -> dict[str, Executor]:
    """The executors of a replay, which all stay awake; one CPU worker."""
    return {
        name: replace(executor, sleeps=False, places=executor.places[:1] if name == HOST else executor.places)
        for name, executor in plan.executors.items()
        if name in needed
    }


def _chain(run_dir: Path, records: Records, record: NodeRecord, run: RecordedRun, plan: Plan) -> Chain | None:
    executor = plan.executors[record.executor]
    order: int | None
    if plan.task(record.node).frozen:
        return None
    if executor.trained:
        engine, step, order = executor.name, record.step, run.inputs.order
    elif executor.weights_from is not None:
        engine, step, order = executor.weights_from, _version(records, record) + 1, None
    else:
        return None
    return chain_to(engine, step, order, updates_of(records, engine, step), states_of(run_dir, records, engine))


def _version(records: Records, record: NodeRecord) -> int:
    """The version of the weights that sampled a recorded rollout. RecordError for several versions."""
    versions: set[int] = set()
    for block in (stored.block for run in record.runs if run.outputs for stored in run.outputs.blocks):
        if "policy_version" in block.columns:
            try:
                versions |= set(np.unique(records.columns.get(block.columns["policy_version"]).values).tolist())
            except DamagedColumnError as error:
                raise RecordError(str(error)) from error
    if len(versions) > 1:
        raise RecordError(
            f"`{record.node}` has sampled step {record.step} with several versions of the weights "
            f"({min(versions)} to {max(versions)}), and can only be replayed with one"
        )
    return versions.pop() if versions else record.step - 1


def _notes(run_dir: Path, record: NodeRecord, stored: Path, modules: Path) -> list[str]:
    notes = []
    now = versions()
    other = [name for name in dict.fromkeys((*record.versions, *now)) if record.versions.get(name) != now.get(name)]
    if other:
        changes_of_versions = ", ".join(f"{name} {record.versions.get(name)} -> {now.get(name)}" for name in other)
        notes.append(f"versions have changed since it was recorded: {changes_of_versions}")
    elif record.code != code_hash(modules if modules.is_dir() else None):
        notes.append("dagrl's sources, or the modules beside the pipeline, have changed since it was recorded")
    changed = changes(read_document(stored).tree, read_document(run_dir / PIPELINE).tree)
    if changed:
        notes.append(f"the run's pipeline has changed since, and the recorded one is replayed: {changed}")
    return notes


START = 0
"""The step of an engine's start weights."""


@dataclass(frozen=True, slots=True)
class RecordedUpdate:
    """One run of a recorded update, or of a piece of it."""

    step: int
    node: str
    inputs: RecordedInputs
    group_size: int


@dataclass(frozen=True, slots=True)
class Chain:
    """The state and updates that lead to a recorded run's initial weights."""

    engine: str
    step: int
    """The step after which the state was saved; `START` for the start weights."""
    folder: Path | None
    updates: tuple[RecordedUpdate, ...]
    """In the order in which they are repeated."""

    def __str__(self) -> str:
        start = f"the state after step {self.step}" if self.folder else "its start weights"
        steps = sorted({update.step for update in self.updates})
        return f"{self.engine} from {start}" + (f", through the updates of {ranges(steps)}" if steps else "")


def chain_to(
    engine: str,
    step: int,
    order: int | None,
    updates: Sequence[RecordedUpdate],
    states: Mapping[int, Path],
    *,
    start: bool = True,
) -> Chain:
    """The shortest way to an engine's weights at a run of `step`.

    `order`: the run's place in its step, after the updates before it; None: before all updates of the step. `states`:
    step -> folder of the engine's state after it. `start`: whether the start weights can be used. Raises RecordError if
    the updates from every state are incomplete.
    """
    of_step: dict[int, list[RecordedUpdate]] = {}
    for update in sorted(updates, key=lambda update: (update.step, update.inputs.order)):
        if update.step < step or (update.step == step and order is not None and update.inputs.order < order):
            of_step.setdefault(update.step, []).append(update)
    begins = sorted({*(state for state in states if state < step), *([START] if start else [])}, reverse=True)
    for begin in begins:
        missing = [between for between in range(begin + 1, step) if not _complete(of_step.get(between, []))]
        if not missing:
            repeated = [update for number in range(begin + 1, step + 1) for update in of_step.get(number, [])]
            return Chain(engine, begin, states.get(begin), tuple(repeated))
    nearest = f"the nearest state is that after step {begins[0]}" if begins else "there is no state to start from"
    raise RecordError(
        f"the weights of {engine} in step {step} cannot be restored: {nearest}, and not all updates since are "
        "recorded; save more often (run.save_every), or set run.record.keep_last"
    )


def _complete(updates: Sequence[RecordedUpdate]) -> bool:
    """Whether these are all pieces of the updates of one step, including each node's last one."""
    nodes = {update.node for update in updates}
    return bool(nodes) and nodes == {update.node for update in updates if update.inputs.ends}


def updates_of(records: Records, engine: str, step: int) -> list[RecordedUpdate]:
    """All recorded updates of an engine up to a step. Unreadable records of other steps are omitted."""
    updates: list[RecordedUpdate] = []
    for earlier in (earlier for earlier in records.steps() if earlier <= step):
        for node in records.nodes(earlier):
            try:
                record: NodeRecord = records.read(earlier, node)
            except RecordError:
                continue
            if record.trains and record.executor == engine:
                updates += [RecordedUpdate(earlier, node, run.inputs, record.group_size) for run in record.runs]
    return updates


def states_of(run_dir: Path, records: Records, engine: str) -> dict[int, Path]:
    """Step -> folder of an engine's state after it: checkpoints of the run, and states saved for records."""
    checkpoints = Checkpoints(run_dir, keep=1)
    folders = {step: checkpoints.of_step(step) for step in checkpoints.steps()}
    return records.states(engine) | {step: folder for step, folder in folders.items() if (folder / engine).is_dir()}
