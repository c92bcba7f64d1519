"""A replay buffer: its choice of groups, and its files, ``step_N.parquet`` and ``index_N.parquet``.

A step's index is the state of the buffer after it, and is written last. A step depends only on the index of the
previous step, so that a run continues from any checkpoint as if it had not stopped. Files are renamed into place, and
removed once neither this run nor a checkpoint can need them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dagrl.config.schema import BufferNode
from dagrl.data.batch import Column
from dagrl.data.tables import columns_of, table_of, write_tables

_GIB = 2**30
_STREAM = 0xB0FF
"""Separates its random numbers from others with the same seed."""


class Entry(NamedTuple):
    """One group in a buffer."""

    step: int
    """The step that sampled it."""
    group: int
    """Its number in that step."""
    file: int
    """The step whose file holds it."""
    place: int
    """Its row group in that file."""
    in_file: int
    """Groups of that file when it was written."""
    rows: int
    nbytes: int
    """Size of its columns, before compression."""
    version: int
    """Version of the oldest weights that sampled it."""
    prompt: str
    mean: float
    """Mean of the metric over its samples."""
    spread: float
    """Mean distance of the metric from its mean: the mean absolute advantage."""
    right: float
    uses: int = 0


def admitted(entries: Iterable[Entry], node: BufferNode) -> list[Entry]:
    """Select the new groups of a step that enter the buffer."""
    return [entry for entry in entries if _is_admitted(entry, node)]


def chosen(entries: Sequence[Entry], node: BufferNode, *, step: int, seed: int) -> list[Entry]:
    """The groups that return to `step`, oldest first; fewer than ``groups_per_step`` if the buffer has fewer."""
    fitting = [entry for entry in entries if _is_fit(entry, node, step)]
    draw = np.random.default_rng((seed, step, _STREAM))
    if node.policy == "fifo":
        places = sorted(range(len(fitting)), key=lambda place: (fitting[place].uses, *_age(fitting[place])))
    elif node.policy == "prioritised":
        places = _by_weight(np.array([_log_weight(entry, node) for entry in fitting]), draw)
    else:
        places = draw.permutation(len(fitting)).tolist()
    return sorted((fitting[place] for place in places[: node.groups_per_step]), key=_age)


def kept(entries: Iterable[Entry], node: BufferNode, *, step: int) -> list[Entry]:
    """The groups that stay after `step`, oldest first: groups that may return to a later step, within the capacity."""
    fitting = sorted((entry for entry in entries if _is_fit(entry, node, step + 1)), key=_age)
    if node.policy == "best":
        best: dict[str, Entry] = {}
        for entry in fitting:
            if entry.prompt not in best or entry.mean >= best[entry.prompt].mean:
                best[entry.prompt] = entry
        fitting = sorted(best.values(), key=_age)
    order = sorted(fitting, key=lambda entry: (_priority(entry, node), *_age(entry)))
    if node.policy != "prioritised":
        order = fitting
    rows, nbytes = sum(entry.rows for entry in order), sum(entry.nbytes for entry in order)
    dropped = set()
    for entry in order:
        if (node.capacity is None or rows <= node.capacity) and nbytes <= node.capacity_gib * _GIB:
            break
        dropped.add(_age(entry))
        rows, nbytes = rows - entry.rows, nbytes - entry.nbytes
    return [entry for entry in fitting if _age(entry) not in dropped]


def _is_admitted(entry: Entry, node: BufferNode) -> bool:
    if not np.isfinite(entry.mean) or (node.keep == "varied" and not entry.spread > 0):
        return False
    return node.policy != "successes" or 0 < entry.right < node.hard_below


def _is_fit(entry: Entry, node: BufferNode, step: int) -> bool:
    """Whether a group may return to `step`, which trains the weights of version ``step - 1``."""
    if node.max_uses is not None and entry.uses >= node.max_uses:
        return False
    return node.max_age is None or step - 1 - entry.version <= node.max_age


def _age(entry: Entry) -> tuple[int, int]:
    return entry.step, entry.group


def _priority(entry: Entry, node: BufferNode) -> float:
    return max(entry.spread if node.priority == "advantage" else entry.mean, node.floor)


def _log_weight(entry: Entry, node: BufferNode) -> float:
    priority = _priority(entry, node)
    return node.exponent * math.log(priority) if priority > 0 else -math.inf


def _by_weight(log_weights: np.ndarray, draw: np.random.Generator) -> list[int]:
    """A weighted random order without items of weight 0: by log-weights with Gumbel noise.

    Kool et al., "Stochastic beams and where to find them", 2019 (arXiv 1903.06059): equivalent to drawing one after the
    other, in proportion to the remaining weights.
    """
    noise = draw.gumbel(size=len(log_weights))
    positive = np.flatnonzero(log_weights > -np.inf)
    return positive[np.argsort(-(log_weights[positive] + noise[positive]), kind="stable")].tolist()


_ORIGIN = b"dagrl.buffer"
_SPARSE = 0.5
"""Files with a smaller fraction of used groups are rewritten without the unused ones."""
_FIELDS = {"prompt": pa.string(), **dict.fromkeys(("mean", "spread", "right"), pa.float64())}
_SCHEMA = pa.schema([(name, _FIELDS.get(name, pa.int64())) for name in Entry._fields])


class BufferFiles:
    """The files of one buffer."""

    def __init__(self, run_dir: Path, node: str, origin: Mapping[str, str]) -> None:
        """`origin`: properties that all rows of the buffer share, such as ``tokenizer`` -> a hash."""
        self._folder, self._origin = run_dir / "buffer" / node, dict(origin)

    def check(self, step: int, columns: Collection[str], rows: int) -> None:
        """Check that the groups in the buffer after `step` may return to a run with these columns, and `rows` a group.

        Raises ValueError if they may not, or if a file is missing or damaged.
        """
        entries, origin = self._read_index(step)
        remedy = "remove it to begin with an empty one, or use another run folder"
        for what, value in self._origin.items() if entries else ():
            if origin.get(what) != value:
                raise ValueError(f"the buffer {self._folder} is of another {what} than the run's; {remedy}")
        if (most := max((entry.rows for entry in entries), default=0)) > rows:
            message = f"the buffer {self._folder} has a group of {most} rows, and groups of this run have {rows}"
            raise ValueError(f"{message}; keep the rollout's `n`, or {remedy}")
        for path in map(self._rows, sorted({entry.file for entry in entries})):
            try:
                names = pq.read_schema(path).names
            except (OSError, pa.ArrowException) as error:
                raise self._damaged(path, error) from error
            if missing := [name for name in columns if name not in names]:
                message = f"the groups in {path} lack the column `{missing[0]}`, which a node reads now"
                raise ValueError(f"{message}; remove {self._folder} to begin with an empty buffer")

    def entries(self, step: int) -> list[Entry]:
        """The groups in the buffer after `step`; none before the first one.

        Raises ValueError if the index is missing or damaged.
        """
        return self._read_index(step)[0]

    def _read_index(self, step: int) -> tuple[list[Entry], dict[str, str]]:
        """The groups after `step`, and their origin."""
        path = self._index(step)
        if step < 1 or not (path.exists() or self._steps("index") or self._steps("step")):
            return [], {}
        try:
            table = pq.read_table(path)
            entries = [Entry(**row) for row in table.select(Entry._fields).to_pylist()]
            return entries, json.loads((table.schema.metadata or {}).get(_ORIGIN, b"{}"))
        except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
            raise self._damaged(path, error) from error

    def read(self, entries: Sequence[Entry], columns: Collection[str]) -> list[dict[str, Column]]:
        """The columns of groups. Raises ValueError if a file is missing or damaged."""
        files: dict[int, pq.ParquetFile] = {}
        return [self._group(entry, columns, files) for entry in entries]

    def write(self, step: int, groups: Sequence[tuple[Entry, Mapping[str, Column]]], entries: Iterable[Entry]) -> None:
        """Write new groups of `step`, and the index of all groups after it. Raises OSError.

        Groups of `entries` in files that are mostly empty move to the new file.
        """
        entries = list(entries)
        left: dict[int, int] = {}
        for entry in entries:
            left[entry.file] = left.get(entry.file, 0) + 1
        moving = [entry for entry in entries if entry.file != step and left[entry.file] < _SPARSE * entry.in_file]
        left_over = {(entry.step, entry.group) for entry in entries}
        stay = [(entry, columns) for entry, columns in groups if (entry.step, entry.group) in left_over]
        files: dict[int, pq.ParquetFile] = {}
        # All groups of a file have the same columns.
        names = [*stay[0][1]] if stay else None
        stored = [*stay, *((entry, self._group(entry, names, files)) for entry in moving)]
        if stored:
            write_tables([table_of(columns) for _, columns in stored], self._rows(step))
        places = {(entry.step, entry.group): place for place, (entry, _) in enumerate(stored)}
        indexed = [
            entry._replace(file=step, place=place, in_file=len(stored))
            if (place := places.get((entry.step, entry.group))) is not None
            else entry
            for entry in entries
        ]
        table = pa.Table.from_pylist([entry._asdict() for entry in indexed], _SCHEMA)
        table = table.replace_schema_metadata({_ORIGIN: json.dumps(self._origin)})
        write_tables([table], self._index(step))

    def sweep(self, needed: Collection[int], step: int) -> None:
        """Remove indices before `step`, except those of the `needed` steps, and files that no index names."""
        for old in self._steps("index"):
            if old < step and old not in needed:
                self._index(old).unlink(missing_ok=True)
        try:
            named = {file for left in self._steps("index") for file in _files_in(self._index(left))}
        except (OSError, pa.ArrowException):
            return  # A step that reads the damaged index reports it.
        for file in self._steps("step"):
            if file <= step and file not in named:
                self._rows(file).unlink(missing_ok=True)

    def _group(
        self, entry: Entry, columns: Collection[str] | None, files: dict[int, pq.ParquetFile]
    ) -> dict[str, Column]:
        path = self._rows(entry.file)
        try:
            if entry.file not in files:
                files[entry.file] = pq.ParquetFile(path)
            return columns_of(files[entry.file].read_row_group(entry.place, None if columns is None else [*columns]))
        except (OSError, pa.ArrowException, ValueError) as error:
            raise self._damaged(path, error) from error

    def _damaged(self, path: Path, error: object) -> ValueError:
        what = "is missing" if isinstance(error, FileNotFoundError) else f"is damaged ({error})"
        return ValueError(f"{path} {what}; remove {self._folder} to begin with an empty buffer")

    def _steps(self, kind: str) -> list[int]:
        names = [path.stem.rpartition("_")[2] for path in self._folder.glob(f"{kind}_*.parquet")]
        return sorted(int(name) for name in names if name.isdecimal())

    def _index(self, step: int) -> Path:
        return self._folder / f"index_{step}.parquet"

    def _rows(self, step: int) -> Path:
        return self._folder / f"step_{step}.parquet"


def _files_in(index: Path) -> set[int]:
    return set(pq.read_table(index, columns=["file"])["file"].to_pylist())
