"""The tokenizer of a pipeline, read from a Hugging Face folder, or generated for models with random weights.

All prompts, generators and rewards use this module, so that they agree on every token. Libraries are imported when a
tokenizer is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dagrl.config.schema import ModelSpec, TokenizerSpec
from dagrl.imports import CODE_IS_NOT_RUN, tokenizers_alone
from dagrl.model_files.chats import Chat, with_arguments_as_text
from dagrl.model_files.hf_config import EOS, IMAGE, PAD, UNKNOWN, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONCATENATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{{ part['text'] if part['type'] == 'text' else '" + IMAGE + "' }}{% endfor %}"
    "{% endif %}{% endfor %}"
)
MESSAGES = "{{ messages | tojson }}"
"""The chat template of ``kind: messages``."""


def load_tokenizer(model: ModelSpec) -> PreTrainedTokenizerBase:
    """The tokenizer of `model`: ``model.tokenizer``, or the one in the model's folder.

    A missing padding token is set to the end token. Raises ValueError if no tokenizer is named, or the folder has none
    that can be read.
    """
    source = model.tokenizer or model.path
    if source is None:
        raise ValueError("the model has no tokenizer; set model.path or model.tokenizer")
    return make_tokenizer(source) if isinstance(source, TokenizerSpec) else _from_folder(source)


def make_tokenizer(spec: TokenizerSpec, *, finds_images: bool = False) -> PreTrainedTokenizerBase:
    """A tokenizer without merges: one token per character, or per byte of UTF-8.

    ``bytes``: token b is byte b, followed by ``<pad>`` and ``<eos>``. ``characters``: ``<pad>``, ``<eos>`` and
    ``<unk>``, then the alphabet in order. Text that looks like a special token is read as characters, decoding inserts
    nothing, and the chat template concatenates the messages' contents. With ``images``, `IMAGE` is the last token.

    With `finds_images`, text that looks like a special token is read as one, as the image processor of transformers
    needs it.
    """
    with tokenizers_alone():
        from tokenizers import Tokenizer, decoders
        from tokenizers.models import BPE
        from transformers import PreTrainedTokenizerFast

    vocabulary = dict(token_ids(spec))
    if spec.kind != "characters":
        backend = Tokenizer(BPE(vocabulary, merges=[], byte_fallback=True))
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    else:
        backend = Tokenizer(BPE(vocabulary, merges=[], unk_token=UNKNOWN))
        backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN if UNKNOWN in vocabulary else None,
        chat_template=MESSAGES if spec.kind == "messages" else _CONCATENATE,
        clean_up_tokenization_spaces=False,
        split_special_tokens=not finds_images,
        # The processor looks for both.
        **({"image_token": IMAGE, "video_token": IMAGE} if finds_images else {}),
    )


def begun_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """`begun_texts` for one text."""
    return begun_texts(tokenizer, [text])[0]


def begun_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts that a model continues: with special tokens that the tokenizer adds before them, but without
    ones after them.

    Some tokenizers add an end token to each text.
    """
    if not texts:
        return []
    special = {*tokenizer.all_special_ids}
    several: list[list[int]] = tokenizer(list(texts), return_attention_mask=False)["input_ids"]
    return [
        _without_end(tokenizer, text, tokens) if tokens and tokens[-1] in special else tokens
        for text, tokens in zip(texts, several, strict=True)
    ]


def _without_end(tokenizer: PreTrainedTokenizerBase, text: str, tokens: list[int]) -> list[int]:
    own = tokenizer.encode(text, add_special_tokens=False)
    ends = (end for end in range(len(own), len(tokens) + 1) if tokens[end - len(own) : end] == own)
    return tokens[: next(ends, len(tokens))]


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    chat: Chat,
    tools: Sequence[Mapping[str, object]] = (),
    *,
    complete: bool = False,
) -> str:
    """A chat rendered by the chat template, including special tokens, up to the assistant's turn.

    A `complete` chat ends with the assistant's message. Raises ValueError if the chat template rejects the messages,
    for example a system message or turns that do not alternate.
    """
    try:
        return render_chat(tokenizer, chat, tools, complete=complete)
    except ValueError as error:
        roles = ", ".join(str(message.get("role")) for message in chat)
        raise ValueError(
            f"the tokenizer's chat template rejects a chat of {roles}: {error}; change the chat or the template"
        ) from error


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    chat: Chat,
    tools: Sequence[Mapping[str, object]] = (),
    *,
    complete: bool = False,
) -> str:
    """Like `chat_text`, but its ValueError has only the template's reason."""
    from jinja2 import TemplateError

    def render(messages: Chat) -> str:
        return tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=not complete,
        )

    try:
        return render(chat)
    except (TemplateError, TypeError) as error:  # TypeError: an expression failed
        # Some templates, such as DeepSeek-V3's, concatenate the arguments of calls with other text.
        with suppress(TemplateError, TypeError):
            if (written := with_arguments_as_text(chat)) != chat:
                return render(written)
        raise ValueError(str(error)) from error


def _from_folder(source: Path) -> PreTrainedTokenizerBase:
    folder = source.expanduser()
    # Checked here, because the library takes a missing path for a repository on the Hub.
    if not folder.is_dir():
        raise ValueError(f"there is no tokenizer folder {folder}; set model.tokenizer or model.path to an existing one")
    # Mistral's newer models come with two tokenizers. With mistral_common, which servers need, the library would use
    # the one without a chat template. With this option it uses tokenizer.json, and splits text like tekken.json.
    both = (folder / "tokenizer.json").is_file() and (folder / "tekken.json").is_file()
    options = {"fix_mistral_regex": True} if both else {}
    try:
        with tokenizers_alone():
            from transformers import AutoTokenizer

            # By default transformers asks on the terminal whether to run the folder's code.
            tokenizer = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False, **options
            )
    except Exception as error:
        # transformers raises errors of any class for a file that it cannot parse, for example one of a newer version.
        # The first line of a message says what is wrong.
        why = CODE_IS_NOT_RUN if "trust_remote_code" in str(error) else str(error).partition("\n")[0].rstrip(" :")
        why = why.removesuffix(" from one of")
        raise ValueError(
            f"cannot load a tokenizer from {folder}: {why}; it needs tokenizer.json or similar files that "
            "the installed transformers can read"
        ) from error
    if tokenizer.pad_token is None:
        # Padding is always masked, so any token works; the end token is the usual choice.
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
