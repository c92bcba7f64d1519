"""Images: the sizes and pixels of transformers' processor, and their places among the tokens."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dagrl.model_files.images import (
    ImageSettings,
    fitting_size,
    image_name,
    image_starts,
    marked_parts,
    open_image,
    resized,
    split_images,
)

GREY = (0.5, 0.5, 0.5)
SETTINGS = ImageSettings(9, 4, 2, 2, GREY, GREY, min_pixels=256, max_pixels=4096)


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    noise = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise).convert(mode)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


@pytest.mark.parametrize(("width", "height"), [(16, 16), (7, 9), (3, 40), (200, 150), (64, 64), (90, 33), (500, 3)])
def test_sizes_and_pixels_are_those_of_transformers(width: int, height: int) -> None:
    import torch
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

    from dagrl.backends.runtime.vision import patches

    image = picture(width, height)
    assert fitting_size(height, width, SETTINGS) == smart_resize(height, width, 8, 256, 4096)
    processor = Qwen2VLImageProcessorPil(patch_size=4, min_pixels=256, max_pixels=4096, image_mean=GREY, image_std=GREY)
    expected = processor([image], return_tensors="pt")
    pixels, grids = patches([resized(image, SETTINGS)], SETTINGS, torch.device("cpu"), torch.float32)
    assert grids.equal(expected["image_grid_thw"])
    assert (pixels - expected["pixel_values"]).abs().max() < 1e-6


def test_other_modes_become_rgb() -> None:
    for mode in ("L", "RGBA", "P", "1"):
        assert resized(picture(16, 24, mode), SETTINGS).shape == (24, 16, 3)


def test_a_strip_is_refused() -> None:
    with pytest.raises(ValueError, match="2 x 500 pixels are more than 200 times"):
        fitting_size(500, 2, SETTINGS)


def test_stored_images_are_opened(tmp_path: Path) -> None:
    content = png(picture(16, 16))
    (tmp_path / "a.png").write_bytes(content)
    for stored in ({"bytes": content, "path": None}, {"bytes": None, "path": "a.png"}, content, "a.png"):
        assert open_image(stored, tmp_path).size == (16, 16)
    assert image_name({"bytes": content, "path": "a.png"}) == "a.png"
    assert image_name({"bytes": content, "path": None}).startswith("sha256:")


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ({"bytes": None, "path": None}, "neither bytes nor a path"),
        ({"bytes": b"GIF89a", "path": None}, "its bytes cannot be decoded"),
        ({"bytes": None, "path": "none.png"}, "there is no file"),
    ],
)
def test_wrong_ones_are_named(stored: dict, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        open_image(stored, tmp_path)


def test_a_torn_image_is_found_when_it_is_decoded(tmp_path: Path) -> None:
    torn = {"bytes": png(picture(64, 64))[:2000], "path": None}
    assert open_image(torn, tmp_path, decode=False).size == (64, 64)
    with pytest.raises(ValueError, match="cannot be decoded"):
        open_image(torn, tmp_path)


def test_markers_become_parts() -> None:
    chat = [{"role": "system", "content": "Look."}, {"role": "user", "content": "<image>a<image>b"}]
    image = {"type": "image"}
    parts = [image, {"type": "text", "text": "a"}, image, {"type": "text", "text": "b"}]
    assert marked_parts(chat) == [chat[0], {"role": "user", "content": parts}]


def test_places_of_images() -> None:
    sizes = np.array([[16, 8], [8, 24]])
    tokens = np.array([1, 9, 9, 2, 9, 9, 9])
    assert image_starts(tokens, sizes, SETTINGS).tolist() == [1, 4]
    with pytest.raises(ValueError, match="7 tokens for images, which take 5"):
        image_starts(np.full(7, 9), sizes, SETTINGS)
    pixels = np.arange((128 + 192) * 3).reshape(-1, 3)
    assert [each.shape for each in split_images(pixels, sizes)] == [(16, 8, 3), (8, 24, 3)]
    assert split_images(pixels, sizes)[1][0, 0].tolist() == pixels[128].tolist()
