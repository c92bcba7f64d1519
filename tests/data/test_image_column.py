"""Prompts with images: their tokens, their pixels, and rows that are refused."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dagrl.config.schema import TokenizerSpec
from dagrl.data.image_column import ImageColumn
from dagrl.data.prompts import PromptLoader
from dagrl.model_files.images import ImageSettings
from dagrl.model_files.tokenizer import make_tokenizer

TOKENIZER = make_tokenizer(TokenizerSpec(kind="characters", alphabet="ab=", images=True))
A, B, EQUALS, IMAGE = (TOKENIZER.convert_tokens_to_ids(token) for token in ("a", "b", "=", "<|image_pad|>"))
SETTINGS = ImageSettings(IMAGE, 4, 2, 2, (0.5,) * 3, (0.5,) * 3, min_pixels=64)
IMAGES = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))


def stored(width: int, height: int, shade: int = 9) -> dict[str, Any]:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (shade, shade, shade)).save(file, format="PNG")
    return {"bytes": file.getvalue(), "path": None}


def loader(folder: Path, rows: list[tuple[Any, list[Any] | None]], **options: Any) -> PromptLoader:
    path = folder / "prompts.parquet"
    records = [
        {"prompt": prompt, "data_source": "demo", "reward_model": {"ground_truth": "a"}, "images": images}
        for prompt, images in rows
    ]
    plain = pa.Table.from_pylist([{k: v for k, v in record.items() if k != "images"} for record in records])
    images = pa.array([record["images"] for record in records], IMAGES)
    pq.write_table(plain.append_column("images", images), path, row_group_size=2)
    column = ImageColumn(path, "images", SETTINGS)
    defaults: dict[str, Any] = {"max_prompt_tokens": 20, "overlong": "drop"}
    return PromptLoader(path, TOKENIZER, images=column, **{**defaults, **options})


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_images_take_their_tokens_and_bring_their_pixels(tmp_path: Path) -> None:
    rows = [
        (chat("a<image>b"), [stored(16, 8)]),
        (chat("<image>a<image>="), [stored(8, 8, 1), stored(8, 24, 2)]),
        (chat("ab="), []),
        (chat("b"), None),
    ]
    taken = loader(tmp_path, rows).read(range(4)).columns
    tokens = taken["prompt_tokens"]
    assert tokens[0].tolist() == [A, IMAGE, IMAGE, B]
    assert tokens[1].tolist() == [IMAGE, A, IMAGE, IMAGE, IMAGE, EQUALS]
    assert [tokens[2].tolist(), tokens[3].tolist()] == [[A, B, EQUALS], [B]]
    assert [taken["image_sizes"][row].tolist() for row in range(4)] == [[[8, 16]], [[8, 8], [24, 8]], [], []]
    assert taken["pixel_values"][0].shape == (128, 3) and set(taken["pixel_values"][0].ravel()) == {9}
    assert taken["pixel_values"][1][:, 0].tolist() == [1] * 64 + [2] * 192
    assert taken["pixel_values"].values.dtype == np.uint8


def test_thumbnails_are_small_images_of_what_the_model_sees(tmp_path: Path) -> None:
    rows = [("<image>a<image>", [stored(16, 8, 200), stored(600, 400)]), ("ab=", [])]
    taken = loader(tmp_path, rows, max_prompt_tokens=5000).read(range(2)).columns["image_thumbnails"].strings()
    found = []
    for uri in json.loads(taken[0]):
        kind, content = uri.split(",")
        assert kind == "data:image/jpeg;base64"
        found.append(Image.open(io.BytesIO(base64.b64decode(content))))
    assert found[0].size == (16, 8) and found[0].getpixel((3, 3)) == pytest.approx((200, 200, 200), abs=3)
    assert found[1].size == (160, 107)
    assert json.loads(taken[1]) == []


def test_prompts_whose_images_make_them_too_long_are_dropped(tmp_path: Path) -> None:
    rows = [("a<image>", [stored(64, 64)]), ("b<image>", [stored(8, 8)])]
    taken = loader(tmp_path, rows).read(range(2))
    assert (taken.columns["prompt_tokens"][0].tolist(), taken.dropped) == ([B, IMAGE], (0,))


@pytest.mark.parametrize(
    ("prompt", "images", "words"),
    [
        ("a<image>", [], "row 0 .*has 1 <image> and 0 images"),
        (chat("a"), [stored(8, 8)], "has 0 <image> and 1 images"),
        (chat("<image><|image_pad|>"), [stored(8, 8)], "writes <|image_pad|> 2 times for 1 images"),
        ("<image>", [{"bytes": b"no picture", "path": None}], "image 0 .*cannot be decoded"),
        ("<image>", [{"bytes": None, "path": "gone.png"}], "there is no file"),
    ],
)
def test_wrong_rows_are_named(prompt: Any, images: list[Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words.replace("|", r"\|")):
        loader(tmp_path, [(prompt, images)]).read(range(1))


@pytest.mark.parametrize("stored", ["a.png", 5, {"path": "a.png"}])
def test_a_value_that_is_no_list_of_images_is_named(tmp_path: Path, monkeypatch, stored: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"images": each}) + "\n" for each in (["a.png"], stored)))
    column = ImageColumn(path, "images", SETTINGS)
    for read in (lambda: column.sizes(1), lambda: column.columns([1])):
        with pytest.raises(ValueError, match=r"a\.jsonl:2 has a value of `images` that is no list of images"):
            read()
