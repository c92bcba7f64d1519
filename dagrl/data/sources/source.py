"""A source of prompts: its files as one table, whose rows have numbers from 0 on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dagrl.config.errors import suggest
from dagrl.config.loading.prompt_files import PromptFile, files_of
from dagrl.config.schema import SourceSpec
from dagrl.data.sources.parts import Part, RemotePart, Values, part_of

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import DatasetBuilder


def parts_of_hub(spec: SourceSpec) -> list[Part]:
    """The files of a data set's split. Raises ValueError if it cannot be read."""
    builder, split = builder_of(spec)
    with _telling(spec):
        if spec.streamed:
            return list(_remote_parts(spec, builder, split))
        builder.download_and_prepare()
        files = builder.as_dataset(split=split).cache_files
    return [part_of(PromptFile(Path(file["filename"]), "arrow")) for file in files]


def builder_of(spec: SourceSpec) -> tuple[DatasetBuilder, str]:
    """The description of a data set, without its rows, and the split. Raises ValueError if it does not exist."""
    import datasets

    assert spec.hub is not None
    name, _, revision = spec.hub.partition("@")
    with _telling(spec):
        builder = datasets.load_dataset_builder(name, spec.name, revision=revision or None)
    split = spec.split or spec.usual_split
    known = [str(other) for other in builder.info.splits or builder.config.data_files or ()]
    if known and split not in known:
        raise ValueError(f"{spec.title} has no split `{split}`; {suggest(split, known)}")
    return builder, split


def _remote_parts(spec: SourceSpec, builder: DatasetBuilder, split: str) -> Iterator[Part]:
    from fsspec.core import url_to_fs

    for url in builder.config.data_files[split] if builder.config.data_files else ():
        if not url.endswith(".parquet"):
            raise ValueError(f"{spec.title} has other files than parquet ({url}); set `streamed: false`")
        files, path = url_to_fs(url)
        yield RemotePart(PromptFile(Path(url), "parquet"), files.open(path))


@contextmanager
def _telling(spec: SourceSpec) -> Iterator[None]:
    import datasets
    import httpx

    try:
        yield
    except (OSError, ValueError, httpx.HTTPError, datasets.exceptions.DatasetsError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        missing = isinstance(error, datasets.exceptions.DatasetNotFoundError)
        remedy = "check the name, and set HF_TOKEN if it is private or gated" if missing else "check name and network"
        raise ValueError(f"cannot load {spec.title} from the Hugging Face Hub: {reason}; {remedy}") from error


_KEPT_BYTES = 256 << 20
"""Groups of rows that stay in memory."""


class Source:
    """The rows of a source, read by groups on request, so that memory does not grow with the data. Not thread-safe."""

    def __init__(self, name: str, spec: SourceSpec, parts: Sequence[Part]) -> None:
        """Join files. Raises ValueError if they have no rows."""
        self.name, self.spec = name, spec
        self.parts = list(parts)
        sizes = [len(part.groups) for part in parts]
        self._part_of_group = np.repeat(np.arange(len(sizes)), sizes)
        self._first_groups = np.cumsum([0, *sizes])
        self._ends = np.cumsum(np.concatenate([np.zeros(0, np.int64), *(part.groups for part in parts)]))
        rows = [int(part.groups.sum()) for part in parts]
        self._starts = np.cumsum([0, *rows])
        self._kept: OrderedDict[tuple[int, tuple[str, ...]], pa.Table] = OrderedDict()
        self._kept_bytes = 0
        if not sum(rows):
            raise ValueError(f"{spec.title} has no rows")

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def group_rows(self) -> np.ndarray:
        """Rows of each group that is read at once, int64."""
        return np.diff(self._ends, prepend=0)

    @property
    def kept_groups(self) -> int:
        """Number of groups that stay in memory while others are read, in half of their space."""
        size = sum(part.size for part in self.parts) / len(self._ends)
        return max(1, int(_KEPT_BYTES / 2 / size)) if size else len(self._ends)

    @property
    def title(self) -> str:
        return self.spec.title

    @property
    def schema(self) -> pa.Schema:
        """The columns of the first file that has rows."""
        return next(part.schema for part in self.parts if len(part.groups))

    def place(self, row: int) -> str:
        part = self._part_with(row)
        return self.parts[part].place(row - int(self._starts[part]))

    def folder(self, row: int) -> Path:
        return self.parts[self._part_with(row)].folder

    def values(self, rows: Sequence[int], columns: Sequence[str]) -> Values:
        """Columns of these rows by name, as Python objects; None if the file lacks a column.

        A struct's field, such as ``extra_info.answer``, gives the whole struct, with at least this field.

        Raises ValueError for a damaged row.
        """
        names = list(dict.fromkeys(column.partition(".")[0] for column in columns))
        by_name: Values = {name: [None] * len(rows) for name in names}
        wanted = np.asarray(rows, dtype=np.int64)
        groups = np.searchsorted(self._ends, wanted, side="right")
        order = np.argsort(groups, kind="stable")
        bounds = np.flatnonzero(np.diff(groups[order])) + 1
        for places in np.split(order, bounds) if len(rows) else ():
            group = int(groups[places[0]])
            first = int(self._ends[group - 1]) if group else 0
            whole = self._group(group, tuple(columns))
            if not whole.num_columns:
                continue
            table = _rows_of(whole, wanted[places] - first)
            values = self.parts[self._part_of_group[group]].values(table, names)
            for name in names:
                target = by_name[name]
                for place, value in zip(places.tolist(), values[name], strict=True):
                    target[place] = value
        return by_name

    def _part_with(self, row: int) -> int:
        return int(np.searchsorted(self._starts, row, side="right")) - 1

    def _group(self, number: int, columns: tuple[str, ...]) -> pa.Table:
        key = (number, columns)
        if key not in self._kept:
            part = int(self._part_of_group[number])
            table = self.parts[part].read(number - int(self._first_groups[part]), columns)
            self._kept[key] = table
            self._kept_bytes += table.nbytes
            while len(self._kept) > 1 and self._kept_bytes > _KEPT_BYTES:
                self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes
        self._kept.move_to_end(key)
        return self._kept[key]


def _rows_of(table: pa.Table, rows: np.ndarray) -> pa.Table:
    import pyarrow as pa

    try:
        return table.take(rows)
    except pa.ArrowNotImplementedError:  # Arrow cannot take views of text.
        return pa.concat_tables([table.slice(row, 1) for row in rows.tolist()])


def open_source(name: str, spec: SourceSpec) -> Source:
    """Open the files of a source. Raises ValueError if they are missing or damaged, or have no rows."""
    if spec.hub is not None:
        return Source(name, spec, parts_of_hub(spec))
    try:
        return Source(name, spec, [part_of(file) for file in files_of(spec)])
    except OSError as error:
        raise ValueError(f"{error.filename or spec.title} cannot be read ({error.strerror}); check the path") from error
