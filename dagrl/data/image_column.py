"""The images of a prompt file, read when requested: row groups stay in memory as long as they fit."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dagrl.data.batch import Batch, Column
from dagrl.model_files.images import (
    MARKER,
    ImageSettings,
    fitting_size,
    image_name,
    open_image,
    resized,
    split_images,
    thumbnail,
)

if TYPE_CHECKING:
    from pyarrow import Table
    from pyarrow.parquet import ParquetFile

_KEPT_BYTES = 512 << 20


class ImageColumn:
    """The images in one column of a parquet file, by row."""

    def __init__(self, path: Path, name: str, settings: ImageSettings) -> None:
        """Raises ValueError if the file lacks the column."""
        import pyarrow.parquet as pq

        self.settings = settings
        self._name, self._folder = name, path.parent
        self._file: ParquetFile = pq.ParquetFile(path, memory_map=True)
        if name not in self._file.schema_arrow.names:
            names = ", ".join(self._file.schema_arrow.names)
            raise ValueError(f"{path} has no column {name} with images (data.image_key); it has: {names}")
        groups = range(self._file.num_row_groups)
        self._ends = np.cumsum([self._file.metadata.row_group(group).num_rows for group in groups])
        self._kept: OrderedDict[int, Table] = OrderedDict()

    def stored(self, row: int) -> list[Any]:
        """The images of a row as they are stored; empty if it has none."""
        group = int(np.searchsorted(self._ends, row, side="right"))
        first = int(self._ends[group - 1]) if group else 0
        return self._group(group)[self._name][row - first].as_py() or []

    def sizes(self, row: int) -> np.ndarray:
        """Height and width of the row's resized images, int32 [images, 2]. Raises ValueError for a wrong one."""
        sizes = []
        for number, stored in enumerate(self.stored(row)):
            try:
                image = open_image(stored, self._folder, decode=False)
                sizes.append(fitting_size(image.height, image.width, self.settings))
            except ValueError as error:
                raise ValueError(f"image {number} (the first is 0): {error}") from error
        return np.array(sizes, dtype=np.int32).reshape(-1, 2)

    def columns(self, rows: list[int]) -> dict[str, Column]:
        """Columns pixel_values, image_sizes, image_names and image_thumbnails of these rows."""
        stored = [self.stored(row) for row in rows]
        pixels = [[resized(open_image(each, self._folder), self.settings) for each in of_row] for of_row in stored]
        return {
            **image_columns(pixels),
            "image_names": Column.text([json.dumps([image_name(each) for each in of_row]) for of_row in stored]),
            "image_thumbnails": Column.text([json.dumps([thumbnail(each) for each in of_row]) for of_row in pixels]),
        }

    def _group(self, number: int) -> Table:
        if number not in self._kept:
            self._kept[number] = self._file.read_row_group(number, [self._name])
            while len(self._kept) > 1 and sum(table.nbytes for table in self._kept.values()) > _KEPT_BYTES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(number)
        return self._kept[number]


def image_columns(images: Sequence[Sequence[np.ndarray]]) -> dict[str, Column]:
    """Columns pixel_values and image_sizes of the images [height, width, 3] of each row."""
    none = np.zeros((0, 3), dtype=np.uint8)
    flat = [np.concatenate([none, *(image.reshape(-1, 3) for image in of_row)]) for of_row in images]
    sizes = [np.array([image.shape[:2] for image in of_row], np.int32).reshape(-1, 2) for of_row in images]
    return {"pixel_values": Column.ragged(flat, "uint8"), "image_sizes": Column.ragged(sizes, "int32")}


def shared_image_columns(images: Sequence[Sequence[np.ndarray]]) -> dict[str, Column]:
    """The same, where rows with the same arrays share them."""
    entries: dict[tuple[int, ...], int] = {}
    index = np.array([entries.setdefault(tuple(map(id, of_row)), len(entries)) for of_row in images], dtype=np.int64)
    _, firsts = np.unique(index, return_index=True)
    columns = image_columns([images[first] for first in firsts])
    return {name: Column.shared(column, index) for name, column in columns.items()}


def images_at(batch: Batch, row: int, prefix: str = "") -> list[np.ndarray]:
    """The images of a row's prompt, or with `prefix` ``response_`` of its response; none without such columns."""
    if f"{prefix}pixel_values" not in batch:
        return []
    return split_images(batch[f"{prefix}pixel_values"][row], batch[f"{prefix}image_sizes"][row])


def check_markers(markers: int, images: int) -> None:
    """Raise ValueError if a prompt marks other than its number of images."""
    if markers != images:
        raise ValueError(f"the prompt has {markers} {MARKER} and {images} images; each image needs one")
