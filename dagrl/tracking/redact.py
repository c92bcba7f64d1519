"""Hides passwords, tokens and keys in a pipeline's configuration before it is sent to a tracker."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

HIDDEN = "***"
_SECRET_WORDS = frozenset(
    {"apikey", "credential", "credentials", "passphrase", "passwd", "password", "passwords", "secret", "secrets"}
)
"""Last words of names of secrets. ``api_key_env`` names an environment variable and is not one."""
_KEYS_TO = frozenset({"access", "account", "api", "auth", "license", "private", "secret", "service"})
"""Words before ``key`` that make it a secret; ``prompt_key`` is a column's name."""
_TOKENS_OF_TEXT = frozenset(
    {"bos", "cls", "end", "eos", "image", "mask", "pad", "sep", "start", "stop", "unk", "video"}
)
"""Words before ``token`` that make it a token of a vocabulary."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE)
_KNOWN_FORMS = re.compile(r"\b(?:sk-[\w-]{16,}|hf_\w{16,}|gh[pousr]_\w{16,}|AKIA[0-9A-Z]{16}|Bearer\s+\S{8,})")
"""Keys with a recognisable form: OpenAI's and similar, Hugging Face's, GitHub's, AWS's, headers."""


def without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """A pipeline's configuration with `HIDDEN` in place of likely secrets.

    Hidden are texts under a key whose last word is that of a secret (``api_key``, ``dbPassword``) and, in any text, the
    password and such parameters of a URL and keys of well-known forms.
    """
    return _cleaned_mapping(config, secret=False)


def _cleaned_mapping(config: Mapping[str, Any], *, secret: bool) -> dict[str, Any]:
    return {key: _cleaned(value, secret=secret or _is_secret(str(key))) for key, value in config.items()}


def _cleaned(value: Any, *, secret: bool) -> Any:
    if isinstance(value, Mapping):
        return _cleaned_mapping(value, secret=secret)
    if isinstance(value, list | tuple):
        return [_cleaned(each, secret=secret) for each in value]
    if isinstance(value, str):
        return HIDDEN if secret and value else _KNOWN_FORMS.sub(HIDDEN, _URL.sub(_cleaned_url, value))
    return value


def _is_secret(name: str) -> bool:
    *before, last = ["", *(word.lower() for word in _WORD.findall(name))]
    match last:
        case "key" | "keys":
            return before[-1] in _KEYS_TO
        case "token":
            return before[-1] not in _TOKENS_OF_TEXT
    return last in _SECRET_WORDS


def _cleaned_url(found: re.Match[str]) -> str:
    try:
        parts = urlsplit(found[0])
        user, at, host = parts.netloc.rpartition("@")
        netloc = f"{user.partition(':')[0]}:{HIDDEN}{at}{host}" if ":" in user else parts.netloc
        query = parts.query
        if any(_is_secret(name) for name, _ in parse_qsl(query)):
            pairs = [(name, HIDDEN if _is_secret(name) else value) for name, value in parse_qsl(query)]
            query = urlencode(pairs, safe="*")
    except ValueError:
        return found[0]
    return urlunsplit(parts._replace(netloc=netloc, query=query))
