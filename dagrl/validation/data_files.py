"""Checks of prompt files: existence, schema and first rows;

`dagrl.data` reads all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dagrl.config.errors import Place, listed, removal, suggest
from dagrl.config.loading.positions import Findings
from dagrl.config.loading.prompt_files import PromptFile, count_rows, files_of, unreadable
from dagrl.config.reward_names import BUILT_IN_REWARDS
from dagrl.config.schema import AgentSpec, JudgeNode, Pipeline, RewardNode, RolloutNode, SourceSpec
from dagrl.graph.dag import PROMPTS_NODE, SAMPLES_NODE, Graph, GraphNode
from dagrl.model_files.chats import chat_of
from dagrl.model_files.nested_columns import column_type, is_list, repeated, value_at
from dagrl.plugins.custom import parameters_of
from dagrl.plugins.declarations import BATCHED_FIELDS_OF_VERL, FIELDS_OF_VERL
from dagrl.plugins.isolation import ask
from dagrl.plugins.judging import fields_in, is_function
from dagrl.validation.data_rows import CheckedColumns, Flaw, RowFaults, row_faults
from dagrl.validation.sampled_files import SampledFile, sampled

if TYPE_CHECKING:
    import pyarrow as pa


_ANSWER = "answer"
_ANSWERS = {_ANSWER, *(name for name, field in (FIELDS_OF_VERL | BATCHED_FIELDS_OF_VERL).items() if field == _ANSWER)}
_STRICT = ("code", "math")
"""Rewards that raise an error for an empty reference answer."""

_MOST_FILES = 64
"""Files of a source whose rows are checked."""


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
    """Report wrong prompt files; returns the number of rows of the right ones, by their key under ``data``.

    `graph` is None if it has problems; `folder` holds the user's modules.
    """
    rows = {}
    sources, names = pipeline.data.by_key, frozenset((*pipeline.data.sources, *pipeline.data.val_sets))
    readers = tuple(_answer_readers(graph, names, folder)) if graph is not None else ()
    found = {key: _files(spec, ("data", *key.split(".")), findings) for key, spec in sources.items()}
    checked = sum(min(len(files), _MOST_FILES) for files in found.values())
    share = min(1.0, 4 / max(checked, 1))
    for key, spec in sources.items():
        kind, _, name = key.partition(".")
        wanted = _Wanted(
            spec,
            pipeline.response_columns(validation=kind == "val"),
            pipeline.needs_answers(validation=kind == "val"),
            tuple(reader for reader in readers if reader.sources is None or (name or kind) in reader.sources),
            pipeline.data.image_key,
            pipeline.data.ordering.by if kind == "train" else None,
        )
        place: Place = ("data", *key.split("."))
        if spec.hub is not None:
            count = _check_hub(spec, place, wanted, findings)
            if pipeline.run.epochs is not None and kind == "train":
                fact = f"the rows of {spec.title} are counted when it is read"
                findings.error(("run", "epochs"), f"{fact}; set `steps` instead", "unknown-rows", depends_on=[place])
        else:
            count = _check_source(spec, found[key], place, wanted, share, findings)
        if count is not None:
            rows[key] = count
    return rows


def _check_source(
    spec: SourceSpec,
    files: Sequence[PromptFile],
    place: Place,
    wanted: _Wanted,
    share: float,
    findings: Findings,
) -> int | None:
    """Return the number of rows of a source's files; None if one of them is wrong, or without files."""
    # The first and the last file, and some between them.
    some = {round(part * (len(files) - 1) / _MOST_FILES) for part in range(_MOST_FILES + 1)}
    right = [_check_rows(files[number], place, wanted, share, findings) for number in sorted(some) if files]
    # Types of JSON are those of its rows.
    others = (file for number, file in enumerate(files) if number not in some and file.kind != "json")
    if not files or not all(right) or not all(_check_rows(file, place, wanted, 0, findings) for file in others):
        return None
    try:
        count = sum(map(count_rows, files))
    except OSError as error:
        findings.error(place, f"{error.filename} cannot be read ({error.strerror})", "wrong-data-file")
        return None
    except ValueError as error:
        findings.error(place, str(error), "wrong-data-file")
        return None
    if not count:
        findings.error(place, f"{spec.title} has no rows; create the file again", "wrong-columns")
    return count or None


def _files(spec: SourceSpec, place: Place, findings: Findings) -> list[PromptFile]:
    """The files of a source; empty for a data set of the Hub, or if one of them is wrong."""
    if spec.split is not None and spec.paths and not any(path.is_dir() for path in spec.paths):
        fact = f"`split` chooses among the files of a folder, and {spec.title} is none"
        findings.warning((*place, "split"), removal(fact), "unused-split")
    try:
        return files_of(spec)
    except OSError as error:
        fact = f"{error.filename or spec.title} cannot be read ({error.strerror})"
        findings.error(place, f"{fact}; check the path and its permissions", "wrong-data-file")
    except ValueError as error:
        findings.error(place, str(error), "wrong-data-file")
    return []


def _check_hub(spec: SourceSpec, place: Place, wanted: _Wanted, findings: Findings) -> int | None:
    """Return the number of rows of a data set of the Hub, if known; the rest is checked when it is read."""
    from dagrl.data.sources.source import builder_of

    try:
        builder, split = builder_of(spec)
    except ValueError as error:
        findings.error(place, str(error), "no-such-data-set")
        return None
    features = builder.info.features
    for problem in _schema_problems(features.arrow_schema, wanted) if features else ():
        findings.error(place, f"{spec.title} {problem}", "wrong-columns")
    known = (builder.info.splits or {}).get(split)
    return known.num_examples if known is not None else None


def holds_chats(spec: SourceSpec, responses: tuple[str, ...]) -> bool:
    """Whether prompts are lists of messages, in their column or before `responses`. False if unreadable."""
    import pyarrow as pa

    if spec.system_prompt is not None:
        return True
    try:
        files = files_of(spec)
        if not files:
            return False
        with sampled(files[0]) as file:
            names, key = file.schema.names, spec.prompt_key
            there = column_type(file.schema, key) is not None
            # With a column of texts as well, only the rows show which of the two is the prompt.
            kinds = [column_type(file.schema, name) for name in ((key,) if there else responses)]
            if any(map(_is_chat, kinds)):
                return True
            # The first value may be a chat in JSON.
            batch = next(file.batches([key]), None) if there and names.count(key.partition(".")[0]) == 1 else None
    except (OSError, ValueError, pa.ArrowException):
        return False
    return batch is not None and bool(batch.rows) and isinstance(chat_of(value_at(batch.rows[0], key)), list)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Columns that a file needs."""

    spec: SourceSpec
    responses: tuple[str, ...]
    """Columns, or fields of structs, with responses."""
    answers: bool
    """Whether it needs reference answers and the data set's name."""
    readers: tuple[AnswerReader, ...] = ()
    images: str | None = None
    """Column with the images of prompts."""
    order: str | None = None
    """Column that gives the order of prompts."""


def _check_rows(file: PromptFile, place: Place, wanted: _Wanted, share: float, findings: Findings) -> bool:
    import pyarrow as pa

    warnings: list[str] = []
    problems: list[str] = []
    code = "wrong-columns"
    try:
        with sampled(file) as opened:
            schema = opened.schema
            if len(schema) or file.kind == "parquet":
                problems = _schema_problems(schema, wanted)
            if not problems and share:
                code = "wrong-rows"
                problems, warnings = _row_problems(opened, file.path.parent, wanted, share)
    except pa.ArrowException as error:
        findings.error(place, unreadable(file, error), "wrong-data-file")
        return False
    except OSError as error:
        fact = f"{file.path} cannot be read ({error.strerror})" if error.strerror else unreadable(file, error)
        findings.error(place, f"{fact.partition(';')[0]}; check the file and its permissions", "wrong-data-file")
        return False
    except ValueError as error:
        findings.error(place, str(error), "wrong-data-file")
        return False
    for warning in warnings:
        findings.warning(place, f"{file.path} {warning}", "odd-rows")
    for problem in problems:
        findings.error(place, f"{file.path} {problem}", code=code)
    return not problems


def _row_problems(file: SampledFile, folder: Path, wanted: _Wanted, share: float) -> tuple[list[str], list[str]]:
    """Errors and warnings about the file's rows."""
    spec = wanted.spec
    chats = [name for name in wanted.responses if _is_chat(column_type(file.schema, name))]
    readers = wanted.readers if wanted.answers else ()
    # Chats that end with responses begin with their prompts.
    alone = column_type(file.schema, spec.prompt_key) is None
    columns = CheckedColumns(spec, not chats, wanted.responses, bool(readers), alone, wanted.images, folder)
    found = row_faults(file, columns, share)
    problems, warnings = [], []
    for what in dict.fromkeys([*found.faults, *found.behind]):
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
    strict = [
        reader.name for reader in readers if (reader.needs_all if what.kind == "no answer" else reader.refuses_blanks)
    ]
    names = listed(strict or [reader.name for reader in readers])
    if strict:
        problems.append(f"{found.sentence(what)}, which {names} cannot score; remove such rows")
    elif found.everywhere(what):
        none = f"has {what.text} in each of its first {found.scanned} rows"
        problems.append(f"{none}, and {names} reads it; create the file again with answers")
    elif what.kind == "no answer":
        warnings.append(f"{found.sentence(what)}; {names} gets an empty text there")


def _schema_problems(schema: pa.Schema, wanted: _Wanted) -> list[str]:
    import pyarrow.types as kinds

    spec, problems = wanted.spec, []
    used = [spec.prompt_key, "data_source", spec.answer_key, "extra_info", *wanted.responses]
    if problem := repeated(schema, [*used, *filter(None, (wanted.images, wanted.order))]):
        return [problem]
    if wanted.images and not is_list(column_type(schema, wanted.images)):
        problems.append(
            f"has no list of images in `{wanted.images}` (data.image_key); {suggest(wanted.images, schema.names)}"
        )
    # A chat that ends with a response begins with its prompt.
    given = bool(wanted.responses) and all(_is_chat(column_type(schema, name)) for name in wanted.responses)
    for key, name, needed in (
        ("prompt_key", spec.prompt_key, not given),
        ("answer_key", spec.answer_key, wanted.answers),
        ("data.order.by", wanted.order or "", wanted.order is not None),
    ):
        if needed and column_type(schema, name) is None:
            known = [*schema.names, *fields_beside(schema, name)]
            problems.append(f"has no column `{name}`; {suggest(name, known)}, or set {key}")
    kind = column_type(schema, spec.prompt_key)
    if kind is not None and not (_is_text(kind) or _is_chat(kind)):
        problems.append(f"has prompts of type {kind}; they must be text, or lists of messages with role and content")
    kind = column_type(schema, "data_source")
    if kind is not None and not (_is_text(kind) or kinds.is_null(kind)):
        problems.append(f"has a data_source of type {kind}; it must be text")
    return [*problems, *_response_problems(schema, wanted.responses)]


def _response_problems(schema: pa.Schema, responses: tuple[str, ...]) -> list[str]:
    problems = []
    for name in responses:
        kind = column_type(schema, name)
        if kind is None:
            known = [*schema.names, *fields_beside(schema, name)]
            problems.append(f"has no column `{name}` with responses (data.responses); {suggest(name, known)}")
        elif not _is_text(kind) and not _is_chat(kind):
            problems.append(
                f"has responses of type {kind} in `{name}`; they must be text, or chats whose last message they are"
            )
    return problems


def fields_beside(schema: pa.Schema, column: str) -> list[str]:
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
    return any(
        all(
            message.get_field_index(key) >= 0 and _is_text(message.field(message.get_field_index(key)).type)
            for key in keys
        )
        for keys in (("role", "content"), ("from", "value"))
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
    """Whether a node uses the answers."""
    match node.spec:
        case RolloutNode(agent=AgentSpec(environment=str())):
            # It may have answers of its own.
            return False
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
