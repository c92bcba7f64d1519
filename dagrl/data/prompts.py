"""Prompts of a source, as an endless sequence of shuffled epochs.

The loader has no cursor: a position determines the sequence, so a checkpoint stores one number and a run resumes in the
middle of an epoch. `dagrl.data.prompt_table` reads the source.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dagrl.data.batch import Column
from dagrl.data.demonstrations import ResponseColumns
from dagrl.data.image_column import ImageColumn
from dagrl.data.prompt_table import PromptTable
from dagrl.data.sources import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HELD_ROWS = 4096


@dataclass(frozen=True, slots=True)
class PromptSlice:
    """Prompts of the sequence."""

    columns: dict[str, Column]
    """prompt_tokens (int64), messages (JSON), answer, data_source and extra_info (JSON), a row per prompt; with images
    also pixel_values, image_sizes, image_names and image_thumbnails.

    If responses are requested, also their tokens as ``responses.0``, ``responses.1`` and so on (int64)."""
    positions: np.ndarray
    """Position of each prompt in the sequence, int64."""
    next_position: int
    """Position after the last prompt."""
    dropped: int
    """Prompts skipped because they or their responses are too long."""
    cut: int
    """Prompts shortened, or with shortened responses."""


@dataclass(frozen=True, slots=True)
class _Limit:
    """Length limit of a prompt or a response."""

    what: str
    most: int
    overlong: Literal["drop", "cut", "error"]

    def fit(self, tokens: np.ndarray, place: str) -> np.ndarray | None:
        """The tokens, cut if allowed; None if they are too long and the row is dropped."""
        if len(tokens) <= self.most:
            return tokens
        match self.overlong:
            case "error":
                raise ValueError(
                    f"{place}: the {self.what} has {len(tokens)} tokens, more than {self.option}={self.most}; raise "
                    f"that, or set data.overlong_{self.what}s to drop or cut"
                )
            case "drop":
                return None
            case "cut":
                # Keep the end of a prompt, where the question is.
                return tokens[-self.most :] if self.what == "prompt" else tokens[: self.most]

    @property
    def option(self) -> str:
        return f"max_{self.what}_tokens"


class PromptLoader:
    """The prompts of a file, epoch after epoch; with `shuffle`, each in a different order."""

    def __init__(
        self,
        source: Source | Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_tokens: int,
        overlong: Literal["drop", "cut", "error"],
        shuffle: bool,
        seed: int,
        draw: int | None = None,
        responses: ResponseColumns | None = None,
        with_answers: bool = True,
        tools: Mapping[str, dict[str, Any]] = MappingProxyType({}),
        images: ImageColumn | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Read `source`; with `draw`, at most so many of its rows, the same ones each time, in the order of the file.

        `responses` adds those of each prompt. Other options are as in `PromptTable`. Raises ValueError if the file is
        missing, broken or empty, or lacks a column.
        """
        self._limits = [_Limit("prompt", max_prompt_tokens, overlong)]
        if responses:
            self._limits += [_Limit("response", responses.max_tokens, responses.overlong)] * len(responses.columns)
        self._shuffle = shuffle
        # numpy's generators reject negative seeds.
        self._seed = seed % 2**64
        columns = responses.columns if responses else ()
        self._table = PromptTable(
            source,
            tokenizer,
            responses=columns,
            with_answers=with_answers,
            tools=tools,
            images=images,
            vocab_size=vocab_size,
        )
        rows = len(self._table)
        # Not by `seed`: runs with other seeds are measured on the same prompts. More are the same ones, and others.
        drawn = np.random.default_rng(0).permutation(rows)[:draw] if draw is not None else np.arange(rows)
        self._rows = np.sort(drawn)
        self._epoch_order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        """Rows per epoch, including those that are too long."""
        return len(self._rows)

    def take(self, position: int, count: int, *, end: int | None = None, first: Sequence[int] = ()) -> PromptSlice:
        """The next `count` usable prompts from `position`, which counts all prompts of the endless sequence.

        With `end`, only those before that position. Prompts at the positions `first`, at most `count`, come first and
        count. The result is deterministic. Raises ValueError for an empty prompt, for text without tokens, for a prompt
        that is too long with overlong ``error``, and if a whole epoch has no prompt that is short enough.
        """
        assert len(first) <= count
        rows: list[int] = []
        positions: list[int] = []
        tokens: list[list[np.ndarray]] = []
        dropped = cut = 0
        passed_over: list[list[int]] = []
        waiting = deque(first)
        held: set[int] = set()
        while len(rows) < count and (waiting or end is None or position < end):
            if waiting:
                here = waiting.popleft()
            else:
                here, position = position, position + 1
            row = self._row_at(here)
            if row not in held:
                coming = itertools.chain([here], waiting, itertools.count(position))
                held = {self._row_at(each) for each in itertools.islice(coming, min(_HELD_ROWS, count - len(rows)))}
                self._table.hold([*held])
            whole = [self._table.prompt(row), *self._table.responses(row)]
            pieces = [limit.fit(each, self._table.place(row)) for limit, each in zip(self._limits, whole, strict=True)]
            fitting = [piece for piece in pieces if piece is not None]
            if len(fitting) < len(whole):
                dropped += 1
                passed_over.append([len(each) for each in whole])
                self._check_some_fit(passed_over)
                continue
            cut += any(len(piece) < len(each) for piece, each in zip(fitting, whole, strict=True))
            passed_over.clear()
            rows.append(row)
            positions.append(here)
            tokens.append(fitting)
        columns = {name: Column.ragged([each[place] for each in tokens], "int64") for place, name in self._names()}
        columns |= self._table.texts(rows) | self._table.images(rows)
        return PromptSlice(columns, np.array(positions, dtype=np.int64), position, dropped, cut)

    def one_epoch(self) -> PromptSlice:
        """All usable prompts of the file in the order of the first epoch. Raises ValueError as `take` does."""
        taken = self.take(0, len(self), end=len(self))
        if not len(taken.columns["prompt_tokens"]):
            raise ValueError(f"{self._none_fits()}; {self._remedy()}")
        return taken

    def _names(self) -> list[tuple[int, str]]:
        """Index and column of each limit."""
        return [(place, f"responses.{place - 1}" if place else "prompt_tokens") for place in range(len(self._limits))]

    def _row_at(self, position: int) -> int:
        epoch, index = divmod(position, len(self))
        if not self._shuffle:
            return int(self._rows[index])
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            self._epoch_order = (epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self)))
        return int(self._rows[self._epoch_order[1][index]])

    def _check_some_fit(self, passed_over: list[list[int]]) -> None:
        """`passed_over`: token counts of skipped prompts and their responses."""
        # Only this length is sure to cover a whole epoch: with different orders, one epoch may end and the next begin
        # with the same rows.
        if len(passed_over) >= 2 * len(self) - 1:
            longest = [lengths[0] for lengths in passed_over]
            have = f"they have {min(longest)} to {max(longest)} tokens"
            if len(self._limits) > 1:
                answers = [max(lengths[1:]) for lengths in passed_over]
                have += f", their responses up to {min(answers)} to {max(answers)}"
            raise ValueError(f"{self._none_fits()}; {have}; {self._remedy()}")

    def _none_fits(self) -> str:
        limits = " and ".join(f"{limit.option}={limit.most}" for limit in dict.fromkeys(self._limits))
        whole = f"none of its {len(self):,} prompts fits" if len(self) > 1 else "its only prompt does not fit"
        return f"{self._table.source.title}: {whole} {limits}"

    def _remedy(self) -> str:
        several = len(self._limits) > 1
        cut = "data.overlong_prompts and data.overlong_responses to cut" if several else "data.overlong_prompts: cut"
        return f"raise {'them' if several else 'that'}, or set {cut}"
