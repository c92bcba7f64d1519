"""Checks of a tokenizer's folder: readable files, tokens within the embedding, and a valid chat template.

Small files only; transformers, which loads them, would take seconds to import.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from dagrl.config.schema import TokenizerSpec
from dagrl.model_files.hf_config import HfConfig, lfs_hint, read_json, token_ids

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Files that hold a tokenizer's tokens, the usual ones first."""

_CONFIG, _TEMPLATE, _MORE_TEMPLATES = "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates"
_SMALL_FILES = (_CONFIG, "special_tokens_map.json", "added_tokens.json")
_OWN_FORMATS = ("tiktoken.model", "tekken.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
_SPECIAL = ("eos_token", "bos_token", "pad_token", "unk_token")
_GENERATION = re.compile(r"({%[-+]?\s*)(end)?generation\b")


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder has any file of a tokenizer."""
    return any((folder / name).is_file() for name in (*VOCABULARIES, *_OWN_FORMATS, _CONFIG))


def check_tokenizer(folder: Path, rows: int | None) -> None:
    """Check a folder that has a tokenizer. ValueError with the first fault, OSError if a file cannot be read.

    `rows` is the number of rows of the model's embedding, if known. Special tokens beyond them are accepted unless they
    end a text or stand in the chat template: tokenizers of Gemma's models for text have one for images.
    """
    config, _, added = [read_json(path) if (path := folder / name).is_file() else {} for name in _SMALL_FILES]
    numbers = {name: number for name, number in added.items() if type(number) is int}
    decoder = config.get("added_tokens_decoder")
    for number, token in decoder.items() if isinstance(decoder, dict) else ():
        if (content := _content(token)) is not None and str(number).isdecimal():
            numbers[content] = int(number)
    path = folder / VOCABULARIES[0]
    if path.is_file():
        own, more = _vocabulary(path)
        numbers |= more
    else:
        path, own = folder / VOCABULARIES[2], _other_formats(folder, config)
    for name in _SPECIAL:
        if config.get(name) is not None and _content(config[name]) is None:
            fact = f"{folder / _CONFIG} says {name}: {config[name]!r}, which is no token"
            raise ValueError(f"{fact}; copy the file again")
    if rows is not None:
        template = _templates(folder).get("default", "")
        written = {_content(config.get(name)) for name in _SPECIAL[:2]}
        own |= {name: number for name, number in numbers.items() if name in written or name in template}
        last = max(own, key=own.__getitem__, default=None)
        if last is not None and own[last] >= rows:
            beyond = f"{path} gives token {last!r} the number {own[last]}, and the model's embedding has {rows} rows"
            raise ValueError(f"{beyond} (vocab_size); take the model's own tokenizer")


def listed_tokens(tokenizer: Path | TokenizerSpec | None) -> Mapping[str, int] | None:
    """Map a tokenizer's tokens, including special ones, to their ids; None if no file lists them."""
    if isinstance(tokenizer, Path) and not (tokenizer.expanduser() / VOCABULARIES[0]).is_file():
        folder = tokenizer.expanduser()
        return {**_object_or_empty(folder / VOCABULARIES[2]), **_object_or_empty(folder / _SMALL_FILES[2])} or None
    try:
        return token_ids(tokenizer)
    except ValueError:
        return None  # `check_tokenizer` reports it.


def _object_or_empty(path: Path) -> HfConfig:
    """Return the JSON object in a file; empty if the file is missing or holds something else."""
    try:
        return read_json(path) if path.is_file() else {}
    except ValueError:
        return {}


def template_problem(folder: Path) -> str | None:
    """Return the reason why the folder's tokenizer cannot write a chat: no template, or one that Jinja cannot read."""
    templates = _templates(folder)
    text = templates.get("default")
    if not text:
        others = [*templates, *(["chat_template.json"] if (folder / "chat_template.json").is_file() else [])]
        return f"the tokenizer in {folder} has no chat template{f', only {others[0]}' if others else ''}"
    import jinja2

    # transformers has a tag beside Jinja's own; a condition reads alike.
    text = _GENERATION.sub(lambda tag: f"{tag[1]}{'endif' if tag[2] else 'if true'}", text)
    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except jinja2.TemplateSyntaxError as error:
        return f"the chat template in {folder} cannot be read: {error.message}, line {error.lineno}"
    return None


def _templates(folder: Path) -> dict[str, str]:
    """Return the chat templates by name, like transformers: files take precedence over tokenizer_config.json."""
    files = {"default": folder / _TEMPLATE} if (folder / _TEMPLATE).is_file() else {}
    if (folder / _MORE_TEMPLATES).is_dir():
        files |= {path.stem: path for path in sorted((folder / _MORE_TEMPLATES).glob("*.jinja"))}
    if files:
        return {name: path.read_text(encoding="utf-8", errors="replace") for name, path in files.items()}
    template = _object_or_empty(folder / _CONFIG).get("chat_template")
    if isinstance(template, list):
        pairs = [(each.get("name"), each.get("template")) for each in template if isinstance(each, dict)]
        return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
    return {"default": template} if isinstance(template, str) else {}


def _vocabulary(path: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Return the tokens of tokenizer.json with their numbers: the vocabulary, and added tokens."""
    content = read_json(path)
    model, added = content.get("model"), content.get("added_tokens")
    tokens = _listed(model.get("vocab")) if isinstance(model, dict) else None
    fault = None
    if not isinstance(model, dict) or tokens is None:
        fault = "has no vocab that lists tokens with their numbers"
    elif model.get("type") == "BPE" and not isinstance(model.get("merges"), list):
        fault = "has no list of merges beside its tokens"
    elif not isinstance(added, list) or not all(_is_added(token) for token in added):
        fault = "has no list of added_tokens with content and id"
    elif not tokens and not added:
        fault = "lists no tokens: the tokenizer is empty"
    if fault or tokens is None or not isinstance(added, list):
        raise ValueError(f"{path} {fault}; copy the file again")
    return tokens, {token["content"]: token["id"] for token in added}


def _listed(vocabulary: object) -> dict[str, int] | None:
    """Map tokens to numbers; None if they are not listed. Unigram models list pairs of token and score."""
    if isinstance(vocabulary, list):
        pairs = all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in vocabulary)
        return {pair[0]: number for number, pair in enumerate(vocabulary)} if pairs else None
    if not isinstance(vocabulary, dict) or not all(type(each) is int and each >= 0 for each in vocabulary.values()):
        return None
    return vocabulary


def _is_added(token: object) -> bool:
    return isinstance(token, dict) and isinstance(token.get("content"), str) and type(token.get("id")) is int


def _other_formats(folder: Path, config: HfConfig) -> dict[str, int]:
    """Check a folder without tokenizer.json, and return the tokens of vocab.json with their numbers."""
    model, vocabulary = folder / "tokenizer.model", folder / "vocab.json"
    if model.is_file():
        with model.open("rb") as file:
            head = file.read(64)
        # A sentencepiece model begins with its first piece, which is field 1 of a protocol buffer; a list of tiktoken's
        # with text.
        if not head or head.startswith((b"version https://git-lfs", b"{", b"<")):
            what = "no tokenizer" if head else "empty"
            raise ValueError(f"{model} is {what}; copy the file again{lfs_hint(model)}")
    elif vocabulary.is_file():
        if not (tokens := _listed(read_json(vocabulary))):
            raise ValueError(f"{vocabulary} lists no tokens; copy the file again")
        if not (folder / "merges.txt").is_file():
            raise ValueError(f"{folder} has vocab.json and no merges.txt, which belongs to it; copy it there")
        return tokens
    elif not any((folder / name).is_file() for name in _OWN_FORMATS) and not config.get("auto_map"):
        names = f"{VOCABULARIES[0]}, {VOCABULARIES[1]}"
        raise ValueError(f"{folder} has {_CONFIG} and no tokens ({names}); copy them there")
    return {}


def _content(token: object) -> str | None:
    """Return the text of a special token, which is text or an object in a config."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None
