"""Which state a replay starts from, and which updates it repeats before the node itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dagrl.orchestrator.folder.checkpoint import Checkpoints
from dagrl.orchestrator.records.files import NodeRecord, RecordedInputs, RecordError, Records, ranges

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
    """The way to the weights with which a recorded run began."""

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
            repeated = [update for each in range(begin + 1, step + 1) for update in of_step.get(each, [])]
            return Chain(engine, begin, states.get(begin), tuple(repeated))
    nearest = f"the nearest state is that after step {begins[0]}" if begins else "there is no state to start from"
    raise RecordError(
        f"the weights of {engine} in step {step} cannot be restored: {nearest}, and not all updates since are "
        "recorded; save more often (run.save_every), or set run.record.keep_last"
    )


def _complete(updates: Sequence[RecordedUpdate]) -> bool:
    """Whether these are all pieces of the updates of one step: each node's last one is among them."""
    nodes = {update.node for update in updates}
    return bool(nodes) and nodes == {update.node for update in updates if update.inputs.ends}


def updates_of(records: Records, engine: str, step: int) -> list[RecordedUpdate]:
    """All recorded updates of an engine up to a step. Unreadable records of other steps are left out."""
    updates: list[RecordedUpdate] = []
    for each in (each for each in records.steps() if each <= step):
        for node in records.nodes(each):
            try:
                record: NodeRecord = records.read(each, node)
            except RecordError:
                continue
            if record.trains and record.executor == engine:
                updates += [RecordedUpdate(each, node, run.inputs, record.group_size) for run in record.runs]
    return updates


def states_of(run_dir: Path, records: Records, engine: str) -> dict[int, Path]:
    """Step -> folder of an engine's state after it: checkpoints of the run, and states saved for records."""
    checkpoints = Checkpoints(run_dir, keep=1)
    folders = {step: checkpoints.of_step(step) for step in checkpoints.steps()}
    return records.states(engine) | {step: folder for step, folder in folders.items() if (folder / engine).is_dir()}
