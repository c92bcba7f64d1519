"""Rows of a prompt file that a run cannot use: prompts, responses and reference answers that are null or empty.

The first rows are read, up to `SCANNED_ROWS` and `SCANNED_BYTES`. In later rows only nulls are detected, from the
file's statistics.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dagrl.config.schema import SourceSpec
from dagrl.data.sources.fields import prompt_of
from dagrl.model_files.chats import chat_of, fields_beside_content, no_chat
from dagrl.model_files.images import MARKER, check_proportions, open_image
from dagrl.model_files.nested_columns import value_at
from dagrl.validation.sampled_files import Row, SampledFile

if TYPE_CHECKING:
    import pyarrow.parquet as pq

SCANNED_ROWS = 20_000
SCANNED_BYTES = 16 << 20
"""Size of the rows in Arrow's memory. Reading up to both bounds takes 0.1 s."""
_DECODED_ROWS = 32
"""Number of rows whose images are decoded; for others only the headers are read."""


class Flaw(NamedTuple):
    """A kind of fault in a row."""

    text: str
    """The flaw as the object of a sentence."""
    kind: Literal["fatal", "no answer", "blank answer", "empty response"] = "fatal"
    """A run ends at a ``fatal`` flaw. Nodes decide about missing answers, and some empty responses may be intended."""


@dataclass(frozen=True, slots=True)
class CheckedColumns:
    """The columns of a file to check."""

    spec: SourceSpec
    """The source, whose columns hold prompts and answers."""
    prompt: bool
    responses: tuple[str, ...] = ()
    """Columns, or fields of structs, with responses."""
    answers: bool = False
    alone: bool = False
    """Whether chats with responses have no separate column of prompts."""
    images: str | None = None
    """The column with the images of prompts."""
    folder: Path = Path()
    """The folder of relative paths of images."""


@dataclass(slots=True)
class RowFaults:
    """Faults in the rows of a file."""

    in_lines: bool = False
    """Whether rows are named by their lines."""
    scanned: int = 0
    """The number of rows that were read."""
    faults: dict[Flaw, list[int]] = field(default_factory=dict)
    """The rows, or lines, with each fault."""
    behind: dict[Flaw, tuple[int, int]] = field(default_factory=dict)
    """The first and the last row of a range, after the scanned rows, in which statistics show a fault."""

    def everywhere(self, what: Flaw) -> bool:
        """Whether all scanned rows have a fault."""
        return len(self.faults.get(what, ())) == self.scanned

    def sentence(self, what: Flaw) -> str:
        """The rows with a fault, as the predicate of a sentence about the file."""
        if what not in self.faults:
            start, end = self.behind[what]
            return f"has {what.text} between row {start} and row {end} (the first is 0)"
        first, *others = self.faults[what]
        more = f", and {len(others)} more like it" if others else ""
        where = f"line {first}" if self.in_lines else f"row {first} (the first is 0)"
        return f"has {what.text} in {where}{more}"


def row_faults(file: SampledFile, columns: CheckedColumns, share: float = 1.0) -> RowFaults:
    """Faults in the first rows of a file, of which `share` of the usual number is read.

    OSError, ArrowException and ValueError if it is damaged.
    """
    found, size, spec = RowFaults(file.in_lines), 0, columns.spec
    wanted = [*([spec.prompt_key] if columns.prompt else []), *columns.responses]
    wanted += [spec.answer_key] if columns.answers else []
    wanted += [columns.images] if columns.images else []
    # The types of other files' columns hold for all rows.
    wanted += ["data_source"] if file.in_json else []
    if not wanted:
        return found
    for batch in file.batches(wanted):
        for number, row in zip(batch.numbers, batch.rows, strict=True):
            for what in dict.fromkeys(_faults_of(row, columns, decode=found.scanned < _DECODED_ROWS * share)):
                found.faults.setdefault(what, []).append(number)
            found.scanned += 1
        size += batch.size
        if found.scanned >= SCANNED_ROWS * share or size > SCANNED_BYTES * share:
            break
    if file.parquet is not None:
        found.behind = _nulls_behind(file.parquet, columns, found.scanned)
    return found


def _nulls_behind(file: pq.ParquetFile, columns: CheckedColumns, scanned: int) -> dict[Flaw, tuple[int, int]]:
    """Return the flaws of nulls in groups of rows that were not read, each with the first such group's rows."""
    flaws: dict[Flaw, tuple[int, int]] = {}
    metadata, start = file.metadata, 0
    paths = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
    # A message of calls has no content.
    required = ("role",) if any("tool_calls" in path.split(".") for path in paths) else ("role", "content")
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        end = start + group.num_rows
        # The nulls of a partly read group may be in the part that was read.
        for index in range(group.num_columns) if scanned <= start else ():
            chunk = group.column(index)
            nulls = chunk.statistics.null_count if chunk.statistics and chunk.statistics.has_null_count else 0
            if nulls and (flaw := _null_in(chunk.path_in_schema, columns, required)):
                flaws.setdefault(flaw, (start, end - 1))
        start = end
    return flaws


def _null_in(path: str, columns: CheckedColumns, required: tuple[str, ...]) -> Flaw | None:
    """Return the flaw of a null in a leaf of the file's schema; None if a null is allowed there."""
    name, *fields = path.split(".")
    if columns.answers and path == columns.spec.answer_key:
        return _no_answer(columns.spec)
    if columns.prompt and name == columns.spec.prompt_key and (not fields or fields[-1] in required):
        return Flaw("a prompt, or a message of one, that is null" if fields else "a prompt of null")
    return Flaw(f"a response of null in `{path}`") if path in columns.responses else None


def _faults_of(row: Row, columns: CheckedColumns, *, decode: bool) -> Iterator[Flaw]:
    try:
        yield from _faults_of_values(row, columns, decode=decode)
    except ValueError as error:
        yield Flaw(str(error))


def _faults_of_values(row: Row, columns: CheckedColumns, *, decode: bool) -> Iterator[Flaw]:
    """Raises ValueError, with the flaw, for a value of another type than its column should have."""
    spec = columns.spec
    if not isinstance(row.get("data_source"), str | None):
        raise ValueError("a data_source that is no text")
    prompt = prompt_of(value_at(row, spec.prompt_key), spec, has_template=False) if columns.prompt else None
    if columns.prompt:
        yield from _of_prompt(prompt)
    if columns.images:
        images = row[columns.images] or []
        if not isinstance(images, list):
            raise ValueError(f"a value of `{columns.images}` that is no list of images")
        if columns.prompt and _markers(prompt) != len(images):
            yield Flaw(f"a prompt with another number of {MARKER} than of images")
        yield from _of_images(images, columns.folder, decode=decode)
    before = []
    for name in columns.responses:
        response = chat_of(value_at(row, name))
        if no_chat(response):
            raise ValueError(f"a response in `{name}` that is neither text nor a list of messages")
        if isinstance(response, list):
            before.append(response[:-1])
            yield from _of_chat(response, name, alone=columns.alone)
        elif response is None:
            yield Flaw(f"a response of null in `{name}`")
        elif not response:
            yield _empty_response(name)
    if any(other != before[0] for other in before[1:]):
        yield Flaw("chats that differ before their responses")
    if columns.answers:
        answer = value_at(row, spec.answer_key)
        if answer is None or answer != answer:  # NaN
            yield _no_answer(spec)
        elif isinstance(answer, bytes) and not _is_text(answer):
            yield Flaw(f"a reference answer of bytes that are no text in UTF-8 ({spec.answer_key})")
        elif isinstance(answer, str | bytes) and not answer.strip():
            yield Flaw(f"an empty reference answer ({spec.answer_key})", "blank answer")


def _no_answer(spec: SourceSpec) -> Flaw:
    return Flaw(f"a reference answer of null ({spec.answer_key})", "no answer")


def _empty_response(column: str) -> Flaw:
    return Flaw(f"an empty response in `{column}`", "empty response")


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _of_prompt(prompt: object) -> Iterator[Flaw]:
    if prompt is None:
        yield Flaw("a prompt of null")
    elif isinstance(prompt, list):
        for key in _missing(prompt):
            yield Flaw(f"a message without {key} in its prompt")
        if not any(message is None or message.get("content") != "" for message in prompt):
            yield Flaw("an empty prompt")
    elif not prompt:
        yield Flaw("an empty prompt")


def _markers(prompt: object) -> int:
    """Marks of images in a prompt."""
    chat = prompt if isinstance(prompt, list) else []
    texts = [prompt] if isinstance(prompt, str) else [(message or {}).get("content") for message in chat]
    return sum((text or "").count(MARKER) for text in texts)


def _of_images(images: list[Any], folder: Path, *, decode: bool) -> Iterator[Flaw]:
    for stored in images:
        try:
            image = open_image(stored, folder, decode=decode)
            check_proportions(image.height, image.width)
        except ValueError as error:
            yield Flaw(f"a wrong image ({error})")


def _of_chat(chat: list[Any], name: str, *, alone: bool) -> Iterator[Flaw]:
    """Flaws of a chat that ends with a response; `alone`: no column `prompt` can precede it."""
    if not chat:
        yield Flaw(f"no response in `{name}`")
        return
    *before, last = chat
    if last is None or last.get("role") != "assistant":
        yield Flaw(f"a chat in `{name}` whose last message is not the assistant's")
    elif not isinstance(last.get("content"), str):
        yield Flaw(f"a response without text in `{name}`")
    elif not last["content"] and not fields_beside_content(last):
        yield _empty_response(name)
    for key in _missing(before):
        yield Flaw(f"a message without {key} in `{name}`")
    if alone and not before:
        yield Flaw(f"a chat in `{name}` with nothing before its response")


def _missing(messages: list[Any]) -> Iterator[str]:
    """Keys that messages lack: the role, or else the content."""
    for message in messages:
        if message is None or not isinstance(message.get("role"), str):
            yield "role"
        elif not isinstance(message.get("content"), str):
            yield "content"
