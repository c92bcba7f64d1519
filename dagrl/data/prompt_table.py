"""The prompts of a source, whose rows are read and tokenised when requested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from dagrl.config.schema import SourceSpec
from dagrl.data.batch import Column
from dagrl.data.demonstrations import prompt_before, reply_of, response_tokens, written_reply
from dagrl.data.image_column import ImageColumn, check_markers
from dagrl.data.sources import Source, open_source
from dagrl.data.sources.fields import answer_of, as_chat, as_json, prompt_of, with_system
from dagrl.model_files.chats import Message, chat_of, fields_beside_content
from dagrl.model_files.images import MARKER, marked_parts
from dagrl.model_files.nested_columns import column_type, is_list, repeated, value_at
from dagrl.model_files.tokenizer import begun_text, begun_texts, chat_text
from dagrl.plugins.tool import offered

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase


class PromptTable:
    """The prompts of a source by the numbers of its rows.

    Raises ValueError if a file is missing, broken or empty, or lacks a column.
    """

    def __init__(
        self,
        source: Source | Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        responses: Sequence[str] = (),
        with_answers: bool = True,
        tools: Mapping[str, dict[str, object]] = MappingProxyType({}),
        images: ImageColumn | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Read `source`, or a file in verl's schema.

        `images` of the prompts are placed at their ``<image>`` marks. `responses` are columns with responses; if they
        hold chats, the messages before the response are the prompt. Without `with_answers`, the column of reference
        answers is optional. `tools` by name are described in the chat template: for each row all of them, or the ones
        in its ``extra_info.tools``. `vocab_size`: rows of the model's embedding.
        """
        self.source = source if isinstance(source, Source) else open_source("train", SourceSpec(path=source))
        self._tokenizer = tokenizer
        self._responses = responses
        self._tools = tools
        self._images = images
        self._vocab_size = vocab_size
        spec = self.source.spec
        self._columns = [spec.prompt_key, spec.answer_key, "data_source", "extra_info", *responses]
        for part in self.source.parts:
            if part.groups.sum():
                title = str(part.title) if self.source.parts[1:] else self.source.title
                self._check_columns(part.schema, title, responses, with_answers)
        self._held: dict[int, int] = {}
        """Cached row -> its place in `_values`."""
        self._values: dict[str, list[object]] = {}
        self._encoded_rows: dict[int, tuple[str, list[int]]] = {}
        """Cached rows -> text and tokens of their prompts."""

    def __len__(self) -> int:
        return len(self.source)

    def place(self, row: int) -> str:
        return self.source.place(row)

    def hold(self, rows: Sequence[int]) -> None:
        """Read and tokenise these rows at once, and cache them until the next call.

        Other rows can be used too, but reading each alone is slow. Errors are raised by the methods that use a row.
        """
        self._held = {row: place for place, row in enumerate(dict.fromkeys(rows))}
        self._values = self.source.values([*self._held], self._columns)
        self._encoded_rows = {}
        if self._images is None:
            self._encode_held()

    def _encode_held(self) -> None:
        plain: dict[int, str] = {}
        chats: dict[int, str] = {}
        for row in self._held:
            try:
                prompt = self._prompt(row)
                if isinstance(prompt, str) and prompt:
                    plain[row] = prompt
                elif prompt:
                    chats[row] = self._chat_text(prompt, row)
            except ValueError:
                continue  # `prompt` raises it if the row is used.
        tokens = begun_texts(self._tokenizer, [*plain.values()])
        if chats:
            # The template has already written the special tokens.
            texts = [*chats.values()]
            tokens += self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        whole = plain | chats
        self._encoded_rows = {row: (whole[row], ids) for row, ids in zip(whole, tokens, strict=True)}

    def prompt(self, row: int) -> np.ndarray:
        """Token ids of the row's prompt, int64. Raises ValueError if it is empty or has characters without tokens."""
        if row not in self._held:
            self.hold([row])
        text, tokens = self._encoded_rows.get(row) or self._text_and_tokens(row)
        if not tokens:
            raise ValueError(f"{self.place(row)}: the prompt is empty; remove the row")
        self._check_known(tokens, text, row, "prompt")
        return np.array(tokens, dtype=np.int64)

    def _text_and_tokens(self, row: int) -> tuple[str, list[int]]:
        prompt = self._prompt(row)
        if not prompt:
            raise ValueError(f"{self.place(row)}: the prompt is empty; remove the row")
        sizes = self._image_sizes(prompt, row)
        if isinstance(prompt, str):
            return prompt, self._encoded(prompt, MARKER, sizes, True, row)
        text = self._chat_text(prompt, row)
        return text, self._encoded(text, self._placeholder, sizes, False, row)

    def _image_sizes(self, prompt: str | list[dict[str, object]], row: int) -> np.ndarray | None:
        """Sizes of the row's images [images, 2]; None if prompts are text. ValueError if the prompt's marks do not
        match.
        """
        if self._images is None:
            return None
        try:
            sizes = self._images.sizes(row)
            check_markers(
                sum(str((message or {}).get("content")).count(MARKER) for message in as_chat(prompt)), len(sizes)
            )
        except ValueError as error:
            raise ValueError(f"{self.place(row)}: {error}") from error
        return sizes

    @cached_property
    def _placeholder(self) -> str:
        """The text of the token for images, which chat templates write for each of them."""
        return str(self._tokenizer.convert_ids_to_tokens(self._images.settings.token)) if self._images else ""

    def _encoded(self, text: str, placeholder: str, sizes: np.ndarray | None, special: bool, row: int) -> list[int]:
        """Token ids of a text in which each `placeholder` becomes the tokens of an image."""
        if sizes is None or self._images is None:
            return (
                begun_text(self._tokenizer, text) if special else self._tokenizer.encode(text, add_special_tokens=False)
            )
        settings, pieces = self._images.settings, text.split(placeholder)
        if len(pieces) != len(sizes) + 1:
            fact = f"the chat template writes {placeholder} {len(pieces) - 1} times for {len(sizes)} images"
            raise ValueError(f"{self.place(row)}: {fact}; use the template of the model, and no such text in prompts")
        tokens: list[int] = []
        for number, piece in enumerate(pieces):
            tokens += [settings.token] * int(settings.tokens(sizes[number - 1])[0]) if number else []
            tokens += self._encoded(piece, placeholder, None, special and not number, row)
        return tokens

    def images(self, rows: Sequence[int]) -> dict[str, Column]:
        return self._images.columns(list(rows)) if self._images else {}

    def responses(self, row: int) -> list[np.ndarray]:
        """Token ids of the row's responses with end tokens, int64. Raises ValueError as `prompt` does."""
        replies = []
        for column in self._responses:
            try:
                reply = reply_of(self._value(column, row))
            except ValueError as error:
                raise ValueError(f"{self.place(row)}: `{column}` {error}") from error
            try:
                text, by_template = (reply, False) if isinstance(reply, str) else self._written(reply, row)
                tokens = response_tokens(text, self._tokenizer, by_template=by_template)
            except ValueError as error:
                raise ValueError(f"{self.place(row)}, `{column}`: {error}") from error
            self._check_known(tokens, text, row, "response", f", `{column}`")
            replies.append(np.array(tokens, dtype=np.int64))
        return replies

    def _written(self, reply: Message, row: int) -> tuple[str, bool]:
        """The text of an assistant's message, and whether the chat template has written it."""
        if not fields_beside_content(reply):
            return reply["content"], False
        self._check_template("the response has more than a content")
        return written_reply(self._tokenizer, as_chat(self._prompt(row)), reply, self._offered(row)), True

    def texts(self, rows: Sequence[int]) -> dict[str, Column]:
        """Columns messages (JSON), answer, data_source and extra_info (JSON) of these rows; empty if the file lacks
        one, except the data source, which is then the source's name.
        """
        if any(row not in self._held for row in rows):
            self.hold(rows)
        return {
            "messages": Column.text([as_json(as_chat(self._prompt(row))) for row in rows]),
            "answer": Column.text([self._answer(row) for row in rows]),
            "data_source": Column.text([self._data_source(row) for row in rows]),
            "extra_info": Column.text([as_json(self._cell("extra_info", row) or {}) for row in rows]),
        }

    def _data_source(self, row: int) -> str:
        source = self._cell("data_source", row)
        if not isinstance(source, str | None):
            raise self._wrong(row, "a data_source that is no text")
        return source or self.source.name

    def _answer(self, row: int) -> str:
        key = self.source.spec.answer_key
        try:
            return answer_of(self._at(key, row))
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.place(row)}: {key} has bytes that are no text in UTF-8; write texts") from error

    def _prompt(self, row: int) -> str | list[dict[str, Any]]:
        try:
            before = prompt_before([self._value(column, row) for column in self._responses])
        except ValueError as error:
            raise ValueError(f"{self.place(row)}: {error}") from error
        spec = self.source.spec
        # If responses are chats, a column `prompt` repeats their beginning, often as plain text.
        if before:
            return with_system(before, spec.system_prompt)
        value = self._at(spec.prompt_key, row)
        try:
            return prompt_of(value, spec, has_template=bool(self._tokenizer.chat_template)) or []
        except ValueError as error:
            raise self._wrong(row, error) from error

    def _value(self, column: str, row: int) -> object:
        return chat_of(self._at(column, row))

    def _at(self, column: str, row: int) -> object:
        name = column.partition(".")[0]
        try:
            return value_at({name: self._cell(name, row)}, column)
        except ValueError as error:
            raise self._wrong(row, error) from error

    def _wrong(self, row: int, what: object) -> ValueError:
        return ValueError(f"{self.place(row)} has {what}; mend the row, or remove it")

    def _cell(self, column: str, row: int) -> object:
        if row not in self._held:
            self.hold([row])
        return self._values[column][self._held[row]]

    def _chat_text(self, messages: list[dict[str, object]], row: int) -> str:
        if not self._tokenizer.chat_template:
            self._check_template(f"{self.place(row)}: the prompt is a chat")
        for message in messages:
            # Parquet may store null for a message, or for one of its fields.
            wrong = [key for key in ("role", "content") if not isinstance((message or {}).get(key), str)]
            if wrong:
                raise ValueError(
                    f"{self.place(row)}: a message of the chat has no {wrong[0]}, which must be text; got {message}"
                )
        if not any(message["content"] for message in messages):
            raise ValueError(f"{self.place(row)}: the prompt is empty; remove the row")
        try:
            return chat_text(self._tokenizer, marked_parts(messages) if self._images else messages, self._offered(row))
        except ValueError as error:
            raise ValueError(f"{self.place(row)}: {error}") from error

    def _check_template(self, fact: str) -> None:
        if not self._tokenizer.chat_template:
            remedy = "use the tokenizer of an instruction-tuned model, or write prompts and responses as text"
            raise ValueError(f"{fact}, and the tokenizer has no chat template; {remedy}")

    def _offered(self, row: int) -> list[dict[str, object]]:
        return [*offered(self._tools, self._cell("extra_info", row) or {}).values()] if self._tools else []

    def _check_known(self, tokens: Sequence[int], text: str, row: int, what: str, column: str = "") -> None:
        """Raise ValueError if the tokenizer has no tokens for a part of the text, or the model no rows for a token."""
        if self._vocab_size is not None and (last := max(tokens)) >= self._vocab_size:
            token = f"token {last} ({self._tokenizer.convert_ids_to_tokens(last)!r})"
            rows = f"the model's embedding has {self._vocab_size} rows (vocab_size)"
            fact = f"{self.place(row)}{column}: the {what} has {token}, and {rows}"
            raise ValueError(f"{fact}; take the model's own tokenizer")
        unknown = self._tokenizer.unk_token_id
        if unknown is None or unknown not in tokens:
            return
        part = f"a word of the {what}"
        for character in text:
            if unknown in self._tokenizer.encode(character, add_special_tokens=False):
                part = f"the character {character!r} of the {what}"
                break
        fact = f"{self.place(row)}{column}: the tokenizer does not know {part} {text[:80]!r}"
        raise ValueError(f"{fact}; change the {what} or the tokenizer")

    def _check_columns(self, schema: pa.Schema, title: str, responses: Sequence[str], with_answers: bool) -> None:
        """Raise ValueError if a file lacks a required column, or has duplicates of one."""
        if problem := repeated(schema, self._columns):
            raise ValueError(f"{title} {problem}")
        spec = self.source.spec
        needed = [*responses, *([spec.answer_key] if with_answers else [])]
        chats = bool(responses) and all(is_list(column_type(schema, name)) for name in responses)
        if not chats:
            needed.insert(0, spec.prompt_key)
        missing = [name for name in needed if column_type(schema, name) is None]
        if missing:
            whole = missing[0].partition(".")[0]
            absent = missing[0] if whole in schema.names else whole
            wanted = f"{', '.join(needed[:-1])} and {needed[-1]}" if needed[1:] else needed[0]
            fact = f"{title} has no column {absent}; it needs {wanted}"
            raise ValueError(f"{fact}, and has: {', '.join(schema.names)}")
