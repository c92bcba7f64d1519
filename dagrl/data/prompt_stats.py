"""Statistics of files of prompts: lengths, sources, duplicates, and overlap of training and validation.

Rows are read in order and not kept: memory grows by about thirty bytes for each row, and by eight for each word of the
validation prompts.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dagrl.config.errors import listed
from dagrl.data.sources import Source
from dagrl.data.sources.fields import answer_of, prompt_of
from dagrl.model_files.nested_columns import column_type, repeated, value_at

GRAM = 13
"""Consecutive words that two prompts share if one was probably derived from the other (GPT-3's rule)."""
_CHUNK = 4096
_PROMPT_KEYS = ("prompt", "question", "problem", "messages", "conversations", "instruction", "input", "text")
_ANSWER_KEYS = ("reward_model.ground_truth", "answer", "ground_truth", "solution", "target", "output")
_SHOWN = 3
"""Number of places that are reported for each kind of finding."""
_COMMON_GRAMS = 10
"""A gram in at least this many validation prompts, and in one of 100, is part of an instruction, not of a problem."""

Length = Callable[[Sequence[str]], Sequence[int]]
Scores = Callable[[str], str]
"""The reward that can score a reference answer; empty if there is none."""


@dataclass(slots=True)
class FileStats:
    """Counts of the rows of a source."""

    source: Source
    prompt_key: str
    answer_key: str | None
    prompt_lengths: np.ndarray = field(init=False)
    """Int64 [rows]."""
    answer_lengths: np.ndarray = field(init=False)
    """Characters, int64 [rows]."""
    prompts: np.ndarray = field(init=False)
    """A hash of each prompt after normalisation, uint64 [rows]."""
    answers: np.ndarray = field(init=False)
    """A hash of each answer, uint64 [rows]."""
    sources: Counter[str] = field(default_factory=Counter)
    empty: list[int] = field(default_factory=list)
    rewards: Counter[str] = field(default_factory=Counter)
    """Reward -> answers that it can score."""
    unscored: list[int] = field(default_factory=list)
    """Rows with an answer that no reward can score."""

    def __post_init__(self) -> None:
        self.prompt_lengths, self.answer_lengths = (np.zeros(len(self.source), np.int64) for _ in range(2))
        self.prompts, self.answers = (np.zeros(len(self.source), np.uint64) for _ in range(2))

    def repeated(self) -> np.ndarray:
        """Rows with the prompt of an earlier row."""
        _, first = np.unique(self.prompts, return_index=True)
        return np.setdiff1d(np.arange(len(self.prompts)), first)

    def contradicting(self) -> np.ndarray:
        """Rows with another answer than the first row with their prompt."""
        _, first, inverse = np.unique(self.prompts, return_index=True, return_inverse=True)
        return np.flatnonzero(self.answers != self.answers[first[inverse]])

    def places(self, rows: Sequence[int] | np.ndarray) -> list[str]:
        return [self.source.place(int(row)) for row in rows[:_SHOWN]]


@dataclass(frozen=True, slots=True)
class Overlap:
    """Validation prompts that occur in the training prompts."""

    validation: FileStats
    same: np.ndarray
    """Rows whose normalised prompt occurs in training."""
    similar: np.ndarray
    """Other rows that share `GRAM` consecutive words with a training prompt."""
    mostly: np.ndarray
    """The number of these rows that share at least half of their words this way."""


def file_stats(
    source: Source,
    length: Length,
    scores: Scores | None = None,
    *,
    prompt_key: str | None = None,
    answer_key: str | None = None,
) -> FileStats:
    """Read a source once. Raises ValueError if it lacks the columns, or for a damaged row.

    Without keys, the first usual names among its columns are used; a file need not have answers.
    """
    keys = [*((prompt_key,) if prompt_key else _PROMPT_KEYS), *((answer_key,) if answer_key else _ANSWER_KEYS)]
    for part in source.parts:
        if problem := repeated(part.schema, [*keys, "data_source"]):
            raise ValueError(f"{part.title} {problem}")
    prompts = prompt_key or _known(source, _PROMPT_KEYS)
    answers = answer_key or _known(source, _ANSWER_KEYS)
    for key in filter(None, (prompts if prompt_key or prompts else "prompt", answer_key)):
        if column_type(source.schema, key) is None:
            raise ValueError(f"{source.title} has no column `{key}`, only {listed(source.schema.names)}; name another")
    assert prompts is not None
    stats = FileStats(source, prompts, answers)
    for rows, texts, answer_texts in _texts(source, prompts, answers, stats.sources):
        stats.prompt_lengths[rows.start : rows.stop] = length(texts)
        stats.answer_lengths[rows.start : rows.stop] = [len(text) for text in answer_texts]
        for row, text, answer in zip(rows, texts, answer_texts, strict=True):
            stats.prompts[row], stats.answers[row] = _hash(normalised(text)), _hash(answer.strip())
            if not text.strip():
                stats.empty.append(row)
            if answers is not None and scores is not None:
                reward = scores(answer)
                stats.rewards[reward] += 1
                if not reward:
                    stats.unscored.append(row)
    return stats


def overlap(training: Sequence[FileStats], validation: FileStats) -> Overlap:
    """The prompts that a validation file shares with the training files, each of which is read once more."""
    known = np.unique(np.concatenate([file.prompts for file in training]))
    filled = np.setdiff1d(np.arange(len(validation.prompts)), validation.empty)
    same = filled[np.isin(validation.prompts[filled], known)]
    grams, rows = _grams_of(validation)
    distinct, inverse = np.unique(grams, return_inverse=True)
    shared = np.zeros(len(distinct), dtype=bool)
    for file in training:
        for _, texts, _ in _texts(file.source, file.prompt_key, None):
            own = np.concatenate([np.zeros(0, np.uint64), *(_grams(text) for text in texts)])
            places = np.minimum(np.searchsorted(distinct, own), max(len(distinct) - 1, 0))
            if len(distinct):
                shared[places[distinct[places] == own]] = True
    # A gram in many prompts is part of an instruction.
    usual = np.bincount(inverse, minlength=len(distinct))
    shared &= usual < max(_COMMON_GRAMS, len(validation.prompts) / 100)
    count = len(validation.prompts)
    hits, all_grams = np.bincount(rows, shared[inverse], count), np.bincount(rows, minlength=count)
    similar = np.setdiff1d(np.flatnonzero(hits), same)
    return Overlap(validation, same, similar, similar[hits[similar] >= all_grams[similar] / 2])


def normalised(text: str) -> str:
    """A text with normalised case, white space and compatible characters (NFKC)."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _known(source: Source, keys: Sequence[str]) -> str | None:
    return next((key for key in keys if column_type(source.schema, key) is not None), None)


def _texts(
    source: Source, prompt_key: str, answer_key: str | None, counted: Counter[str] | None = None
) -> Iterator[tuple[range, list[str], list[str]]]:
    """Rows with their prompts, without system messages, and answers; `counted` are the values of ``data_source``."""
    columns = [key for key in (prompt_key, answer_key, "data_source") if key is not None]
    spec = source.spec.model_copy(update={"prompt_key": prompt_key, "system_prompt": None})
    for begin in range(0, len(source), _CHUNK):
        rows = range(begin, min(begin + _CHUNK, len(source)))
        values = source.values(rows, columns)
        table = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
        if counted is not None:
            counted.update(str(row["data_source"]) for row in table if row.get("data_source") is not None)
        prompts, answers = [], []
        for number, row in zip(rows, table, strict=True):
            try:
                prompts.append(_text_of(prompt_of(value_at(row, prompt_key), spec, has_template=True)))
                answers.append(answer_of(value_at(row, answer_key)) if answer_key is not None else "")
            except (AttributeError, TypeError, ValueError) as error:
                raise ValueError(f"{source.place(number)}: the row cannot be read ({error})") from error
        yield rows, prompts, answers


def _text_of(prompt: object) -> str:
    if not isinstance(prompt, list):
        return prompt if isinstance(prompt, str) else ""
    contents = [
        message.get("content") for message in prompt if message and message.get("role") not in ("system", "developer")
    ]
    return "\n".join(content if isinstance(content, str) else _of_parts(content) for content in contents if content)


def _of_parts(content: object) -> str:
    parts = content if isinstance(content, list) else []
    return " ".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest())


def _grams_of(stats: FileStats) -> tuple[np.ndarray, np.ndarray]:
    grams, rows = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for numbers, texts, _ in _texts(stats.source, stats.prompt_key, None):
        for row, text in zip(numbers, texts, strict=True):
            grams.append(_grams(text))
            rows.append(np.full(len(grams[-1]), row))
    return np.concatenate(grams), np.concatenate(rows)


_FACTORS = np.random.default_rng(13).integers(0, 2**64, GRAM, np.uint64) | np.uint64(1)


def _grams(text: str) -> np.ndarray:
    """A hash of each `GRAM` consecutive words, uint64; empty for a shorter text."""
    words = re.findall(r"\w+", normalised(text))
    if len(words) < GRAM:
        return np.zeros(0, np.uint64)
    codes = np.array([zlib.crc32(word.encode()) for word in words], dtype=np.uint64)
    return (np.lib.stride_tricks.sliding_window_view(codes, GRAM) * _FACTORS).sum(axis=1, dtype=np.uint64)
