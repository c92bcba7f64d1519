"""Rows of the originals, one after the other: from a folder, the Hugging Face hub or ModelScope."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dagrl.data.prepare.dataset import Original, Record

HUBS = ("huggingface", "modelscope")
_ROWS_READ = 256
_POINTER = b"version https://git-lfs"
_MORE = re.compile(r"\S")

Row = tuple[str, str, dict[str, Any]]
"""Place, part, fields."""


def usual_files(split: str, *first: str) -> tuple[str, ...]:
    """Usual patterns of a split in a folder or a clone of a hub's repository, after `first`."""
    return (
        *first,
        *(f"{split}.{ending}" for ending in ("jsonl", "jsonl.gz", "json", "parquet")),
        f"data/{split}-*.parquet",
        f"{split}-*.parquet",
        f"{split}/**/*.jsonl",
        f"{split}/**/*.jsonl.gz",
        f"{split}/**/*.json",
        f"{split}/**/*.parquet",
    )


def records(original: Original, split: str, source: Path | None, hub: str, hub_name: str | None) -> Iterator[Record]:
    """Yield the rows of a split. ValueError, with a remedy, if they cannot be read."""
    rows = _from_folder(original, source) if source else _from_hub(original, split, hub, hub_name)
    for index, (place, part, fields) in enumerate(rows):
        yield Record(fields, place, part, split, index)


def _from_folder(original: Original, source: Path) -> Iterator[Row]:
    if not source.exists():
        raise ValueError(f"there is no folder {source}; --source is a folder with the original files")
    if not source.is_dir():
        raise ValueError(f"{source} is a file; --source is the folder that holds the original files")
    for pattern in original.files:
        paths = sorted((path for path in source.glob(pattern) if not path.is_dir()), key=_in_order)
        if paths:
            for path in paths:
                yield from _from_file(path)
            return
    shown = ", ".join(original.files[:3])
    others = f" or the like ({', '.join(original.files[3:])})" if len(original.files) > 3 else ""
    raise ValueError(f"there is no file {source}/{shown}{others}; --source is a folder with the original files")


def _in_order(path: Path) -> list[tuple[int, str]]:
    """``2.json`` before ``10.json``."""
    return [(int(piece), "") if piece.isdecimal() else (0, piece) for piece in re.split(r"(\d+)", str(path))]


def _from_file(path: Path) -> Iterator[Row]:
    name = path.name.removesuffix(".gz")
    read = {".jsonl": _json_lines, ".parquet": _parquet_rows}.get(Path(name).suffix, _json_values)
    try:
        if path.is_file():  # a pipe can be read only once
            _refuse_pointer(path)
        for place, fields in read(path):
            if not isinstance(fields, dict):
                shown = json.dumps(fields)[:60]
                raise ValueError(f"{place}: not an object with fields, but {shown}; mend the row, or remove it")
            yield place, Path(name).stem, fields
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} cannot be unpacked ({error}); fetch it again") from error


def _refuse_pointer(path: Path) -> None:
    """ValueError for a pointer of Git LFS in place of a file."""
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise ValueError(f"{path} is a pointer of Git LFS; fetch the file with `git lfs pull`")


def _opened(path: Path) -> gzip.GzipFile | io.BufferedReader:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _json_lines(path: Path) -> Iterator[tuple[str, object]]:
    with _opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield f"{path}:{number}", json.loads(line.strip())
            except json.JSONDecodeError as error:
                what = f"{error.msg} at column {error.colno}"
                raise ValueError(f"{path}:{number}: not a line of JSON: {what}") from error
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}:{number}: not a line of JSON: {error}") from error


def _json_values(path: Path) -> Iterator[tuple[str, object]]:
    try:
        with _opened(path) as file:
            text = file.read().decode("utf-8-sig").strip()
        decoder, values, position = json.JSONDecoder(), [], 0
        while position < len(text):
            value, position = decoder.raw_decode(text, position)
            values.append(value)
            following = _MORE.search(text, position)
            position = following.start() if following else len(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    rows = values[0] if len(values) == 1 and isinstance(values[0], list) else values
    for number, row in enumerate(rows):
        yield f"{path}, row {number} (the first is 0)", row


def _parquet_rows(path: Path) -> Iterator[tuple[str, object]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS_READ):
                for row in batch.to_pylist():
                    yield f"{path}, row {number} (the first is 0)", row
                    number += 1
    except (pa.ArrowException, OSError) as error:
        reason = str(error).split("\n")[0].rstrip(".")
        raise ValueError(f"{path} cannot be read as parquet ({reason}); fetch it again") from error


def _from_hub(original: Original, split: str, hub: str, hub_name: str | None) -> Iterator[Row]:
    if hub == "modelscope":
        name = hub_name or original.modelscope or original.hub
        yield from _from_folder(original, _modelscope_folder(name, original.files))
    elif original.by_file and hub_name is None:
        yield from _from_folder(original, _huggingface_folder(original.hub, original.files))
    else:
        yield from _stream(original, hub_name or original.hub, original.hub_split or split)


def _stream(original: Original, name: str, split: str) -> Iterator[Row]:
    import datasets
    import httpx

    configs = (original.config,) if original.config else ()
    number = 0
    try:
        # Images are kept as bytes.
        for row in datasets.load_dataset(name, *configs, split=split, streaming=True).decode(False):
            yield f"{name}, {split} row {number} (the first is 0)", name, row
            number += 1
    except (OSError, ValueError, httpx.HTTPError, datasets.exceptions.DatasetsError) as error:
        raise _unreachable(name, "the Hugging Face hub", error) from error


def _huggingface_folder(name: str, files: Sequence[str]) -> Path:
    import httpx
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=list(files)))
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise _unreachable(name, "the Hugging Face hub", error) from error


def _modelscope_folder(name: str, files: Sequence[str]) -> Path:
    try:
        from modelscope import dataset_snapshot_download
    except ImportError as error:
        raise ValueError(f"--hub modelscope needs its package ({error}); pip install modelscope") from error
    try:
        return Path(dataset_snapshot_download(name, allow_patterns=list(files)))
    except Exception as error:
        # ModelScope's exception classes differ between versions, and some share no base class. The call runs no code
        # of dagrl that could fail.
        raise _unreachable(name, "ModelScope", error) from error


def _unreachable(name: str, hub: str, error: Exception) -> ValueError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return ValueError(
        f"cannot load {name} from {hub}: {reason}; without network, give the folder of the original files with --source"
    )
