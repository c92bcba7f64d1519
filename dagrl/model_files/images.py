"""Images of prompts: their pixels, resized like in the model's image processor, and their places among the tokens.

An image is cut into patches, and the model gets one token for each square of ``merge`` x ``merge`` patches. Works for
models of Qwen-VL's kind (https://arxiv.org/abs/2409.12191). Resizing is equivalent to ``Qwen2VLImageProcessorPil`` of
transformers, whose import would take CPU workers two seconds and 400 MB for torch. Engines normalise the pixels and cut
them into patches (`dagrl.backends.runtime.vision`), so that messages contain 8-bit values.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dagrl.config.schema import DataSpec, ModelSpec
from dagrl.model_files.chats import Chat
from dagrl.model_files.hf_config import read_config, read_json

if TYPE_CHECKING:
    from PIL.Image import Image

MARKER = "<image>"
"""Marks the place of an image in the text of a prompt, as in verl."""
PROCESSOR_FILE = "preprocessor_config.json"
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Defaults of the processor's class, for folders without the file."""
_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 28 * 28 * 1280
_MOST_OBLONG = 200
_THUMBNAIL_PIXELS, _THUMBNAIL_QUALITY = 160, 75
"""Longest side, and JPEG quality: about 4 KB."""


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """A model's settings for images."""

    token: int
    """Token id of a square of patches."""
    patch: int
    """Height and width of a patch in pixels."""
    merge: int
    """Height and width of a square in patches."""
    frames: int
    """Repetitions of an image, as frames of a video."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Mean and deviation of each colour, for values in 0..1."""
    min_pixels: int = _MIN_PIXELS
    max_pixels: int = _MAX_PIXELS
    """Bounds of the size of a resized image."""

    @property
    def unit(self) -> int:
        """Pixels along each side of a square; sizes of images are multiples of it."""
        return self.patch * self.merge

    def tokens(self, sizes: np.ndarray) -> np.ndarray:
        """Tokens of images of these sizes [images, 2], int64 [images]."""
        return np.prod(np.asarray(sizes, dtype=np.int64).reshape(-1, 2) // self.unit, axis=1)


def image_settings(model: ModelSpec, data: DataSpec | None = None) -> ImageSettings | None:
    """The settings of a model, with the bounds of `data`; None for a model without vision.

    ValueError if its files cannot be read.
    """
    config = read_config(model)
    vision, token = config.get("vision_config"), config.get("image_token_id")
    if not isinstance(vision, Mapping) or not isinstance(token, int):
        return None
    file = model.path.expanduser() / PROCESSOR_FILE if model.path is not None else None
    processor = read_json(file) if file is not None and file.is_file() else {}
    size = processor.get("size") or {}
    patch, merge = vision.get("patch_size", 14), vision.get("spatial_merge_size", 2)
    # A generated model has no file, and often few positions; servers prepare for the largest image.
    room = (patch * merge) ** 2 * (config.get("max_position_embeddings") or _MAX_PIXELS)
    low = processor.get("min_pixels") or size.get("shortest_edge") or min(_MIN_PIXELS, room)
    high = processor.get("max_pixels") or size.get("longest_edge") or min(_MAX_PIXELS, room)
    return ImageSettings(
        token=token,
        patch=patch,
        merge=merge,
        frames=vision.get("temporal_patch_size", 2),
        mean=tuple(processor.get("image_mean") or _CLIP_MEAN),
        std=tuple(processor.get("image_std") or _CLIP_STD),
        min_pixels=(data and data.min_pixels) or low,
        max_pixels=(data and data.max_pixels) or high,
    )


def resized(image: Image, settings: ImageSettings) -> np.ndarray:
    """The pixels of an image, resized for the model, uint8 [height, width, 3]. ValueError for a strip."""
    from PIL.Image import Resampling

    height, width = fitting_size(image.height, image.width, settings)
    return np.asarray(image.convert("RGB").resize((width, height), Resampling.BICUBIC))


def fitting_size(height: int, width: int, settings: ImageSettings) -> tuple[int, int]:
    """Height and width to resize an image to: multiples of the unit within the bounds, with about its proportions.

    Equivalent to ``smart_resize`` of transformers.
    """
    check_proportions(height, width)
    unit, low, high = settings.unit, settings.min_pixels, settings.max_pixels
    sides = [round(side / unit) * unit for side in (height, width)]
    if math.prod(sides) > high:
        scale = math.sqrt(height * width / high)
        sides = [max(unit, math.floor(side / scale / unit) * unit) for side in (height, width)]
    elif math.prod(sides) < low:
        scale = math.sqrt(low / (height * width))
        sides = [math.ceil(side * scale / unit) * unit for side in (height, width)]
    return sides[0], sides[1]


def check_proportions(height: int, width: int) -> None:
    """Raise ValueError for a strip, which models do not support."""
    if max(height, width) > _MOST_OBLONG * min(height, width):
        raise ValueError(f"{width} x {height} pixels are more than {_MOST_OBLONG} times as long as wide")


def open_image(stored: object, folder: Path, *, decode: bool = True) -> Image:
    """The image that a row stores as ``{bytes}`` or ``{path}``; relative paths are below `folder`.

    Without `decode`, only its header is read.

    ValueError if it is neither, is missing or cannot be decoded.
    """
    import PIL.Image

    content, path = stored_parts(stored)
    where = "its bytes" if content is not None else str(path)
    try:
        image = PIL.Image.open(io.BytesIO(content) if content is not None else folder / str(path))
        if decode:
            image.load()
    except FileNotFoundError as error:
        raise ValueError(f"there is no file {folder / str(path)}") from error
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        raise ValueError(f"{where} cannot be decoded: {error}") from error
    return image


def stored_parts(stored: object) -> tuple[bytes | None, str | None]:
    """Bytes and path of a row's image; bytes take precedence. ValueError without either."""
    content = stored.get("bytes") if isinstance(stored, Mapping) else stored if isinstance(stored, bytes) else None
    path = stored.get("path") if isinstance(stored, Mapping) else stored if isinstance(stored, str) else None
    if not content and not path:
        raise ValueError("it has neither bytes nor a path")
    return content or None, path or None


def image_name(stored: object) -> str:
    """The path of a stored image, or the SHA-256 of its bytes, for samples."""
    content, path = stored_parts(stored)
    return path or f"sha256:{hashlib.sha256(content or b'').hexdigest()}"


def png_uri(pixels: np.ndarray) -> tuple[str, bytes]:
    """An image, uint8 [height, width, 3], as a data URI, and the bytes of the file in it. Fast and lossless."""
    import PIL.Image

    content = io.BytesIO()
    PIL.Image.fromarray(pixels).save(content, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}", content.getvalue()


def thumbnail(pixels: np.ndarray) -> str:
    """Reduce an image, uint8 [height, width, 3], to a JPEG of at most 160 x 160 pixels, as a data URI for reports."""
    import PIL.Image

    image = PIL.Image.fromarray(pixels)
    image.thumbnail((_THUMBNAIL_PIXELS, _THUMBNAIL_PIXELS))
    content = io.BytesIO()
    image.save(content, "JPEG", quality=_THUMBNAIL_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"


def marked_parts(messages: Chat) -> list[dict[str, Any]]:
    """Messages whose markers are parts of type ``image``, as chat templates read them."""
    marked = []
    for message in messages:
        pieces = message["content"].split(MARKER)
        if len(pieces) == 1:
            marked.append(dict(message))
            continue
        parts: list[dict[str, str]] = []
        for number, piece in enumerate(pieces):
            parts += [{"type": "image"}] if number else []
            parts += [{"type": "text", "text": piece}] if piece else []
        marked.append({**message, "content": parts})
    return marked


def image_starts(tokens: np.ndarray, sizes: np.ndarray, settings: ImageSettings) -> np.ndarray:
    """Index in a prompt's tokens of each image's first token, int64 [images].

    ValueError if the prompt's image tokens do not match `sizes` [images, 2].
    """
    places, counts = np.flatnonzero(tokens == settings.token), settings.tokens(sizes)
    if len(places) != counts.sum():
        raise ValueError(f"a prompt has {len(places)} tokens for images, which take {counts.sum()}")
    return places[np.cumsum(counts) - counts]


def shortened(tokens: np.ndarray, settings: ImageSettings) -> np.ndarray:
    """The tokens with one token for each of their images, for people."""
    repeated = (tokens[1:] == settings.token) & (tokens[:-1] == settings.token)
    return tokens[np.concatenate([[True], ~repeated])] if len(tokens) else tokens


def is_image(value: object) -> bool:
    """Whether a value is an image of PIL, without importing PIL."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def split_images(pixels: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    """Images [height, width, 3] of a row's `pixels` [n, 3] and `sizes` [images, 2]; views."""
    ends = np.cumsum([int(height) * int(width) for height, width in sizes])
    return [
        pixels[end - int(height) * int(width) : end].reshape(int(height), int(width), 3)
        for end, (height, width) in zip(ends, sizes, strict=True)
    ]
