"""A header is refused where the safetensors library refuses it, and the reason is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError, safe_open

from dagrl.model_files.safetensors_header import read_header

A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}
BODY = b"\0" * 32


def written(path: Path, header: Any, body: bytes = BODY, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + body)
    return path


def library_reads(path: Path) -> bool:
    try:
        with safe_open(path, framework="pt"):
            return True
    except SafetensorError:
        return False


WHOLE: dict[str, tuple[Any, bytes]] = {
    "two tensors": ({"a": A, "b": B}, BODY),
    "metadata": ({"__metadata__": {"format": "pt"}, "a": A, "b": B}, BODY),
    "metadata of null": ({"__metadata__": None, "a": A, "b": B}, BODY),
    "another order": ({"b": B, "a": A}, BODY),
    "an unknown field": ({"a": {**A, "note": 1}, "b": B}, BODY),
    "a tensor without elements": ({"z": {**A, "shape": [0, 3], "data_offsets": [24, 24]}, "a": A, "b": B}, BODY),
    "a scalar": ({"a": {**A, "shape": [], "data_offsets": [0, 4]}}, BODY[:4]),
    "no tensors": ({}, b""),
    "spaces behind": (json.dumps({"a": A, "b": B}).encode() + b" \n ", BODY),
    "a space before": (b" {}", b""),
    "half bytes": ({"a": {"dtype": "F4", "shape": [64], "data_offsets": [0, 32]}}, BODY),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_file_is_read(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "x.safetensors", *WHOLE[name])
    assert library_reads(path)
    with safe_open(path, framework="pt") as file:
        assert sorted(read_header(path)) == sorted(file.keys())
        if name == "two tensors":
            assert {key: list(entry.shape) for key, entry in read_header(path).items()} == {
                key: file.get_slice(key).get_shape()
                for key in file.keys()  # noqa: SIM118
            }


BROKEN: dict[str, tuple[Any, bytes, str]] = {
    "cut short": ({"a": A, "b": B}, BODY[:-1], "was cut short"),
    "longer": ({"a": A, "b": B}, BODY + b"x", "is too long"),
    "a gap": ({"a": A, "b": {**B, "data_offsets": [28, 36]}}, BODY + BODY[:4], "is broken"),
    "overlapping": ({"a": A, "b": {**B, "data_offsets": [16, 24]}}, BODY[:24], "is broken"),
    "a wrong shape": ({"a": {**A, "shape": [2, 4]}, "b": B}, BODY, "is broken"),
    "a wrong dtype": ({"a": {**A, "dtype": "F16"}, "b": B}, BODY, "is broken"),
    "an unknown dtype": ({"a": {**A, "dtype": "F31"}, "b": B}, BODY, "is broken"),
    "dtype of null": ({"a": {**A, "dtype": None}, "b": B}, BODY, "is broken"),
    "no shape": ({"a": {key: A[key] for key in ("dtype", "data_offsets")}, "b": B}, BODY, "is broken"),
    "shape of fractions": ({"a": {**A, "shape": [2.0, 3.0]}, "b": B}, BODY, "is broken"),
    "a negative shape": ({"a": {**A, "shape": [-2, -3]}, "b": B}, BODY, "is broken"),
    "shape of truths": ({"a": {**A, "shape": [True, 6]}, "b": B}, BODY, "is broken"),
    "three offsets": ({"a": {**A, "data_offsets": [0, 24, 32]}, "b": B}, BODY, "is broken"),
    "offsets of text": ({"a": {**A, "data_offsets": ["0", "24"]}, "b": B}, BODY, "is broken"),
    "offsets backwards": ({"a": {**A, "data_offsets": [24, 0]}, "b": B}, BODY, "is broken"),
    "an entry of text": ({"a": "x", "b": B}, BODY, "is broken"),
    "metadata of a list": ({"__metadata__": [], "a": A, "b": B}, BODY, "is broken"),
    "metadata of numbers": ({"__metadata__": {"n": 1}, "a": A, "b": B}, BODY, "is broken"),
    "a list": ([A, B], BODY, "is broken"),
    "no JSON": (b'{"a": ', BODY, "is broken"),
    "brackets left open": (b'{"a":' + b"[" * 100_000, BODY, "is broken"),
    "no text": (b"{\xff\xfe}", BODY, "is broken"),
    "nothing": (b"", b"", "is broken"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    header, body, reason = BROKEN[name]
    path = written(tmp_path / "x.safetensors", header, body)
    assert not library_reads(path)
    with pytest.raises(ValueError, match=reason):
        read_header(path)


def test_the_length_of_the_header_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write((300_000_000).to_bytes(8, "little") + b"{")
        file.truncate(400_000_000)
    with pytest.raises(ValueError, match="is no safetensors file"):
        read_header(path)


@pytest.mark.parametrize("content", [b"", b"1234567", b"version https://git-lfs.github.com/spec/v1\n"])
def test_a_truncated_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is no safetensors file" if content else "is empty"):
        read_header(path)
