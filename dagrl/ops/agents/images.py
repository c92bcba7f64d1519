"""Images of agents: those of a row as its program gets them, and those in requests, which are decoded once."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from weakref import WeakValueDictionary

from dagrl.data.batch import Batch
from dagrl.data.image_column import images_at
from dagrl.model_files.images import ImageSettings, marked_parts, png_uri, resized
from dagrl.ops.agents.messages import JsonObject, RequestError
from dagrl.ops.agents.tree import SeenImage

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_MOST_PIXELS = 1 << 25
"""Largest image that is decoded, before it is resized; a small file may hold far more pixels."""


class ImageReader:
    """Decodes images of requests; one that a trajectory holds is not decoded again. Used on the endpoint's loop."""

    def __init__(self, vision: ImageSettings | None) -> None:
        """`vision` is set for a policy that takes images."""
        self._vision = vision
        self._known: WeakValueDictionary[str, SeenImage] = WeakValueDictionary()
        self._under_way: dict[str, asyncio.Future[SeenImage]] = {}
        # Few, because each may need hundreds of megabytes.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="images")

    async def read(self, key: str, data: bytes) -> SeenImage:
        """The image in `data`, whose SHA-256 is `key`. Raises RequestError."""
        if self._vision is None:
            raise RequestError("the policy is given no images; set `data.image_key` of the pipeline to show it some")
        if (known := self._known.get(key)) is not None:
            return known
        if key not in self._under_way:
            loop = asyncio.get_running_loop()
            self._under_way[key] = work = loop.run_in_executor(self._threads, _decoded, key, data, self._vision)
            work.add_done_callback(lambda _: self._under_way.pop(key))
        # Another request may wait for it when this one is cancelled.
        self._known[key] = image = await asyncio.shield(self._under_way[key])
        return image


def _decoded(key: str, data: bytes, vision: ImageSettings) -> SeenImage:
    import PIL.Image

    try:
        image = PIL.Image.open(io.BytesIO(data), formats=_FORMATS)
        pixels = image.width * image.height
        if pixels <= _MOST_PIXELS:
            return SeenImage(f"sha256:{key}", resized(image, vision))
    except Exception as error:  # Pillow's decoders raise anything for a broken file.
        raise RequestError(f"an image cannot be read as {', '.join(_FORMATS)}: {error}") from error
    raise RequestError(f"an image has {pixels} pixels, more than {_MOST_PIXELS}; send a smaller one")


@dataclass(frozen=True, slots=True)
class RowImages:
    """The images of a row."""

    seen: tuple[SeenImage, ...] = ()
    urls: tuple[str, ...] = ()
    """The same as ``data:`` URLs."""
    keys: tuple[str, ...] = ()
    """SHA-256 of their bytes there."""

    def by_key(self) -> dict[str, SeenImage]:
        return dict(zip(self.keys, self.seen, strict=True))

    def messages(self, messages: Sequence[JsonObject]) -> list[JsonObject]:
        """Messages of the data set with the images where they are marked, as OpenAI's protocol has them."""
        if not self.urls:
            return [dict(message) for message in messages]
        urls = iter(self.urls)

        def sent(part: dict[str, object]) -> dict[str, object]:
            return {"type": "image_url", "image_url": {"url": next(urls)}} if part["type"] == "image" else part

        return [
            message if isinstance(message["content"], str) else {**message, "content": [*map(sent, message["content"])]}
            for message in marked_parts(messages)
        ]


def images_of_rows(batch: Batch, rows: Sequence[int]) -> dict[int, RowImages]:
    """The images of these rows; rows that share images in memory share them here."""
    made: dict[tuple[int, ...], RowImages] = {}
    of_rows = {}
    for row in rows:
        images = images_at(batch, row)
        # Rows with the same images have the same memory.
        place = tuple(image.ctypes.data for image in images)
        if place not in made:
            names = json.loads(batch["image_names"].string(row)) if images else []
            made[place] = _row_images([SeenImage(*pair) for pair in zip(names, images, strict=True)])
        of_rows[row] = made[place]
    return of_rows


def _row_images(seen: Sequence[SeenImage]) -> RowImages:
    files = [png_uri(image.pixels) for image in seen]
    urls, keys = [url for url, _ in files], [hashlib.sha256(file).hexdigest() for _, file in files]
    return RowImages(tuple(seen), tuple(urls), tuple(keys))
