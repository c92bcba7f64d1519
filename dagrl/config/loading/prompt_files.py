"""The files of a source of prompts: their paths, formats and numbers of rows."""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal

from dagrl.config.errors import listed, suggest
from dagrl.config.schema import SourceSpec

Kind = Literal["parquet", "arrow", "json"]

ENDINGS: tuple[tuple[str, ...], ...] = (
    (".parquet",),
    (".arrow", ".feather", ".ipc"),
    (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz"),
    (".json", ".json.gz"),
)
"""Endings of the files that are read from a folder. Only files of the first kind are read: others are often notes."""
_SPLIT = re.compile(r"(train|test|validation|valid|val|dev)\b")
_BETWEEN = re.compile(r"[\s,]*")
_CHUNK = 1 << 20
_DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)
"""Errors of a damaged gzip file."""
_SCRIPTS = (
    *("gsm8k_tools", "gsm8k", "deepscaler", "math_dataset", "dapo_math", "aime", "amc", "mbpp", "apps", "geo3k"),
    *("ultrafeedback", "arithmetic", "word_problems", "digits", "games"),
)
"""Scripts in data_preprocess/. A name precedes its own prefixes."""


@dataclass(frozen=True, slots=True)
class PromptFile:
    """A file with prompts."""

    path: Path
    kind: Kind
    """The format, detected from the file's content."""

    @property
    def cached(self) -> Path:
        """The parquet copy of a JSON file's rows, in the user's cache. A changed file has another copy."""
        known = self.path.stat()
        # Copies of the first version may lack rows after a list.
        version = _short_hash(f"2 {known.st_size} {known.st_mtime_ns}")
        return self.cache / f"{self.cached_name}-{version}.parquet"

    @property
    def cache(self) -> Path:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dagrl" / "prompts"

    @property
    def cached_name(self) -> str:
        """The prefix of the names of all copies of the file."""
        return f"{self.path.name[:60]}-{_short_hash(os.path.realpath(self.path))}"


def _short_hash(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:16]


def files_of(spec: SourceSpec) -> list[PromptFile]:
    """The files that the paths of a source name, in their order. Files of a folder or a glob are sorted by name. A file
    with several names, such as links to it, is listed once.

    Raises ValueError if there are no files, or if one of them has no rows; OSError if one cannot be read.
    """
    found: dict[str, PromptFile] = {}
    for path in spec.paths:
        for each in _named_by(path, spec):
            found.setdefault(os.path.realpath(each), PromptFile(each, _kind_of(each)))
    return list(found.values())


def count_rows(file: PromptFile) -> int:
    """The rows of a file. Raises ValueError if it is broken; OSError if it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if file.kind == "json":
        cached = file.cached
        if not cached.is_file():
            return sum(1 for _ in json_rows(file.path))
        file = PromptFile(cached, "parquet")
    try:
        if file.kind == "parquet":
            return int(pq.read_metadata(file.path).num_rows)
        return sum(batch.num_rows for batch in arrow_batches(file.path))
    except pa.ArrowException as error:
        raise ValueError(unreadable(file, error)) from error


def arrow_batches(path: Path) -> Iterator[Any]:
    """Yield the record batches of an Arrow file in either format; they stay on disk until they are used."""
    import pyarrow as pa

    source = pa.memory_map(str(path))
    if _head(path).startswith(b"ARROW1"):
        reader = pa.ipc.open_file(source)
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
    else:
        yield from pa.ipc.open_stream(source)


def unreadable(file: PromptFile, error: Exception) -> str:
    """The message about a file that Arrow cannot read."""
    reason = str(error).split(". ")[0].split("\n")[0].rstrip(".")
    return f"{file.path} cannot be read as {file.kind} ({reason}); create the file again"


def json_rows(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the rows of a JSON file as JSON, with their places: lines from 1, or indices in a list from 0.

    The file holds a row in each line, or one list of rows. It is not read whole. Raises ValueError, with the line, if
    it is damaged.
    """
    number = 0
    try:
        with _opened(path) as file:
            if is_list_of_rows(path):
                for row in _items(file, path):
                    # Reading the row reports halves of surrogate pairs.
                    yield number, json.dumps(row, ensure_ascii=False).encode(errors="surrogatepass")
                    number += 1
                return
            for number, line in enumerate(file, start=1):
                if text := line.removeprefix(b"\xef\xbb\xbf").strip():
                    yield number, text
    except _DAMAGED as error:
        raise ValueError(f"{path}:{number + 1} cannot be unpacked ({error}); fetch the file again") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}, row {number} (the first is 0) is not JSON: {error}; mend the file") from error


def is_list_of_rows(path: Path) -> bool:
    """Whether a JSON file is one list, not a row in each line. False for a damaged file."""
    try:
        with _opened(path) as file:
            return file.read(_CHUNK).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
    except _DAMAGED:
        return False


def _items(file: IO[bytes], path: Path) -> Iterator[Any]:
    """Yield the items of a JSON list, reading on as they end. Raises ValueError if anything follows the list."""
    text, decoder, line = io.TextIOWrapper(file, "utf-8-sig"), json.JSONDecoder(), 1
    waiting = text.read(_CHUNK)
    at = waiting.index("[") + 1
    while True:
        at = _BETWEEN.match(waiting, at).end()  # type: ignore[union-attr]
        if waiting.startswith("]", at):
            for piece in chain([waiting[at + 1 :]], iter(lambda: text.read(_CHUNK), "")):
                if behind := piece.lstrip():
                    line += waiting.count("\n", 0, at) + piece.count("\n", 0, len(piece) - len(behind))
                    fact = f"{path}:{line}: {behind[:40]!r} follows the end of the list of rows"
                    raise ValueError(f"{fact}; keep one list, or write a row in each line")
                line += piece.count("\n")
            return
        try:
            item, end = decoder.raw_decode(waiting, at)
        except json.JSONDecodeError:
            end = len(waiting)
        except ValueError as error:  # The number has too many digits.
            raise json.JSONDecodeError(str(error), waiting, at) from error
        # A number may go on in the next piece.
        if end < len(waiting):
            yield item
            at = end
        elif more := text.read(max(_CHUNK, len(waiting) - at)):
            line += waiting.count("\n", 0, at)
            waiting, at = waiting[at:] + more, 0
        else:
            decoder.raw_decode(waiting, at)
            raise json.JSONDecodeError("the list does not end", waiting, len(waiting))


def _opened(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if _head(path).startswith(b"\x1f\x8b") else path.open("rb")  # type: ignore[return-value]


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(256)


def _named_by(path: Path, spec: SourceSpec) -> list[Path]:
    if path.is_dir():
        return _in_folder(path, spec)
    if path.exists():
        if not path.is_file():
            raise ValueError(f"{path} is not a regular file; give a file with prompts")
        return [path]
    # The name of an existing folder is not a pattern.
    base = next(parent for parent in path.parents if parent.is_dir())
    pattern = str(path.relative_to(base))
    if glob.has_magic(pattern):
        # Unlike `Path.glob`, it skips hidden files.
        named = map(Path, glob.glob(str(Path(glob.escape(str(base)), pattern)), recursive=True))  # noqa: PTH207
        found = sorted(each for each in named if each.is_file())
        if not found:
            raise ValueError(f"no file matches {path}; check the pattern")
        return found
    remedy = f"check the path, or create the file with `dagrl data {_script_for(path)} --local_dir {path.parent}`"
    raise ValueError(f"{path} does not exist; {remedy}")


def _script_for(path: Path) -> str:
    """The name of the script that creates such a file, by the name of its folder or of the file."""
    named = (name for text in (path.parent.name, path.name) for name in _SCRIPTS if name in text.lower())
    return next(named, "NAME")


def _in_folder(folder: Path, spec: SourceSpec) -> list[Path]:
    """The files of a folder, or of a data set that `datasets` saved there."""
    split = spec.split or spec.usual_split
    if splits := _listed_in(folder / "dataset_dict.json", "splits"):
        if split not in splits:
            raise ValueError(f"{folder} has no split `{split}`; {suggest(split, splits)}")
        folder = folder / split
    if shards := _listed_in(folder / "state.json", "_data_files"):
        return [folder / shard["filename"] for shard in shards]
    names = sorted(each.name for each in folder.iterdir() if each.is_file() and not each.name.startswith("."))
    for endings in ENDINGS:
        if ours := [name for name in names if name.endswith(endings)]:
            return [folder / name for name in _of_split(folder, ours, split)]
    usual = listed([each[0] for each in ENDINGS])
    raise ValueError(f"{folder} is a folder without prompt files ({usual}); name files, or a glob")


def _listed_in(path: Path, key: str) -> list[Any]:
    """A list in a file that `datasets` writes; empty if there is no such file."""
    try:
        found = json.loads(path.read_bytes()) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); save the data set again") from error
    listed_there = found.get(key) if isinstance(found, dict) else None
    return listed_there if isinstance(listed_there, list) else []


def _of_split(folder: Path, names: Sequence[str], split: str) -> list[str]:
    """The files of a split if file names begin with split names; otherwise all files."""
    splits = {name: found[1] for name in names if (found := _SPLIT.match(name.replace("_", "-")))}
    if not splits:
        return list(names)
    if split not in splits.values():
        known = sorted(set(splits.values()))
        raise ValueError(
            f"{folder} has files of {listed(known)}, and none of `{split}`; set `split`, or name the files"
        )
    return [name for name in names if splits.get(name) == split]


def _kind_of(path: Path) -> Kind:
    head = _head(path)
    if not head:
        raise ValueError(f"{path} is empty (0 bytes); create it again")
    if head.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path} is a pointer of Git LFS; fetch the file with `git lfs pull`")
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return "arrow"
    if head.startswith(b"\x1f\x8b"):
        return "json"
    # JSON may begin with many blank lines.
    if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"[", b""):
        return "json"
    if path.suffix == ".parquet":
        return "parquet"  # Reading the file reports the problem.
    other = "CSV" if path.suffix == ".csv" else "in a format that is not supported"
    raise ValueError(f"{path} is {other}; convert it to parquet or JSON Lines")
