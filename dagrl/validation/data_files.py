"""Prompt files: whether they exist, follow verl's schema, and have rows that a run can use.

Reads their footers and first rows; `dagrl.data` reads all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dagrl.config.errors import Place, listed, suggest
from dagrl.config.loading.positions import Findings
from dagrl.config.reward_names import BUILT_IN_REWARDS
from dagrl.config.schema import JudgeNode, Pipeline, RewardNode, RolloutNode
from dagrl.graph.dag import PROMPTS_NODE, SAMPLES_NODE, Graph, GraphNode
from dagrl.model_files.chats import chat_of
from dagrl.model_files.nested_columns import column_type, is_list
from dagrl.plugins.custom import parameters_of
from dagrl.plugins.declarations import BATCHED_FIELDS_OF_VERL, FIELDS_OF_VERL
from dagrl.plugins.isolation import ask
from dagrl.plugins.judging import fields_in, is_function
from dagrl.validation.data_rows import CheckedColumns, Flaw, RowFaults, row_faults

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


_SCRIPTS = (
    *("gsm8k_tools", "gsm8k", "deepscaler", "math_dataset", "dapo_math", "aime", "amc", "mbpp", "apps", "geo3k"),
    *("ultrafeedback", "arithmetic", "word_problems", "digits", "games"),
)
"""Scripts in data_preprocess/. A name stands before those that it begins with."""
_ANSWER = "answer"
_ANSWERS = {_ANSWER, *(name for name, field in (FIELDS_OF_VERL | BATCHED_FIELDS_OF_VERL).items() if field == _ANSWER)}
_STRICT = ("code", "math")
"""Rewards that raise an error for an empty reference answer."""


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """A node that reads reference answers; it gets an empty text for a null."""

    name: str
    needs_all: bool = False
    """Whether it cannot score a response without an answer."""
    refuses_blanks: bool = False
    """Whether an empty answer ends the run."""
    sources: frozenset[str] | None = None
    """The sources and validation sets whose answers it reads. Default: all."""


def check_data_files(pipeline: Pipeline, graph: Graph | None, folder: Path, findings: Findings) -> dict[str, int]:
    """Report wrong prompt files; the number of rows of the right ones, by their key under ``data``.

    `graph` is None if it has problems; `folder` holds the user's modules.
    """
    rows = {}
    names = frozenset((*pipeline.data.sources, *pipeline.data.val_sets))
    readers = tuple(_answer_readers(graph, names, folder)) if graph is not None else ()
    for key, path in pipeline.data.files.items():
        validation = not key.startswith("train")
        wanted = _Wanted(
            pipeline.response_columns(validation=validation),
            pipeline.needs_answers(validation=validation),
            tuple(each for each in readers if each.sources is None or (key.partition(".")[2] or key) in each.sources),
            pipeline.data.image_key,
        )
        count = _check_file(path, ("data", *key.split(".")), wanted, findings)
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
    kinds = [column_type(schema, name) for name in (("prompt",) if "prompt" in schema.names else responses)]
    return any(map(_is_chat, kinds)) or (schema.names.count("prompt") == 1 and _begins_with_chat(path, "prompt"))


def _begins_with_chat(path: Path, column: str) -> bool:
    """Whether the first value of a column is a chat, which may be text in JSON. False if it is unreadable."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            batch = next(file.iter_batches(batch_size=1, columns=[column]), None)
    except (OSError, pa.ArrowException):
        return False
    return batch is not None and isinstance(chat_of(batch[column][0].as_py()), list)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Columns that a file needs beside prompts."""

    responses: tuple[str, ...]
    """Columns, or fields of structs, with responses."""
    answers: bool
    """Whether it needs reference answers and the data set's name."""
    readers: tuple[AnswerReader, ...] = ()
    images: str | None = None
    """Column with the images of prompts."""


def _check_file(path: Path, place: Place, wanted: _Wanted, findings: Findings) -> int | None:
    """The number of rows of a right file."""
    try:
        if problem := _file_problem(path):
            findings.error(place, f"{path} {problem}", "wrong-data-file")
            return None
        return _check_parquet(path, place, wanted, findings)
    except OSError as error:
        message = f"{path} cannot be read ({error.strerror}); check the path and its permissions"
        findings.error(place, message, "wrong-data-file")
        return None


def _file_problem(path: Path) -> str | None:
    """Why a path cannot be a parquet file."""
    script = f"dagrl data {_script_for(path)} --local_dir"
    if path.is_dir():
        files = sorted(path.glob("*.parquet"))
        return f"is a folder; {f'name a file in it, for example {files[0].name}' if files else 'give a parquet file'}"
    if not path.exists():
        return f"does not exist; check the path, or create the file with `{script} {path.parent}`"
    if not path.is_file():
        return "is no regular file; give a parquet file"
    with path.open("rb") as file:
        head = file.read(256)
    if not head:
        return "is empty (0 bytes); create it again"
    if head.startswith(b"version https://git-lfs"):
        return "is a pointer of Git LFS; fetch the file with `git lfs pull`"
    other = "JSON" if head.lstrip()[:1] in (b"{", b"[") else "CSV" if path.suffix == ".csv" else None
    other = "compressed with gzip" if head.startswith(b"\x1f\x8b") else other
    if other is None or head.startswith(b"PAR1"):
        return None
    return f"is {other}, not parquet; convert it with `{script} DIR --source {path.parent}`"


def _script_for(path: Path) -> str:
    """The name of the script that creates such a file, by the name of its folder or of the file."""
    named = (name for text in (path.parent.name, path.name) for name in _SCRIPTS if name in text.lower())
    return next(named, "NAME")


def _check_parquet(path: Path, place: Place, wanted: _Wanted, findings: Findings) -> int | None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    warnings: list[str] = []
    try:
        with pq.ParquetFile(path) as file:
            schema, rows, code = file.schema_arrow, file.metadata.num_rows, "wrong-columns"
            problems = [*_schema_problems(schema, wanted), *_response_problems(schema, wanted.responses)]
            if rows == 0:
                problems.append("has no rows; create the file again")
            if not problems:
                code = "wrong-rows"
                problems, warnings = _row_problems(file, path.parent, wanted)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).split(". ")[0].split("\n")[0].rstrip(".")
        problems, code = [f"cannot be read as parquet ({reason}); create the file again"], "wrong-data-file"
    for warning in warnings:
        findings.warning(place, f"{path} {warning}", "odd-rows")
    for problem in problems:
        findings.error(place, f"{path} {problem}", code=code)
    return None if problems else rows


def _row_problems(file: pq.ParquetFile, folder: Path, wanted: _Wanted) -> tuple[list[str], list[str]]:
    """Errors and warnings about the file's rows."""
    chats = [name for name in wanted.responses if _is_chat(column_type(file.schema_arrow, name))]
    readers = wanted.readers if wanted.answers else ()
    # Chats that end with responses begin with their prompts.
    alone = "prompt" not in file.schema_arrow.names
    columns = CheckedColumns(not chats, wanted.responses, bool(readers), alone, wanted.images, folder)
    found = row_faults(file, columns)
    problems, warnings = [], []
    for what in found.faults:
        if what.kind == "empty response":
            if found.everywhere(what):
                message = f"has {what.text} in each of its first {found.scanned} rows"
                problems.append(f"{message}; create the file again, or name another column in data.responses")
            else:
                warnings.append(f"{found.sentence(what)}; the policy learns to end at once there")
        elif what.kind == "fatal":
            problems.append(f"{found.sentence(what)}; a run would end there, so remove such rows")
        else:
            _add_answer_problem(what, found, readers, problems, warnings)
    return problems, warnings


def _add_answer_problem(
    what: Flaw, found: RowFaults, readers: tuple[AnswerReader, ...], problems: list[str], warnings: list[str]
) -> None:
    """The effect of null or empty answers on the nodes that read them."""
    strict = [each.name for each in readers if (each.needs_all if what.kind == "no answer" else each.refuses_blanks)]
    names = listed(strict or [each.name for each in readers])
    if strict:
        problems.append(f"{found.sentence(what)}, which {names} cannot score; remove such rows")
    elif found.everywhere(what):
        none = f"has {what.text} in each of its first {found.scanned} rows"
        problems.append(f"{none}, and {names} reads it; create the file again with answers")
    elif what.kind == "no answer":
        warnings.append(f"{found.sentence(what)}; {names} gets an empty text there")


def _schema_problems(schema: pa.Schema, wanted: _Wanted) -> list[str]:
    import pyarrow.types as kinds

    problems = []
    if wanted.images and not is_list(column_type(schema, wanted.images)):
        problems.append(
            f"has no list of images in `{wanted.images}` (data.image_key); {suggest(wanted.images, schema.names)}"
        )
    for name in ("prompt", "data_source", "reward_model"):
        if (times := schema.names.count(name)) > 1:
            problems.append(f"has {times} columns `{name}`; keep one of them")
    if problems:
        return problems
    # A chat that ends with a response begins with its prompt.
    given = bool(wanted.responses) and all(_is_chat(column_type(schema, name)) for name in wanted.responses)
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
        kind = column_type(schema, name)
        if kind is None:
            known = [*schema.names, *_fields_beside(schema, name)]
            problems.append(f"has no column `{name}` with responses (data.responses); {suggest(name, known)}")
        elif not _is_text(kind) and not _is_chat(kind):
            problems.append(
                f"has responses of type {kind} in `{name}`; they must be text, or chats whose last message they are"
            )
    return problems


def _fields_beside(schema: pa.Schema, column: str) -> list[str]:
    """Fields of the struct in which a column's field is looked for."""
    import pyarrow.types as kinds

    struct = column.rpartition(".")[0]
    kind = column_type(schema, struct) if struct else None
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

    if kind is None or not is_list(kind):
        return False
    message = kind.value_type
    if kinds.is_map(message):
        return _is_text(message.key_type) and _is_text(message.item_type)
    if not kinds.is_struct(message):
        return False
    return all(
        message.get_field_index(key) >= 0 and _is_text(message.field(message.get_field_index(key)).type)
        for key in ("role", "content")
    )


def _answer_readers(graph: Graph, sources: frozenset[str], folder: Path) -> Iterator[AnswerReader]:
    """The nodes that read the data set's answers; `sources` are the names of all sources and validation sets."""
    for name, node in graph.nodes.items():
        wire = node.inputs.get(_ANSWER)
        if name == SAMPLES_NODE or wire is None or wire != (PROMPTS_NODE, _ANSWER):
            continue
        if isinstance(node.spec, RewardNode):
            yield from _of_reward(name, node.spec, sources, folder)
        elif _uses_answer(node, folder):
            yield AnswerReader(name)


def _of_reward(name: str, node: RewardNode, sources: frozenset[str], folder: Path) -> Iterator[AnswerReader]:
    """A reader for each of the functions of a reward that use answers."""
    for source, function in node.functions.items():
        fn, own = function.fn, sources - node.by_source.keys() if source is None else frozenset((source,))
        if not _has_parameter(BUILT_IN_REWARDS.get(fn, fn), "", folder):
            continue
        if fn in BUILT_IN_REWARDS:
            stops = fn in _STRICT and node.on_error == "stop"
            yield AnswerReader(name, stops or fn not in _STRICT, refuses_blanks=stops, sources=own)
        else:
            yield AnswerReader(name, sources=own)


def _uses_answer(node: GraphNode, folder: Path) -> bool:
    """Whether a node uses the answers that all nodes of its kind get."""
    match node.spec:
        case RolloutNode(environment=str(environment)):
            return _has_parameter(environment, "reset", folder)
        case JudgeNode(prompt=prompt, parser=parser):
            return _ANSWER in fields_in(prompt) or (is_function(parser) and _has_parameter(parser, "", folder))
    return True


def _has_parameter(place: str, method: str, folder: Path) -> bool:
    try:
        return not _ANSWERS.isdisjoint(ask(place, parameters_of, place, method, folder=folder))
    except ValueError:
        return False  # Other checks report it.
