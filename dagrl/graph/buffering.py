"""Routes the columns of a step through its replay buffer, so that nodes after it also get groups of earlier steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dagrl.config.schema import (
    BufferNode,
    FilterNode,
    JudgeNode,
    NodeBase,
    OpContract,
    RewardModelNode,
    RewardNode,
    RolloutNode,
)
from dagrl.graph.column_resolution import Reading

_ON_OWN_GROUPS = (RolloutNode, RewardNode, RewardModelNode, JudgeNode, FilterNode)


def lead_through_buffer(
    contracts: dict[str, OpContract],
    outputs: dict[str, dict[str, str]],
    specs: Mapping[str, NodeBase],
    readings: list[Reading],
    source: str,
) -> list[Reading]:
    """The readings with all columns routed through the buffer, whose contract and outputs get these columns.

    Nodes that sample, score or filter come before the buffer, with all dependencies of these nodes and the buffer: they
    work on the step's own groups. All others read the same columns from the buffer. Without a buffer, and with one in a
    cycle, nothing changes.
    """
    name = next((name for name, spec in specs.items() if isinstance(spec, BufferNode)), None)
    if name is None:
        return readings
    first = {source, *(node for node, spec in specs.items() if isinstance(spec, _ON_OWN_GROUPS))}
    before = _with_ancestors({*first, *(reading.writer for reading in readings if reading.reader == name)}, readings)
    if name in before:
        return readings
    own = {reading.op_column: (reading.writer, reading.column) for reading in readings if reading.reader == name}
    passed: dict[tuple[str, str], str] = {}
    led = []
    for reading in readings:
        origin = (reading.writer, reading.column)
        if reading.reader != name and reading.reader not in before and reading.writer in before:
            if origin not in passed:
                taken = reading.column in passed.values() or own.get(reading.column, origin) != origin
                passed[origin] = f"{reading.writer}.{reading.column}" if taken else reading.column
            reading = Reading(reading.reader, reading.op_column, name, passed[origin])
        led.append(reading)
    led += [Reading(name, column, *origin) for origin, column in passed.items() if column not in own]
    # Returned groups join the step's own groups after all nodes that work on the step's groups alone.
    for node in sorted(before - _with_ancestors({name}, led)):
        led += [Reading(name, f"{node}.{column}", node, column) for column in list(outputs[node].values())[:1]]
    columns = tuple(passed.values())
    reads = tuple(dict.fromkeys(reading.op_column for reading in led if reading.reader == name))
    contract = contracts[name]
    contracts[name] = replace(
        contract, reads=reads, reads_if_written=(), writes=(*contract.writes, *columns), replaces=columns
    )
    outputs[name] |= {column: column for column in columns}
    return led


def _with_ancestors(nodes: Iterable[str], readings: Sequence[Reading]) -> set[str]:
    closed = set(nodes)
    while more := {reading.writer for reading in readings if reading.reader in closed} - closed:
        closed |= more
    return closed
