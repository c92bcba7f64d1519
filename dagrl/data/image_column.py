"""The images of a source of prompts, read when requested."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dagrl.config.schema import SourceSpec
from dagrl.data.batch import Batch, Column
from dagrl.data.sources import Source, open_source
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


class ImageColumn:
    """The images in one column of a source, by row."""

    def __init__(self, source: Source | Path, name: str, settings: ImageSettings) -> None:
        """Raises ValueError if the source, or a file in verl's schema, lacks the column."""
        self.settings = settings
        self._name = name
        self._source = source if isinstance(source, Source) else open_source("train", SourceSpec(path=source))
        names = self._source.schema.names
        if name not in names:
            fact = f"{self._source.title} has no column {name} with images (data.image_key)"
            raise ValueError(f"{fact}; it has: {', '.join(names)}")

    def stored(self, row: int) -> list[object]:
        return self._of_rows([row])[0]

    def _of_rows(self, rows: list[int]) -> list[list[Any]]:
        stored = self._source.values(rows, [self._name])[self._name]
        for row, images in zip(rows, stored, strict=True):
            if not isinstance(images, list | None):
                raise ValueError(f"{self._source.place(row)} has a value of `{self._name}` that is no list of images")
        return [images or [] for images in stored]

    def sizes(self, row: int) -> np.ndarray:
        """Height and width of the row's resized images, int32 [images, 2]. Raises ValueError for a wrong one."""
        sizes, folder = [], self._source.folder(row)
        for number, stored in enumerate(self.stored(row)):
            try:
                image = open_image(stored, folder, decode=False)
                sizes.append(fitting_size(image.height, image.width, self.settings))
            except ValueError as error:
                raise ValueError(f"image {number} (the first is 0): {error}") from error
        return np.array(sizes, dtype=np.int32).reshape(-1, 2)

    def columns(self, rows: list[int]) -> dict[str, Column]:
        """Columns pixel_values, image_sizes, image_names and image_thumbnails of these rows."""
        stored = self._of_rows(rows)
        folders = [self._source.folder(row) for row in rows]
        pixels = [
            [resized(open_image(image, folder), self.settings) for image in of_row]
            for folder, of_row in zip(folders, stored, strict=True)
        ]
        return {
            **image_columns(pixels),
            "image_names": Column.text([json.dumps([image_name(image) for image in of_row]) for of_row in stored]),
            "image_thumbnails": Column.text([json.dumps([thumbnail(image) for image in of_row]) for of_row in pixels]),
        }


def image_columns(images: Sequence[Sequence[np.ndarray]]) -> dict[str, Column]:
    """Columns pixel_values and image_sizes of the images [height, width, 3] of each row."""
    none = np.zeros((0, 3), dtype=np.uint8)
    flat = [np.concatenate([none, *(image.reshape(-1, 3) for image in of_row)]) for of_row in images]
    sizes = [np.array([image.shape[:2] for image in of_row], np.int32).reshape(-1, 2) for of_row in images]
    return {"pixel_values": Column.ragged(flat, "uint8"), "image_sizes": Column.ragged(sizes, "int32")}


def shared_image_columns(images: Sequence[Sequence[np.ndarray]]) -> dict[str, Column]:
    """The same; rows with the same arrays share them."""
    entries: dict[tuple[int, ...], int] = {}
    index = np.array([entries.setdefault(tuple(map(id, of_row)), len(entries)) for of_row in images], dtype=np.int64)
    _, firsts = np.unique(index, return_index=True)
    columns = image_columns([images[first] for first in firsts])
    return {name: Column.shared(column, index) for name, column in columns.items()}


def images_at(batch: Batch, row: int, prefix: str = "") -> list[np.ndarray]:
    """The images of a row's prompt, or with `prefix` ``response_`` of its response; empty without such columns."""
    if f"{prefix}pixel_values" not in batch:
        return []
    return split_images(batch[f"{prefix}pixel_values"][row], batch[f"{prefix}image_sizes"][row])


def check_markers(markers: int, images: int) -> None:
    """Raise ValueError if a prompt does not mark each of its images."""
    if markers != images:
        raise ValueError(f"the prompt has {markers} {MARKER} and {images} images; each image needs one")
