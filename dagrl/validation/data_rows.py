"""Rows of a prompt file that a run cannot use: prompts, responses and reference answers that are null or empty.

The first `SCANNED_BYTES` of these columns are read. In the rows behind them the file's statistics tell of nulls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

SCANNED_BYTES = 16 << 20
"""As Arrow holds them in memory: 60,000 short prompts or so, in less than 0.1 s."""
_BATCH_BYTES = 4 << 20
_BATCH_ROWS = 1024
_ANSWER = "reward_model.ground_truth"

NO_ANSWER = "a reference answer of null (reward_model.ground_truth)"
BLANK_ANSWER = "an empty reference answer (reward_model.ground_truth)"
NULL_PROMPT = "a prompt of null"
EMPTY_PROMPT = "an empty prompt"
EMPTY_RESPONSE = "an empty response"
"""Followed by its column. A policy may learn to say nothing, so not every one is a fault."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns to look at in a file."""

    prompt: bool
    responses: tuple[str, ...] = ()
    """Columns, or fields of structs, that hold some."""
    answers: bool = False
    alone: bool = False
    """Whether chats with responses stand alone, without a column `prompt`."""


@dataclass(slots=True)
class Fault:
    """One thing that is wrong with rows."""

    first: int = 0
    """The first such row that was found; the first of the file is 0."""
    rows: int = 0
    """How many were found."""
    last: int | None = None
    """Where statistics tell of a fault: the last row that may be meant by `first`."""


@dataclass(slots=True)
class RowFaults:
    """Faults in the rows of a file."""

    scanned: int = 0
    """Rows that were looked at."""
    faults: dict[str, Fault] = field(default_factory=dict)
    """By what is wrong, as the object of a sentence."""

    def add(self, what: str, first: int, rows: int, last: int | None = None) -> None:
        """Count rows with a fault."""
        if rows:
            fault = self.faults.setdefault(what, Fault(first, 0, last))
            fault.rows += rows

    def everywhere(self, what: str) -> bool:
        """Whether all rows that were looked at have a fault."""
        return self.faults[what].last is None and self.faults[what].rows == self.scanned

    def sentence(self, what: str) -> str:
        """Which rows have a fault: the predicate of a sentence about the file."""
        fault = self.faults[what]
        if fault.last is not None:
            return f"has {what} between row {fault.first} and row {fault.last} (the first is 0)"
        more = f", and {fault.rows - 1} more like it" if fault.rows > 1 else ""
        return f"has {what} in row {fault.first} (the first is 0){more}"


def row_faults(file: pq.ParquetFile, columns: Columns, limit: int | None = None) -> RowFaults:
    """Faults in the rows of a file, or in its first `limit` rows. OSError and ArrowException if it is torn."""
    found = RowFaults()
    rows = file.metadata.num_rows if limit is None else min(limit, file.metadata.num_rows)
    wanted = [*(["prompt"] if columns.prompt else []), *columns.responses, *([_ANSWER] if columns.answers else [])]
    if not wanted:
        return found
    taken = 0
    for batch in file.iter_batches(batch_size=_batch_rows(file.metadata), columns=wanted):
        batch = batch.slice(0, rows - found.scanned)
        for what, rows_of_fault in _faults_of(batch, columns):
            if len(rows_of_fault):
                found.add(what, found.scanned + rows_of_fault[0].as_py(), len(rows_of_fault))
        found.scanned += batch.num_rows
        taken += batch.nbytes
        if found.scanned >= rows or taken > SCANNED_BYTES:
            break
    _add_nulls_behind(file, columns, rows, found)
    return found


def _batch_rows(metadata: pq.FileMetaData) -> int:
    """Rows of a batch of `_BATCH_BYTES` or less."""
    size = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES * metadata.num_rows // max(size, 1)))


def _add_nulls_behind(file: pq.ParquetFile, columns: Columns, rows: int, found: RowFaults) -> None:
    """Nulls in the rows that were not read, as the statistics of row groups tell them."""
    metadata, start = file.metadata, 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        end = start + group.num_rows
        # Of a group that is read in part, nobody knows which part has the nulls.
        if found.scanned <= start and end <= rows:
            for index in range(group.num_columns):
                chunk = group.column(index)
                nulls = chunk.statistics.null_count if chunk.statistics and chunk.statistics.has_null_count else 0
                what = _null_in(chunk.path_in_schema, columns)
                if nulls and what and what not in found.faults:
                    found.add(what, start, nulls, end - 1)
        start = end


def _null_in(path: str, columns: Columns) -> str | None:
    """The meaning of a null in a leaf of the file's schema; None if a null is allowed there."""
    name, *fields = path.split(".")
    if columns.answers and path == _ANSWER:
        return NO_ANSWER
    if columns.prompt and name == "prompt" and (not fields or fields[-1] in ("role", "content")):
        return "a prompt, or a message of one, that is null" if fields else NULL_PROMPT
    return f"a response of null in `{path}`" if path in columns.responses else None


def _faults_of(batch: pa.RecordBatch, columns: Columns) -> Iterator[tuple[str, pa.Array]]:
    """Possible faults of rows, each with the numbers of the rows that have it, in rising order."""
    if columns.prompt:
        prompts = batch.column("prompt")
        yield from _of_prompt_chats(prompts) if _is_list(prompts) else _of_prompts(prompts)
    chats = []
    for name in columns.responses:
        responses = _value(batch, name)
        if _is_list(responses):
            chats.append(responses)
            yield from _of_response_chats(responses, name, alone=columns.alone)
        else:
            yield f"a response of null in `{name}`", _where(responses.is_null())
            yield f"{EMPTY_RESPONSE} in `{name}`", _where(_is_empty(responses))
    for other in chats[1:]:
        yield "chats that differ before their responses", _where_differ(chats[0], other)
    if columns.answers:
        yield from _of_answers(_value(batch, _ANSWER))


def _of_prompts(prompts: pa.Array) -> Iterator[tuple[str, pa.Array]]:
    yield NULL_PROMPT, _where(prompts.is_null())
    yield EMPTY_PROMPT, _where(_is_empty(prompts))


def _of_prompt_chats(chats: pa.Array) -> Iterator[tuple[str, pa.Array]]:
    """Prompts that are lists of messages: each has a role and a content, and they are not all empty."""
    import pyarrow.compute as pc

    yield NULL_PROMPT, _where(chats.is_null())
    messages, parents = chats.flatten(), pc.list_parent_indices(chats)
    for key, missing in _missing(messages):
        yield f"a message without {key} in its prompt", pc.unique(parents.filter(missing))
    # A message of null is told of already.
    content = _field(messages, "content")
    told = pc.or_kleene(content.is_null(), pc.invert(_is_empty(content)))
    saying = pc.unique(parents.filter(told))
    if len(saying) < len(chats) - chats.null_count:
        yield EMPTY_PROMPT, _where(pc.and_(pc.invert(pc.is_in(_numbers(len(chats)), saying)), chats.is_valid()))


def _of_response_chats(chats: pa.Array, name: str, *, alone: bool) -> Iterator[tuple[str, pa.Array]]:
    """Chats that end with a response of the assistant; `alone`: without a column `prompt` that could precede it."""
    import pyarrow.compute as pc

    lengths = pc.list_value_length(chats)
    yield f"no response in `{name}`", _where(pc.or_kleene(chats.is_null(), _is_zero(lengths)))
    messages, parents, last = _messages(chats)
    ends, rows = messages.filter(last), parents.filter(last)
    role, content = _field(ends, "role"), _field(ends, "content")
    other = pc.or_kleene(role.is_null(), pc.invert(pc.match_like(_plain(role), "assistant")))
    yield f"a chat in `{name}` whose last message is not the assistant's", rows.filter(other)
    yield f"a response without text in `{name}`", rows.filter(pc.and_(content.is_null(), pc.invert(other)))
    yield f"{EMPTY_RESPONSE} in `{name}`", rows.filter(_is_empty(content))
    before, rows = messages.filter(pc.invert(last)), parents.filter(pc.invert(last))
    for key, missing in _missing(before):
        yield f"a message without {key} in `{name}`", pc.unique(rows.filter(missing))
    if alone and len(pc.unique(rows)) < len(ends):
        yield f"a chat in `{name}` with nothing before its response", _where(pc.equal(lengths, 1))


def _missing(messages: pa.Array) -> Iterator[tuple[str, pa.BooleanArray]]:
    """Which messages have no role, and which of the others no content."""
    import pyarrow.compute as pc

    role, content = (_field(messages, key).is_null() for key in ("role", "content"))
    yield "role", role
    yield "content", pc.and_(content, pc.invert(role))


def _of_answers(answers: pa.Array) -> Iterator[tuple[str, pa.Array]]:
    import pyarrow.compute as pc
    import pyarrow.types as kinds

    yield NO_ANSWER, _where(pc.is_null(answers, nan_is_null=kinds.is_floating(answers.type)))
    if _is_text(answers):
        yield BLANK_ANSWER, _where(_is_empty(pc.utf8_trim_whitespace(_plain(answers))))


def _where_differ(one: pa.Array, other: pa.Array) -> pa.Array:
    """Rows whose chats differ before their last messages, in roles or contents."""
    import pyarrow.compute as pc

    unequal = pc.not_equal(pc.list_value_length(one), pc.list_value_length(other))
    if one.null_count or other.null_count or pc.any(unequal).as_py():
        return _where(unequal)
    (messages, rows, last), (others, _, _) = _messages(one), _messages(other)
    pairs = [[_plain(_field(each, key)) for each in (messages, others)] for key in ("role", "content")]
    unlike = pc.or_kleene(*(pc.not_equal(*pair) for pair in pairs))
    return pc.unique(rows.filter(pc.and_kleene(unlike, pc.invert(last))))


def _messages(chats: pa.Array) -> tuple[pa.Array, pa.Array, pa.BooleanArray]:
    """All messages of some chats, the row of each, and whether it is the last of its chat."""
    import pyarrow as pa
    import pyarrow.compute as pc

    parents = pc.list_parent_indices(chats)
    # The last message of all is one, too.
    last = pa.concat_arrays([pc.not_equal(parents[1:], parents[:-1]), pc.equal(parents[-1:], parents[-1:])])
    return chats.flatten(), parents, last


def _where(mask: pa.BooleanArray) -> pa.Array:
    """Numbers of the rows that a mask marks; those of null are not marked."""
    import pyarrow.compute as pc

    return pc.indices_nonzero(mask)


def _numbers(count: int) -> pa.Array:
    """0 to `count`. Arrow imports pandas to make arrays and scalars of Python's, which is slow: for faults alone."""
    import pyarrow as pa

    return pa.array(range(count), "int64")


def _is_zero(numbers: pa.Array) -> pa.BooleanArray:
    import pyarrow.compute as pc

    return pc.invert(numbers.cast("bool"))


def _value(batch: pa.RecordBatch, column: str) -> pa.Array:
    """A column, or a field of a struct; null where a struct is missing."""
    import pyarrow.compute as pc

    name, *fields = column.split(".")
    return pc.struct_field(batch.column(name), fields) if fields else batch.column(name)


def _field(messages: pa.Array, key: str) -> pa.Array:
    import pyarrow.compute as pc

    return pc.struct_field(messages, [key])


def _is_empty(texts: pa.Array) -> pa.BooleanArray:
    """Which texts are empty; null for null."""
    import pyarrow.compute as pc

    return _is_zero(pc.binary_length(_plain(texts)))


def _plain(texts: pa.Array) -> pa.Array:
    """Texts without a dictionary."""
    import pyarrow.types as kinds

    return texts if kinds.is_string(texts.type) or kinds.is_large_string(texts.type) else texts.cast("large_string")


def _is_list(values: pa.Array) -> bool:
    import pyarrow.types as kinds

    return kinds.is_list(values.type) or kinds.is_large_list(values.type)


def _is_text(values: pa.Array) -> bool:
    import pyarrow.types as kinds

    kind = values.type.value_type if kinds.is_dictionary(values.type) else values.type
    return kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind)
