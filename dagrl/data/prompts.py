"""Prompts out of a parquet file in verl's schema, in an endless sequence of shuffled epochs.

The loader keeps no cursor: a position in the sequence says everything, so a checkpoint stores that one number and a run
goes on in the middle of an epoch. `dagrl.data.prompt_file` writes such files.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dagrl.data.batch import Column

if TYPE_CHECKING:
    from pyarrow import Table
    from transformers import PreTrainedTokenizerBase

ANSWER = "reward_model.ground_truth"


@dataclass(frozen=True, slots=True)
class PromptSlice:
    """Some prompts of the sequence, consecutive but for those that were asked for by their positions."""

    columns: dict[str, Column]
    """prompt_tokens (int64), messages (JSON), answer, data_source and extra_info (JSON): a row for each prompt."""
    positions: np.ndarray
    """Where each prompt stands in the sequence, int64."""
    next_position: int
    """Where the sequence goes on."""
    dropped: int
    """Prompts passed over because they are too long."""
    cut: int
    """Prompts that were shortened."""


class PromptLoader:
    """The prompts of a file: epoch after epoch, each in an order of its own where `shuffle` is set.

    The file's text stays in Arrow's buffers; only the rows that `take` comes to become Python objects and tokens.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_tokens: int,
        overlong: Literal["drop", "cut", "error"],
        shuffle: bool,
        seed: int,
        limit: int | None = None,
    ) -> None:
        """Open `path`; with `limit`, use only its first so many rows.

        Raises ValueError where the file is missing, broken or empty, or lacks a column.
        """
        self.path = path
        self._tokenizer = tokenizer
        self._max_tokens = max_prompt_tokens
        self._overlong = overlong
        self._shuffle = shuffle
        # A seed may be negative, numpy's sources of randomness take none such.
        self._seed = seed % 2**64
        self._table = _read(path, limit)
        self._epoch_order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        """Rows of an epoch, too long ones included."""
        return self._table.num_rows

    def take(self, position: int, count: int, *, end: int | None = None, first: Sequence[int] = ()) -> PromptSlice:
        """The next `count` usable prompts from `position` on, which counts all prompts of the endless sequence.

        With `end`, those before that position, which may be fewer. The prompts at the positions `first`, no more than
        `count`, come before them, and count.
        The same arguments give the same prompts. Raises ValueError for a prompt that is empty or that the tokenizer has
        no tokens for, for a too long one with overlong ``error``, and when a whole epoch holds none that is short.
        """
        assert len(first) <= count
        rows: list[int] = []
        positions: list[int] = []
        tokens: list[np.ndarray] = []
        dropped = cut = 0
        passed_over: list[int] = []
        waiting = deque(first)
        while len(rows) < count and (waiting or end is None or position < end):
            if waiting:
                here = waiting.popleft()
            else:
                here, position = position, position + 1
            row = self._row_at(here)
            prompt = self._tokens_of(row)
            if len(prompt) > self._max_tokens:
                if self._overlong == "error":
                    raise ValueError(
                        f"{self._place(row)}: the prompt has {len(prompt)} tokens, more than max_prompt_tokens="
                        f"{self._max_tokens}; raise that, or set data.overlong_prompts to drop or cut"
                    )
                if self._overlong == "drop":
                    dropped += 1
                    passed_over.append(len(prompt))
                    self._check_some_fit(passed_over)
                    continue
                # The question stands at the end of a prompt, so its beginning is what can go.
                prompt = prompt[-self._max_tokens :]
                cut += 1
            passed_over.clear()
            rows.append(row)
            positions.append(here)
            tokens.append(prompt)
        columns = {"prompt_tokens": Column.ragged(tokens, "int64"), **self._text_columns(rows)}
        return PromptSlice(columns, np.array(positions, dtype=np.int64), position, dropped, cut)

    def one_epoch(self) -> PromptSlice:
        """All usable prompts of the file, each once, in the order of its first epoch. Raises ValueError like `take`."""
        taken = self.take(0, len(self), end=len(self))
        if not len(taken.columns["prompt_tokens"]):
            raise ValueError(
                f"{self.path}: none of its {len(self)} prompts fits max_prompt_tokens={self._max_tokens}; raise that, "
                "or set data.overlong_prompts: cut"
            )
        return taken

    def _row_at(self, position: int) -> int:
        epoch, index = divmod(position, len(self))
        if not self._shuffle:
            return index
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            self._epoch_order = (epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self)))
        return int(self._epoch_order[1][index])

    def _check_some_fit(self, passed_over: list[int]) -> None:
        # Only a run of this length is sure to hold a whole epoch: orders differ, so a run may end one epoch and begin
        # the next with the same rows.
        if len(passed_over) >= 2 * len(self) - 1:
            raise ValueError(
                f"{self.path}: none of its {len(self)} prompts fits max_prompt_tokens={self._max_tokens}; they have "
                f"{min(passed_over)} to {max(passed_over)} tokens; raise that, or set data.overlong_prompts: cut"
            )

    def _tokens_of(self, row: int) -> np.ndarray:
        prompt = self._table["prompt"][row].as_py()
        place = self._place(row)
        if not prompt:
            raise ValueError(f"{place}: the prompt is empty; remove the row")
        if isinstance(prompt, str):
            text, tokens = prompt, self._tokenizer.encode(prompt)
        else:
            text = self._chat_text(prompt, place)
            # The template has put the special tokens into the text already.
            tokens = self._tokenizer.encode(text, add_special_tokens=False)
        if not tokens:
            raise ValueError(f"{place}: the prompt is empty; remove the row")
        unknown = self._tokenizer.unk_token_id
        if unknown is not None and unknown in tokens:
            raise ValueError(f"{place}: {self._unknown_character(text)}; change the prompt or the tokenizer")
        return np.array(tokens, dtype=np.int64)

    def _chat_text(self, messages: list[dict[str, Any]], place: str) -> str:
        if not self._tokenizer.chat_template:
            raise ValueError(
                f"{place}: the prompt is a chat, and the tokenizer has no chat template; use the tokenizer of an "
                f"instruction-tuned model, or write prompts as text"
            )
        for message in messages:
            wrong = [key for key in ("role", "content") if not isinstance(message.get(key), str)]
            if wrong:
                raise ValueError(f"{place}: a message of the chat has no {wrong[0]}, which must be text; got {message}")
        if not any(message["content"] for message in messages):
            raise ValueError(f"{place}: the prompt is empty; remove the row")
        return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def _unknown_character(self, text: str) -> str:
        unknown = self._tokenizer.unk_token_id
        for character in text:
            if unknown in self._tokenizer.encode(character, add_special_tokens=False):
                return f"the tokenizer does not know the character {character!r} of the prompt {text[:80]!r}"
        return f"the tokenizer does not know a word of the prompt {text[:80]!r}"

    def _text_columns(self, rows: list[int]) -> dict[str, Column]:
        # Row by row: Arrow's own take copies whole columns of text when they come in several chunks.
        def values(name: str) -> list[Any]:
            return [self._table[name][row].as_py() for row in rows]

        prompts = values("prompt")
        answers = [_as_text(model["ground_truth"] if model else None) for model in values("reward_model")]
        sources = values("data_source")
        extras = values("extra_info") if "extra_info" in self._table.column_names else [None] * len(rows)
        return {
            "messages": Column.text([_as_json(_as_chat(prompt)) for prompt in prompts]),
            "answer": Column.text(answers),
            "data_source": Column.text([source or "" for source in sources]),
            "extra_info": Column.text([_as_json(extra or {}) for extra in extras]),
        }

    def _place(self, row: int) -> str:
        return f"{self.path}, row {row} (the first is 0)"


def _read(path: Path, limit: int | None) -> Table:
    """The columns that matter, as an Arrow table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            schema = file.schema_arrow
            _check_columns(path, schema)
            optional = ["extra_info"] if "extra_info" in schema.names else []
            table = file.read(columns=["prompt", "data_source", ANSWER, *optional])
    except FileNotFoundError as error:
        raise ValueError(f"there is no prompt file {path}; data_preprocess/ has scripts that make some") from error
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path} cannot be read as parquet: {error}") from error
    if table.num_rows == 0:
        raise ValueError(f"{path} has no rows")
    return table if limit is None else table.slice(0, limit)


def _check_columns(path: Path, schema: Any) -> None:
    """ValueError where a column that every prompt needs is not there."""
    import pyarrow as pa

    missing = [name for name in ("prompt", "data_source", "reward_model") if name not in schema.names]
    if not missing:
        reward_model = schema.field("reward_model").type
        if not pa.types.is_struct(reward_model) or reward_model.get_field_index("ground_truth") < 0:
            missing = [ANSWER]
    if missing:
        raise ValueError(
            f"{path} has no column {missing[0]}; it needs prompt, data_source and {ANSWER}, and has: "
            + ", ".join(schema.names)
        )


def _as_chat(prompt: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A prompt as messages; a plain text is the user's."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _as_text(value: Any) -> str:
    """A string as it is, nothing as "", anything else as JSON (dates and the like as their text)."""
    if value is None:
        return ""
    return value if isinstance(value, str) else _as_json(value)


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
