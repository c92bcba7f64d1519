"""A prompt file as a table, whose rows are tokenised when requested.

Texts stay in Arrow's buffers. `dagrl.data.prompt_file` writes such files.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from dagrl.data.batch import Column
from dagrl.data.demonstrations import prompt_before, reply_of, response_tokens, written_reply
from dagrl.data.image_column import ImageColumn, check_markers
from dagrl.model_files.chats import Message, chat_of, fields_beside_content
from dagrl.model_files.images import MARKER, marked_parts
from dagrl.model_files.nested_columns import column_type, is_list, value_at
from dagrl.model_files.tokenizer import begun_text, chat_text
from dagrl.plugins.tool import offered

if TYPE_CHECKING:
    from pyarrow import Schema, Table
    from transformers import PreTrainedTokenizerBase

ANSWER = "reward_model.ground_truth"


class PromptTable:
    """The rows of a parquet file in verl's schema, by number.

    Raises ValueError if the file is missing, broken or empty, or lacks a column.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        responses: Sequence[str] = (),
        with_answers: bool = True,
        tools: Mapping[str, dict[str, Any]] = MappingProxyType({}),
        images: ImageColumn | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Open `path`.

        `images` of the prompts take the places that ``<image>`` marks. `responses` are columns with responses; if they
        hold chats, the messages before the response are the prompt. Without `with_answers`, columns of reference
        answers and data sources are optional. `tools` by name are described in the chat template: for each row all of
        them, or those in its ``extra_info.tools``. `vocab_size`: rows of the model's embedding.
        """
        self.path = path
        self._tokenizer = tokenizer
        self._responses = responses
        self._tools = tools
        self._images = images
        self._vocab_size = vocab_size
        self._table = _read(path, responses, with_answers)

    def __len__(self) -> int:
        return self._table.num_rows

    def place(self, row: int) -> str:
        """Location of a row, for messages."""
        return f"{self.path}, row {row} (the first is 0)"

    def prompt(self, row: int) -> np.ndarray:
        """Token ids of the row's prompt, int64. Raises ValueError if it is empty or has characters without tokens."""
        prompt, place = self._prompt(row), self.place(row)
        if not prompt:
            raise ValueError(f"{place}: the prompt is empty; remove the row")
        sizes = self._image_sizes(prompt, row)
        if isinstance(prompt, str):
            text, tokens = prompt, self._encoded(prompt, MARKER, sizes, True, place)
        else:
            text = self._chat_text(prompt, row)
            # The template has already written the special tokens.
            tokens = self._encoded(text, self._placeholder, sizes, False, place)
        if not tokens:
            raise ValueError(f"{place}: the prompt is empty; remove the row")
        self._check_known(tokens, text, f"{place}: ", "prompt")
        return np.array(tokens, dtype=np.int64)

    def _image_sizes(self, prompt: str | list[dict[str, Any]], row: int) -> np.ndarray | None:
        """Sizes of the row's images [images, 2]; None if prompts are text. ValueError if the prompt marks others."""
        if self._images is None:
            return None
        try:
            sizes = self._images.sizes(row)
            check_markers(sum(str((each or {}).get("content")).count(MARKER) for each in _as_chat(prompt)), len(sizes))
        except ValueError as error:
            raise ValueError(f"{self.place(row)}: {error}") from error
        return sizes

    @cached_property
    def _placeholder(self) -> str:
        """The text of the token for images, which chat templates write for each of them."""
        return str(self._tokenizer.convert_ids_to_tokens(self._images.settings.token)) if self._images else ""

    def _encoded(self, text: str, placeholder: str, sizes: np.ndarray | None, special: bool, place: str) -> list[int]:
        """Token ids of a text, each `placeholder` of which stands for the tokens of an image."""
        if sizes is None or self._images is None:
            return (
                begun_text(self._tokenizer, text) if special else self._tokenizer.encode(text, add_special_tokens=False)
            )
        settings, pieces = self._images.settings, text.split(placeholder)
        if len(pieces) != len(sizes) + 1:
            fact = f"the chat template writes {placeholder} {len(pieces) - 1} times for {len(sizes)} images"
            raise ValueError(f"{place}: {fact}; use the template of the model, and no such text in prompts")
        tokens: list[int] = []
        for number, piece in enumerate(pieces):
            tokens += [settings.token] * int(settings.tokens(sizes[number - 1])[0]) if number else []
            tokens += self._encoded(piece, placeholder, None, special and not number, place)
        return tokens

    def images(self, rows: Sequence[int]) -> dict[str, Column]:
        """Columns of ImageColumn for these rows; none if prompts are text."""
        return self._images.columns(list(rows)) if self._images else {}

    def responses(self, row: int) -> list[np.ndarray]:
        """Token ids of the row's responses with end tokens, int64. Raises ValueError as `prompt` does."""
        found = []
        for column in self._responses:
            place = f"{self.place(row)}, `{column}`: "
            try:
                reply = reply_of(self._value(column, row))
            except ValueError as error:
                raise ValueError(f"{self.place(row)}: `{column}` {error}") from error
            try:
                text, by_template = (reply, False) if isinstance(reply, str) else self._written(reply, row)
                tokens = response_tokens(text, self._tokenizer, by_template=by_template)
            except ValueError as error:
                raise ValueError(f"{place}{error}") from error
            self._check_known(tokens, text, place, "response")
            found.append(np.array(tokens, dtype=np.int64))
        return found

    def _written(self, reply: Message, row: int) -> tuple[str, bool]:
        """The text of an assistant's message, and whether the chat template has written it."""
        if not fields_beside_content(reply):
            return reply["content"], False
        self._check_template("the response has more than a content")
        return written_reply(self._tokenizer, _as_chat(self._prompt(row)), reply, self._offered(row)), True

    def texts(self, rows: Sequence[int]) -> dict[str, Column]:
        """Columns messages (JSON), answer, data_source and extra_info (JSON) of these rows; empty if the file lacks
        one.

        Row by row, because Arrow's `take` copies whole columns of text that have several chunks.
        """

        def values(name: str) -> list[Any]:
            return [self._cell(name, row) for row in rows]

        answers = [self._answer(row) for row in rows]
        return {
            "messages": Column.text([_as_json(_as_chat(self._prompt(row))) for row in rows]),
            "answer": Column.text(answers),
            "data_source": Column.text([source or "" for source in values("data_source")]),
            "extra_info": Column.text([_as_json(extra or {}) for extra in values("extra_info")]),
        }

    def _answer(self, row: int) -> str:
        model = self._cell("reward_model", row)
        try:
            return _as_text(model["ground_truth"] if model else None)
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.place(row)}: {ANSWER} has bytes that are no text in UTF-8; write texts") from error

    def _prompt(self, row: int) -> str | list[dict[str, Any]]:
        try:
            before = prompt_before([self._value(column, row) for column in self._responses])
        except ValueError as error:
            raise ValueError(f"{self.place(row)}: {error}") from error
        # If responses are chats, a column `prompt` repeats their beginning, often as plain text.
        return before or (self._value("prompt", row) if "prompt" in self._table.column_names else [])

    def _value(self, column: str, row: int) -> Any:
        name, _, rest = column.partition(".")
        value = self._cell(name, row)
        return chat_of(value_at(value, rest) if rest else value)

    def _cell(self, column: str, row: int) -> Any:
        """The value of a column, None if the file lacks it."""
        there = column in self._table.column_names
        return self._table[column][row].as_py(maps_as_pydicts="lossy") if there else None

    def _chat_text(self, messages: list[dict[str, Any]], row: int) -> str:
        place = self.place(row)
        self._check_template(f"{place}: the prompt is a chat")
        for message in messages:
            # Parquet may store null for a message, or for one of its fields.
            wrong = [key for key in ("role", "content") if not isinstance((message or {}).get(key), str)]
            if wrong:
                raise ValueError(f"{place}: a message of the chat has no {wrong[0]}, which must be text; got {message}")
        if not any(message["content"] for message in messages):
            raise ValueError(f"{place}: the prompt is empty; remove the row")
        try:
            return chat_text(self._tokenizer, marked_parts(messages) if self._images else messages, self._offered(row))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error

    def _check_template(self, fact: str) -> None:
        if not self._tokenizer.chat_template:
            remedy = "use the tokenizer of an instruction-tuned model, or write prompts and responses as text"
            raise ValueError(f"{fact}, and the tokenizer has no chat template; {remedy}")

    def _offered(self, row: int) -> list[dict[str, Any]]:
        """The tools that the row may use."""
        return [*offered(self._tools, self._cell("extra_info", row) or {}).values()] if self._tools else []

    def _check_known(self, tokens: Sequence[int], text: str, place: str, what: str) -> None:
        """Raise ValueError if the tokenizer has no tokens for a part of the text, or the model no rows for a token."""
        if self._vocab_size is not None and (last := max(tokens)) >= self._vocab_size:
            token = f"token {last} ({self._tokenizer.convert_ids_to_tokens(last)!r})"
            rows = f"the model's embedding has {self._vocab_size} rows (vocab_size)"
            raise ValueError(f"{place}the {what} has {token}, and {rows}; take the model's own tokenizer")
        unknown = self._tokenizer.unk_token_id
        if unknown is None or unknown not in tokens:
            return
        part = f"a word of the {what}"
        for character in text:
            if unknown in self._tokenizer.encode(character, add_special_tokens=False):
                part = f"the character {character!r} of the {what}"
                break
        raise ValueError(f"{place}the tokenizer does not know {part} {text[:80]!r}; change the {what} or the tokenizer")


def _read(path: Path, responses: Sequence[str], with_answers: bool) -> Table:
    """The used columns as an Arrow table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            schema = file.schema_arrow
            _check_columns(path, schema, responses, with_answers)
            known = [name for name in ("prompt", "data_source", "extra_info") if name in schema.names]
            answer = [ANSWER] if column_type(schema, ANSWER) is not None else []
            columns = [*known, *answer, *responses]
            # Per row group, because Arrow cannot read structs of more than 2 GB at once.
            pieces = [file.read_row_group(group, columns) for group in range(file.num_row_groups)]
    except FileNotFoundError as error:
        raise ValueError(f"there is no prompt file {path}; `dagrl data` lists scripts that make some") from error
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path} cannot be read as parquet: {error}") from error
    if not any(piece.num_rows for piece in pieces):
        raise ValueError(f"{path} has no rows")
    return pa.concat_tables(pieces)


def _check_columns(path: Path, schema: Schema, responses: Sequence[str], with_answers: bool) -> None:
    """Raise ValueError if a required column is missing."""
    needed = [*responses, *(("data_source", ANSWER) if with_answers else ())]
    chats = bool(responses) and all(is_list(column_type(schema, name)) for name in responses)
    if not chats:
        needed.insert(0, "prompt")
    missing = [name for name in needed if column_type(schema, name) is None]
    if missing:
        whole = missing[0].partition(".")[0]
        absent = missing[0] if whole in schema.names else whole
        wanted = f"{', '.join(needed[:-1])} and {needed[-1]}"
        raise ValueError(f"{path} has no column {absent}; it needs {wanted}, and has: {', '.join(schema.names)}")


def _as_chat(prompt: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A prompt as messages; plain text becomes a user's message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _as_text(value: Any) -> str:
    """A value as a response may state it: text as it is, "" for None, dates in ISO 8601, and JSON of anything else.

    Raises UnicodeDecodeError for bytes that are no text in UTF-8.
    """
    if value is None:
        return ""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, Decimal):
        return f"{value:f}"
    plain = value if isinstance(value, dict | list | int | float) else _in_json(value)
    return plain if isinstance(plain, str) else _as_json(plain)


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=_in_json)


def _in_json(value: Any) -> Any:
    """The form in JSON of a value that JSON does not have; bytes that are no text become base64."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return base64.b64encode(value).decode()
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value.isoformat() if isinstance(value, date | time) else str(value)
