"""The description of a data set: its originals, the schema of its rows, and their conversion to prompts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from dagrl.data.prompt_file import PromptRow

_NAMES = {str: "text", int: "a whole number", float: "a number", list: "a list", dict: "an object", type(None): "null"}


@dataclass(frozen=True, slots=True)
class Original:
    """The originals of one split."""

    hub: str
    files: Sequence[str]
    """Patterns below a folder of originals; the first pattern with matches selects the files."""
    config: str | None = None
    """Configuration on the hub, if it has several."""
    hub_split: str | None = None
    """Split on the hub; None: the split of the same name."""
    modelscope: str | None = None
    """Name on ModelScope; None: the same as on the hub."""
    by_file: bool = False
    """The hub holds files that `datasets` cannot read directly: fetch `files` and read them."""


@dataclass(frozen=True, slots=True)
class Record:
    """A row of the originals."""

    values: Mapping[str, Any]
    place: str
    """File and line, for messages."""
    part: str
    """The file's name without its ending, or the name on the hub."""
    split: str
    """``train`` or ``test``."""
    index: int
    """Position among all rows of the split, including dropped ones."""

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def info(self, question: str, answer: str, **further: Any) -> dict[str, Any]:
        """``extra_info`` of a question, with the authors' whole `answer`; `further` keys are added, or replace."""
        return {"split": self.split, "index": self.index, "question": question, "answer": answer, **further}


QUESTION_INFO: Mapping[str, pa.DataType] = {
    "split": pa.string(),
    "index": pa.int64(),
    "question": pa.string(),
    "answer": pa.string(),
}
"""Types of `Record.info` for a question and its answer."""


@dataclass(frozen=True, slots=True)
class Drop:
    """A row that cannot be used, with a short reason, by which rows are counted."""

    reason: str


@dataclass(frozen=True, slots=True)
class Field:
    """The schema of a field of the originals: one of `kinds`; it may be absent if `needed` is False."""

    kinds: tuple[type, ...]
    needed: bool = True

    def problem(self, key: str, values: Mapping[str, Any]) -> str | None:
        if key not in values:
            return f"no field {key!r}" if self.needed else None
        value = values[key]
        # In JSON true is not a number, but in Python bool is an int.
        if isinstance(value, self.kinds) and not isinstance(value, bool):
            return None
        wanted = " or ".join(_NAMES[kind] for kind in self.kinds)
        return f"{key!r} is {_NAMES.get(type(value), type(value).__name__)}, not {wanted}"


MakeRow = Callable[[Record, str], PromptRow | Drop | None]


@dataclass(frozen=True, slots=True)
class DataSet:
    """A data set."""

    name: str
    title: str
    originals: Mapping[str, Original]
    """By split: ``train``, ``test`` or both."""
    fields: Mapping[str, Field]
    """The schema of every row; other fields are ignored."""
    make_row: MakeRow
    """Converts a record and the instruction to a prompt, a `Drop`, or None if the row belongs to another split."""
    extra_info: Mapping[str, pa.DataType]
    """Types of the keys of ``extra_info``."""
    instruction: str = ""
    """Text after each question, unless --instruction replaces it."""
    columns: Mapping[str, pa.DataType] = field(default_factory=dict)
    unique: bool = False
    """Drop questions that are repeated in the same split."""
    rows_per_group: int = 8192
    """Rows held in memory at a time."""

    def check(self, record: Record) -> None:
        """ValueError with the place at which a row violates the schema."""
        for key, kind in self.fields.items():
            problem = kind.problem(key, record.values)
            if problem is not None:
                fields = ", ".join(self.fields)
                raise ValueError(f"{record.place}: {problem}; a row of {self.name} has the fields {fields}")


BOXED_INSTRUCTION = r"Think step by step, and put the final answer within \boxed{}."

_END_OF_FORMULA = r"\s*[.,;]?\s*(?:\$|\\[\])\\]|\\(?:end|boxed|fbox)\b|$)"
_BOX = re.compile(rf"\\(?:boxed|fbox)\s*(\{{|[^\s{{$].*?(?={_END_OF_FORMULA}))", re.MULTILINE)


def asked(question: str, instruction: str) -> str:
    return f"{question} {instruction}".strip()


def last_boxed(solution: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` (or ``\fbox{...}``) of a solution.

    Without braces, as in ``$\boxed 12$``, it is the rest of the formula, as in MATH's own evaluation. None without a
    box, or if its braces do not close.
    """
    boxes = list(_BOX.finditer(solution))
    if not boxes:
        return None
    last = boxes[-1]
    return _to_closing_brace(solution, last.end()) if last[1] == "{" else last[1]


def _to_closing_brace(text: str, start: int) -> str | None:
    depth, position = 1, start
    while position < len(text):
        character = text[position]
        # An escaped brace is a character, not a delimiter.
        if character == "\\":
            position += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start:position].strip()
        position += 1
    return None


def answer_text(answer: Any) -> str:
    """An answer as text: whole numbers without a point (``142.0`` becomes ``142``), None and NaN as ``""``."""
    if answer is None or (isinstance(answer, float) and math.isnan(answer)):
        return ""
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    return str(answer).strip()


def contest(name: str, title: str, data_source: str, original: Original) -> DataSet:
    """A contest with rows of ``problem`` and ``answer``; `data_source` is the name of its scores."""

    def make_row(record: Record, instruction: str) -> PromptRow | Drop:
        question, answer = record["problem"].strip(), answer_text(record["answer"])
        if not question:
            return Drop("no question")
        if not answer:
            return Drop("no answer")
        extra_info = record.info(question, answer_text(record.get("solution")), url=record.get("url"))
        return PromptRow(data_source, asked(question, instruction), answer, extra_info)

    return DataSet(
        name=name,
        title=title,
        originals={"test": original},
        fields={
            "problem": Field((str,)),
            "answer": Field((str, int, float, type(None))),
            "solution": Field((str, type(None)), needed=False),
            "url": Field((str, type(None)), needed=False),
        },
        make_row=make_row,
        extra_info={**QUESTION_INFO, "url": pa.string()},
        instruction=BOXED_INSTRUCTION,
        unique=True,
    )
