"""Prompts of a source by their rows, without ones that are too long.

`dagrl.data.prompt_table` reads the file, and `dagrl.data.order` chooses the rows of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import batched, chain, groupby
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NoReturn

import numpy as np

from dagrl.data.batch import Batch, Column
from dagrl.data.demonstrations import ResponseColumns
from dagrl.data.image_column import ImageColumn
from dagrl.data.order.sampler import prompt_id, row_of, source_of
from dagrl.data.prompt_table import PromptTable
from dagrl.data.sources import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HELD_ROWS = 4096


@dataclass(frozen=True, slots=True)
class PromptSlice:
    """Some prompts of a source."""

    columns: dict[str, Column]
    """prompt_tokens (int64), messages (JSON), answer, data_source and extra_info (JSON), a row per prompt; with images
    also pixel_values, image_sizes, image_names and image_thumbnails.

    If responses are requested, also their tokens as ``responses.0``, ``responses.1`` and so on (int64)."""
    rows: np.ndarray
    """Row of each prompt, int64."""
    dropped: tuple[int, ...]
    """Rows that are dropped because they or their responses are too long."""
    cut: tuple[int, ...]
    """Rows that are shortened, or have shortened responses."""


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
    """The prompts of a source."""

    def __init__(
        self,
        source: Source | Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_tokens: int,
        overlong: Literal["drop", "cut", "error"],
        draw: int | None = None,
        responses: ResponseColumns | None = None,
        with_answers: bool = True,
        tools: Mapping[str, dict[str, object]] = MappingProxyType({}),
        images: ImageColumn | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Read `source`; `one_epoch` has at most `draw` of its rows, the same ones each time.

        `responses` adds each prompt's responses. Other options are as in `PromptTable`. Raises ValueError if the file
        is missing, broken or empty, or lacks a column.
        """
        self._limits = [_Limit("prompt", max_prompt_tokens, overlong)]
        if responses:
            self._limits += [_Limit("response", responses.max_tokens, responses.overlong)] * len(responses.columns)
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
        self._draw = draw
        self._passed_over: dict[int, list[int]] = {}
        """Dropped row -> token counts of its prompt and responses."""

    def __len__(self) -> int:
        return len(self._table)

    def read(self, rows: Sequence[int]) -> PromptSlice:
        """The prompts of these rows that are not too long, in this order.

        Raises ValueError for an empty prompt, for text without tokens, for a prompt that is too long with overlong
        ``error``, and when all rows of the source are too long.
        """
        pieces = [self._read(some) for some in batched(rows, _HELD_ROWS)] or [self._read(())]
        if len(pieces) == 1:
            return pieces[0]
        whole = Batch.concat([Batch(np.arange(len(piece.rows)), piece.columns) for piece in pieces])
        dropped, cut = (
            tuple(chain.from_iterable(rows)) for rows in zip(*((p.dropped, p.cut) for p in pieces), strict=True)
        )
        return PromptSlice(dict(whole.columns), np.concatenate([piece.rows for piece in pieces]), dropped, cut)

    def _read(self, rows: Sequence[int]) -> PromptSlice:
        self._table.hold(rows)
        kept: list[int] = []
        tokens: list[list[np.ndarray]] = []
        dropped, cut = list[int](), list[int]()
        for row in rows:
            whole = [self._table.prompt(row), *self._table.responses(row)]
            pieces = [
                limit.fit(uncut, self._table.place(row)) for limit, uncut in zip(self._limits, whole, strict=True)
            ]
            fitting = [piece for piece in pieces if piece is not None]
            if len(fitting) < len(whole):
                dropped.append(row)
                self._passed_over[row] = [len(uncut) for uncut in whole]
                continue
            if any(len(piece) < len(uncut) for piece, uncut in zip(fitting, whole, strict=True)):
                cut.append(row)
            kept.append(row)
            tokens.append(fitting)
        if len(self._passed_over) >= len(self):
            self._raise_none_fits(len(self))
        names = ["prompt_tokens", *(f"responses.{place}" for place in range(len(self._limits) - 1))]
        columns = {
            name: Column.ragged([pieces[place] for pieces in tokens], "int64") for place, name in enumerate(names)
        }
        columns |= self._table.texts(kept) | self._table.images(kept)
        return PromptSlice(columns, np.array(kept, dtype=np.int64), tuple(dropped), tuple(cut))

    def one_epoch(self) -> PromptSlice:
        """All usable prompts, or the drawn ones, in the order of the source. Raises ValueError like `read`."""
        rows = len(self)
        # Independent of the run's seed, so that all runs are measured on the same prompts. A larger draw contains a
        # smaller one.
        drawn = np.arange(rows) if self._draw is None else np.random.default_rng(0).permutation(rows)[: self._draw]
        taken = self.read(np.sort(drawn).tolist())
        if not len(taken.rows):
            self._raise_none_fits(len(drawn))
        return taken

    def _raise_none_fits(self, rows: int) -> NoReturn:
        passed_over = self._passed_over.values()
        longest = [lengths[0] for lengths in passed_over]
        have = f"they have {min(longest)} to {max(longest)} tokens"
        if len(self._limits) > 1:
            answers = [max(lengths[1:]) for lengths in passed_over]
            have += f", their responses up to {min(answers)} to {max(answers)}"
        limits = " and ".join(f"{limit.option}={limit.most}" for limit in dict.fromkeys(self._limits))
        whole = f"none of its {rows:,} prompts fits" if rows > 1 else "its only prompt does not fit"
        several = len(self._limits) > 1
        cut = "data.overlong_prompts and data.overlong_responses to cut" if several else "data.overlong_prompts: cut"
        remedy = f"raise {'them' if several else 'that'}, or set {cut}"
        raise ValueError(f"{self._table.source.title}: {whole} {limits}; {have}; {remedy}")


@dataclass(frozen=True, slots=True)
class ReadPrompts:
    """Prompts of any sources."""

    ids: tuple[int, ...]
    batch: Batch
    """Columns of `PromptSlice`, and the name of the source in ``data_set``; a row per id."""
    dropped: tuple[int, ...] = ()
    """Ids of prompts that are too long."""
    cut: tuple[int, ...] = ()
    """Ids of prompts that are shortened."""


class ReadAhead:
    """Reads the prompts of one step after the other."""

    def __init__(self, sources: Sequence[str], loader_of: Callable[[str], PromptLoader]) -> None:
        """`sources` in the order of their numbers in ids; `loader_of` opens one."""
        self._sources, self._loader_of = sources, loader_of
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._ahead: Future[ReadPrompts] | None = None
        self._read: list[ReadPrompts] = []
        """The prompts that were read ahead for the next call."""

    def read(self, ids: Sequence[int], ahead: Sequence[int] = ()) -> ReadPrompts:
        """The prompts `ids`, in this order; prompts `ahead` are read in the background.

        If any of them is too long, only `dropped` is valid, and the caller must call again with replacements. Raises
        ValueError like `PromptLoader.read`.
        """
        self._end_background()
        known = {prompt for read in self._read for prompt in (*read.ids, *read.dropped)}
        if missing := [prompt for prompt in dict.fromkeys(ids) if prompt not in known]:
            self._read.append(self._load(missing))
        wanted = set(ids)
        dropped = tuple(prompt for read in self._read for prompt in read.dropped if prompt in wanted)
        if dropped:
            return ReadPrompts((), self._read[0].batch, dropped)
        read, self._read = self._read, []
        places = {prompt: place for place, prompt in enumerate(prompt for piece in read for prompt in piece.ids)}
        table = Batch.concat([Batch(np.arange(len(piece.ids)), piece.batch.columns) for piece in read])
        batch = Batch(np.arange(len(table)), table.columns).take(np.array([places[prompt] for prompt in ids], np.int64))
        cut = {prompt for piece in read for prompt in piece.cut}
        if ahead:
            self._ahead = self._thread.submit(self._load, list(dict.fromkeys(ahead)))
        return ReadPrompts(tuple(ids), batch, cut=tuple(prompt for prompt in ids if prompt in cut))

    def _end_background(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            wait([ahead])
            # A failure is raised again if the prompt is requested.
            if ahead.exception() is None:
                self._read.append(ahead.result())

    def _load(self, ids: Sequence[int]) -> ReadPrompts:
        pieces, kept, dropped, cut = list[Batch](), list[int](), list[int](), list[int]()
        for source, mine in groupby(sorted(ids, key=source_of), key=source_of):
            name = self._sources[source]
            read = self._loader_of(name).read([row_of(prompt) for prompt in mine])
            names = Column.text([name] * len(read.rows))
            pieces.append(Batch(np.arange(len(names)), {**read.columns, "data_set": names}))
            kept += [prompt_id(source, row) for row in read.rows.tolist()]
            dropped += [prompt_id(source, row) for row in read.dropped]
            cut += [prompt_id(source, row) for row in read.cut]
        return ReadPrompts(tuple(kept), Batch.concat(pieces), tuple(dropped), tuple(cut))
