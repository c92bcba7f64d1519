"""A tokenizer's folder: files that can be read, tokens that the embedding has rows for, a chat template that parses.

Small files only; transformers, which loads them, would take seconds to import.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dagrl.models.safetensors_header import LFS
from dagrl.validation.json_files import json_object

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Files that hold a tokenizer's tokens, the usual ones first."""

_CONFIG, _TEMPLATE, _MORE_TEMPLATES = "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates"
_SMALL_FILES = (_CONFIG, "special_tokens_map.json", "added_tokens.json")
_OWN_FORMATS = ("tiktoken.model", "tekken.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
_SPECIAL = ("eos_token", "bos_token", "pad_token", "unk_token")
_KINDS = ("BPE", "Unigram", "WordLevel", "WordPiece")
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes without special tokens of their own."""


def has_tokenizer(folder: Path) -> bool:
    """Whether there is any of the files that a tokenizer is made of."""
    return any((folder / name).is_file() for name in (*VOCABULARIES, *_OWN_FORMATS, _CONFIG))


def tokenizer_problems(folder: Path, rows: int | None) -> Iterator[str]:
    """Faults of a folder that has a tokenizer. OSError if a file cannot be read.

    `rows` are those of the model's embedding, where they are known.
    """
    for name in _SMALL_FILES:
        if (folder / name).is_file() and json_object(folder / name) is None:
            yield f"{folder / name} is not a JSON object; copy the file again"
            return
    config = json_object(folder / _CONFIG) if (folder / _CONFIG).is_file() else {}
    assert config is not None
    if (folder / "tokenizer.json").is_file():
        problem = _vocabulary_problem(folder / "tokenizer.json", config, rows)
    else:
        problem = _other_problem(folder, config)
    if problem := problem or _config_problem(folder / _CONFIG, config):
        yield problem


def has_end_token(folder: Path) -> bool:
    """Whether the tokenizer can have a token that ends a response."""
    config = json_object(folder / _CONFIG) if (folder / _CONFIG).is_file() else None
    if config is None:
        return True  # Its class may have one.
    named = config if "eos_token" in config else _object_or_empty(folder / "special_tokens_map.json")
    if "eos_token" in named:
        return named["eos_token"] is not None
    return config.get("tokenizer_class") not in _GENERIC_CLASSES


def _object_or_empty(path: Path) -> Mapping[str, Any]:
    """The content of a file; empty where there is none, or no JSON object."""
    return (json_object(path) if path.is_file() else None) or {}


def template_problem(folder: Path) -> str | None:
    """Why the folder's tokenizer cannot write a chat: no template, or one that Jinja cannot read."""
    templates = _templates(folder)
    text = templates.get("default")
    if not text:
        others = [*templates, *(["chat_template.json"] if (folder / "chat_template.json").is_file() else [])]
        return f"the tokenizer in {folder} has no chat template{f', only {others[0]}' if others else ''}"
    import jinja2

    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols", _generation_tag()]).parse(text)
    except jinja2.TemplateSyntaxError as error:
        return f"the chat template in {folder} cannot be read: {error.message}, line {error.lineno}"
    return None


def _templates(folder: Path) -> dict[str, str]:
    """The chat templates by name, as transformers finds them: files go before tokenizer_config.json."""
    files = {"default": folder / _TEMPLATE} if (folder / _TEMPLATE).is_file() else {}
    if (folder / _MORE_TEMPLATES).is_dir():
        files |= {path.stem: path for path in sorted((folder / _MORE_TEMPLATES).glob("*.jinja"))}
    if files:
        return {name: path.read_text(encoding="utf-8", errors="replace") for name, path in files.items()}
    told = _object_or_empty(folder / _CONFIG).get("chat_template")
    if isinstance(told, list):
        pairs = [(each.get("name"), each.get("template")) for each in told if isinstance(each, dict)]
        return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
    return {"default": told} if isinstance(told, str) else {}


def _generation_tag() -> Any:
    """The tag that templates of transformers may have beside Jinja's own."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


def _vocabulary_problem(path: Path, config: Mapping[str, Any], rows: int | None) -> str | None:
    content = json_object(path)
    if content is None:
        return f"{path} is not a JSON object; copy the file again{LFS}"
    model, added = content.get("model"), content.get("added_tokens")
    kind = model.get("type") if isinstance(model, dict) else None
    if not isinstance(model, dict) or (kind is not None and kind not in _KINDS):
        said = f"a model of type {kind!r}" if isinstance(model, dict) else "no model"
        return f"{path} has {said}, where the tokens would be listed; copy the file again"
    vocabulary = model.get("vocab")
    tokens = _listed(vocabulary)
    if tokens is None or (kind is not None and isinstance(vocabulary, list) != (kind == "Unigram")):
        return f"{path} has a vocab that does not list tokens with their numbers; copy the file again"
    if kind == "BPE" and not isinstance(model.get("merges"), list):
        return f"{path} has no list of merges beside its tokens; copy the file again"
    if not isinstance(added, list) or not all(_is_added(token) for token in added):
        return f"{path} has no list of added_tokens with content and id; copy the file again"
    if not tokens and not added:
        return f"{path} lists no tokens: the tokenizer is empty; copy the file again"
    if rows is None:
        return None
    if tokens and (most := max(tokens.values())) >= rows:
        return _too_many(path, next(token for token, number in tokens.items() if number == most), most, rows)
    special = {_content(config.get(name)) for name in _SPECIAL[:2]}
    beyond = next((token for token in added if token["content"] in special and token["id"] >= rows), None)
    return _too_many(path, beyond["content"], beyond["id"], rows) if beyond else None


def _too_many(path: Path, token: str, number: int, rows: int) -> str:
    what = f"{path} gives token {token!r} the number {number}, and the model's embedding has {rows} rows (vocab_size)"
    return f"{what}; take the model's own tokenizer"


def _listed(vocabulary: Any) -> dict[str, int] | None:
    """Token -> number; None where the vocabulary is no list of them. Unigram models list pairs of token and score."""
    if isinstance(vocabulary, list):
        pairs = all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in vocabulary)
        return {pair[0]: number for number, pair in enumerate(vocabulary)} if pairs else None
    if not isinstance(vocabulary, dict) or not all(type(each) is int and each >= 0 for each in vocabulary.values()):
        return None
    return vocabulary


def _is_added(token: Any) -> bool:
    return isinstance(token, dict) and isinstance(token.get("content"), str) and type(token.get("id")) is int


def _other_problem(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Faults of a folder that has no tokenizer.json."""
    model, vocabulary = folder / "tokenizer.model", folder / "vocab.json"
    if model.is_file():
        with model.open("rb") as file:
            head = file.read(64)
        # A sentencepiece model begins with its first piece, which is field 1 of a protocol buffer; a list of tiktoken's
        # with text.
        if not head or head.startswith((b"version https://git-lfs", b"{", b"<")):
            return f"{model} is {'no tokenizer' if head else 'empty'}; copy the file again{LFS}"
        return None
    if vocabulary.is_file():
        if not json_object(vocabulary):
            return f"{vocabulary} lists no tokens; copy the file again{LFS}"
        if not (folder / "merges.txt").is_file():
            return f"{folder} has vocab.json and no merges.txt, which belongs to it; copy it there"
        return None
    if any((folder / name).is_file() for name in _OWN_FORMATS) or config.get("auto_map"):
        return None
    return f"{folder} has {_CONFIG} and no tokens ({VOCABULARIES[0]}, {VOCABULARIES[1]}); copy them there"


def _config_problem(path: Path, config: Mapping[str, Any]) -> str | None:
    for name in _SPECIAL:
        if config.get(name) is not None and _content(config[name]) is None:
            return f"{path} says {name}: {config[name]!r}, which is no token; copy the file again"
    kind = config.get("tokenizer_class")
    if kind is not None and not isinstance(kind, str):
        return f"{path} says tokenizer_class: {kind!r}, which is no name; copy the file again"
    return None


def _content(token: Any) -> str | None:
    """The text of a special token, which a config has as text or as an object."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None
