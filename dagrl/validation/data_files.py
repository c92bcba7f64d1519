"""The prompt files: there, whole, in verl's schema, and without rows that a run cannot use.

Reads their footers and, in `data_rows.py`, their first rows; `dagrl.data` reads all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dagrl.config.errors import Place, listed, suggest
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import Pipeline
from dagrl.graph.dag import Graph
from dagrl.graph.offline import columns_read, needs_answers
from dagrl.validation.answer_readers import AnswerReader, answer_readers
from dagrl.validation.data_rows import BLANK_ANSWER, EMPTY_RESPONSE, NO_ANSWER, Columns, RowFaults, row_faults

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


_SCRIPTS = (
    "gsm8k_tools",
    "gsm8k",
    "deepscaler",
    "math_dataset",
    "dapo_math",
    "aime",
    "amc",
    "mbpp",
    "apps",
    "geo3k",
    "ultrafeedback",
    "arithmetic",
)
"""What data_preprocess/ has; a name that begins with another stands before it."""


_POINTER = "a pointer of Git LFS"


def check_data_files(pipeline: Pipeline, graph: Graph | None, folder: Path, findings: Findings) -> dict[str, int]:
    """Report what is wrong with the prompt files; the rows of those that are right, by their key under ``data``.

    `graph` is None where the columns are not sorted out yet; `folder` holds the user's own modules.
    """
    rows = {}
    readers = tuple(answer_readers(graph, folder)) if graph is not None else ()
    for key, path in pipeline.data.files.items():
        place: Place = ("data", *key.split("."))
        if not findings.trusted(place):
            continue
        validation = key != "train"
        wanted = _Wanted(
            columns_read(pipeline, validation=validation),
            needs_answers(pipeline, validation=validation),
            readers,
            pipeline.data.val_prompts if validation else None,
        )
        count = _check_file(path, place, wanted, findings)
        if count is not None:
            rows[key] = count
    return rows


def holds_chats(path: Path, responses: tuple[str, ...]) -> bool:
    """Whether prompts are lists of messages: their column, or else what precedes `responses`. False if unreadable."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(path) if path.is_file() else pa.schema([])
    except (OSError, pa.ArrowException):
        return False
    # Where there is a column of texts too, only the rows say which of the two is the prompt.
    return any(_is_chat(_type_at(schema, name)) for name in (("prompt",) if "prompt" in schema.names else responses))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a file must have beside prompts."""

    responses: tuple[str, ...]
    """Columns, or fields of structs, that hold some."""
    answers: bool
    """Reference answers, and the data set's name."""
    readers: tuple[AnswerReader, ...] = ()
    """The nodes that read the answers."""
    limit: int | None = None
    """Only the first so many rows are used."""


def _check_file(path: Path, place: Place, wanted: _Wanted, findings: Findings) -> int | None:
    """Rows of the file, if it is a prompt file."""
    try:
        return _check_kind(path, place, wanted, findings)
    except OSError as error:
        findings.error(place, f"{path} cannot be read ({error.strerror}); check the path and its permissions")
        return None


def _check_kind(path: Path, place: Place, wanted: _Wanted, findings: Findings) -> int | None:
    if path.is_dir():
        files = sorted(path.glob("*.parquet"))
        remedy = f"name a file in it, such as {files[0].name}" if files else "give a parquet file"
        findings.error(place, f"{path} is a folder; {remedy}")
    elif path.exists() and not path.is_file():
        findings.error(place, f"{path} is no regular file; give a parquet file")
    elif not path.exists():
        command = f"{_script_for(path)} --local_dir {path.parent}"
        findings.error(place, f"{path} does not exist; check the path, or make the file with `python {command}`")
    elif path.stat().st_size == 0:
        findings.error(place, f"{path} is empty (0 bytes); make the file again")
    elif (other := _other_format(path)) is not None:
        command = f"make parquet of it with `python {_script_for(path)} --local_dir DIR --source {path.parent}`"
        remedy = "fetch it with `git lfs pull`" if other == _POINTER else command
        findings.error(place, f"{path} is {other}, not parquet; {remedy}")
    else:
        return _check_parquet(path, place, wanted, findings)
    return None


def _script_for(path: Path) -> str:
    """The script that makes such a file, by the name of its folder, or else of the file."""
    named = (name for text in (path.parent.name, path.name) for name in _SCRIPTS if name in text.lower())
    return f"data_preprocess/{next(named, 'NAME')}.py"


def _other_format(path: Path) -> str | None:
    """What the file is, if it is readable text instead of parquet."""
    with path.open("rb") as file:
        head = file.read(256)
    if head.startswith(b"PAR1"):
        return None
    if head.startswith(b"version https://git-lfs"):
        return _POINTER
    if head.startswith(b"\x1f\x8b"):
        return "compressed with gzip"
    if head.lstrip()[:1] in (b"{", b"["):
        return "JSON"
    return "CSV" if path.suffix == ".csv" else None


def _check_parquet(path: Path, place: Place, wanted: _Wanted, findings: Findings) -> int | None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
            problems = [*_schema_problems(schema, wanted), *_response_problems(schema, wanted.responses)]
            if rows == 0:
                problems.append("has no rows; make the file again")
            warnings: list[str] = []
            if not problems:
                problems, warnings = _row_problems(file, wanted)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).split(". ")[0].split("\n")[0].rstrip(".")
        findings.error(place, f"{path} cannot be read as parquet ({reason}); make the file again")
        return None
    for warning in warnings:
        findings.warning(place, f"{path} {warning}")
    for problem in problems:
        findings.error(place, f"{path} {problem}")
    return None if problems else rows


def _row_problems(file: pq.ParquetFile, wanted: _Wanted) -> tuple[list[str], list[str]]:
    """Errors and warnings about the file's rows."""
    chats = [name for name in wanted.responses if _is_chat(_type_at(file.schema_arrow, name))]
    readers = wanted.readers if wanted.answers else ()
    # Chats that end with responses begin with their prompts.
    alone = "prompt" not in file.schema_arrow.names
    columns = Columns(prompt=not chats, responses=wanted.responses, answers=bool(readers), alone=alone)
    found = row_faults(file, columns, wanted.limit)
    problems, warnings = [], []
    for what in found.faults:
        if what.startswith(EMPTY_RESPONSE):
            if found.everywhere(what):
                message = f"has {what} in each of its first {found.scanned} rows"
                problems.append(f"{message}; make the file again, or name another column in data.responses")
            else:
                warnings.append(f"{found.sentence(what)}; the policy learns to say nothing there")
        elif what not in (NO_ANSWER, BLANK_ANSWER):
            problems.append(f"{found.sentence(what)}; a run would end there, so take such rows out")
        else:
            _add_answer_problem(what, found, readers, problems, warnings)
    return problems, warnings


def _add_answer_problem(
    what: str, found: RowFaults, readers: tuple[AnswerReader, ...], problems: list[str], warnings: list[str]
) -> None:
    """The effect of null or empty answers on the nodes that read them."""
    strict = [each.name for each in readers if (each.needs_all if what == NO_ANSWER else each.refuses_blanks)]
    names = listed(strict or [each.name for each in readers])
    if strict:
        problems.append(f"{found.sentence(what)}, which {names} cannot judge by; take such rows out")
    elif found.everywhere(what):
        none = f"has {what} in each of its first {found.scanned} rows"
        problems.append(f"{none}, and {names} reads it; make the file again with answers")
    elif what == NO_ANSWER:
        warnings.append(f"{found.sentence(what)}; {names} is given an empty text there")


def _schema_problems(schema: pa.Schema, wanted: _Wanted) -> list[str]:
    import pyarrow.types as kinds

    problems = []
    for name in ("prompt", "data_source", "reward_model"):
        if (times := schema.names.count(name)) > 1:
            problems.append(f"has {times} columns `{name}`; keep one of them")
    if problems:
        return problems
    # A chat that ends with a response begins with its prompt.
    given = bool(wanted.responses) and all(_is_chat(_type_at(schema, name)) for name in wanted.responses)
    needed = {"prompt": not given, "data_source": wanted.answers, "reward_model": wanted.answers}
    for name in (name for name, must in needed.items() if must):
        if name not in schema.names:
            problems.append(f"has no column `{name}`; {suggest(name, schema.names)}")
    if "prompt" in schema.names and not (
        _is_text(schema.field("prompt").type) or _is_chat(schema.field("prompt").type)
    ):
        kind = schema.field("prompt").type
        problems.append(f"has prompts of type {kind}; they must be text, or lists of messages with role and content")
    if "data_source" in schema.names and not _is_text(schema.field("data_source").type):
        problems.append(f"has a data_source of type {schema.field('data_source').type}; it must be text")
    if "reward_model" in schema.names and wanted.answers:
        kind = schema.field("reward_model").type
        if not kinds.is_struct(kind):
            problems.append(f"has a reward_model of type {kind}; it must be a struct with the field ground_truth")
        elif kind.get_field_index("ground_truth") < 0:
            fields = [kind.field(index).name for index in range(kind.num_fields)]
            problems.append(f"has no field `ground_truth` in reward_model; {suggest('ground_truth', fields)}")
    return problems


def _response_problems(schema: pa.Schema, responses: tuple[str, ...]) -> list[str]:
    problems = []
    for name in responses:
        kind = _type_at(schema, name)
        if kind is None:
            known = [*schema.names, *_fields_beside(schema, name)]
            problems.append(f"has no column `{name}` with responses (data.responses); {suggest(name, known)}")
        elif not _is_text(kind) and not _is_chat(kind):
            problems.append(
                f"has responses of type {kind} in `{name}`; they must be text, or chats whose last message they are"
            )
    return problems


def _type_at(schema: pa.Schema, column: str) -> pa.DataType | None:
    """What a column, or a field of a struct, holds; None where it is not there."""
    import pyarrow.types as kinds

    name, *fields = column.split(".")
    found = schema.field(name).type if name in schema.names else None
    for field in fields:
        if found is None or not kinds.is_struct(found) or found.get_field_index(field) < 0:
            return None
        found = found.field(field).type
    return found


def _fields_beside(schema: pa.Schema, column: str) -> list[str]:
    """The fields of the struct that a column's field is looked for in."""
    import pyarrow.types as kinds

    struct = column.rpartition(".")[0]
    kind = _type_at(schema, struct) if struct else None
    if kind is None or not kinds.is_struct(kind):
        return []
    return [f"{struct}.{kind.field(index).name}" for index in range(kind.num_fields)]


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow.types as kinds

    if kinds.is_dictionary(kind):
        return _is_text(kind.value_type)
    return kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind)


def _is_chat(kind: pa.DataType | None) -> bool:
    import pyarrow.types as kinds

    if kind is None or not (kinds.is_list(kind) or kinds.is_large_list(kind)) or not kinds.is_struct(kind.value_type):
        return False
    message = kind.value_type
    return all(
        message.get_field_index(key) >= 0 and _is_text(message.field(message.get_field_index(key)).type)
        for key in ("role", "content")
    )
