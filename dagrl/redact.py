"""Recognises passwords, tokens and keys, and hides them in output, in shared files and from trackers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

HIDDEN = "***"
_ENVIRONMENTS = frozenset({"env", "environ", "env_vars"})
"""Sections with the variables of a program: all of their values are hidden."""
_SECRET_WORDS = frozenset(
    {
        *("apikey", "apikeys", "auth", "authorization", "authtoken", "cookie", "cookies", "credential", "credentials"),
        *("jwt", "passcode", "passphrase", "passwd", "password", "passwords", "secret", "secrets", "sig", "signature"),
    }
)
"""Last words of names of secrets. ``api_key_env`` names an environment variable and is not one."""
_SECRET_ENDS = ("apikey", "passphrase", "passwd", "password", "secret")
"""Ends of such words that are written without a break, as in ``PGPASSWORD``."""
_KEYS_TO = frozenset(
    {
        *("access", "account", "api", "app", "auth", "deploy", "encryption", "license", "master", "private", "secret"),
        *("service", "session", "shared", "signing", "ssh", "storage", "subscription", "wandb", "webhook"),
    }
)
"""Words before ``key`` that make it a secret; ``prompt_key`` is a column's name."""
_TOKENS_OF_TEXT = frozenset(
    {"bos", "cls", "end", "eos", "image", "mask", "next", "pad", "per", "sep", "start", "stop", "unk", "video"}
)
"""Words before ``token`` that make it a token of a vocabulary."""
_TOKENS_TO = frozenset({"access", "api", "auth", "bearer", "refresh"})
"""Words before ``tokens`` that make them secrets; ``max_prompt_tokens`` is a number."""
_GENERIC = frozenset({"auth", "key", "secret", "sig", "signature", "token"})
"""Words that prose puts before a colon, too."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_URL = re.compile(r"[a-z][a-z0-9+.-]{0,30}://\S+", re.IGNORECASE)
_HEADER = re.compile(r"""\b((?:(?:proxy-)?authorization|(?:set-)?cookie)["']?\s*[:=]\s*["']?)[^"'\n]+""", re.IGNORECASE)
_NAME = re.compile(
    r"""(?<![\w.-])(?P<option>--?)?(?P<name>[A-Za-z_][\w.-]*+)(?P<between>["']?\s*+[=:]\s*+|(?(option)\s++(?!-)|(?!)))"""
)
"""Text before a value: ``NAME=``, ``name:`` or ``--name``."""
_VALUE = re.compile(r"""(["']?)(?:(?<=")[^"\n]*|(?<=')[^'\n]*|[^\s"',;&)}\]]+)""")
_KNOWN_FORMS = re.compile(
    r"""
    -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----.*?(?:-----END\ [A-Z ]*PRIVATE\ KEY-----|\Z)
    | \b(?:
        (?:sk|rk)[-_][\w-]{16,}  # OpenAI and many others, Stripe
        | hf_\w{16,} | gh[pousr]_\w{16,} | github_pat_\w{16,}  # Hugging Face, GitHub
        | gl(?:pat|ptt|dt|rt|cbt|ft|imt|soat|agent)-[\w.-]{16,}  # GitLab
        | (?:AKIA|ASIA)[0-9A-Z]{16} | AIza[\w-]{30,} | ya29\.[\w-]{16,}  # AWS, Google
        | xox[a-z]-[\w-]{10,} | xapp-[\w-]{10,}  # Slack
        | (?:gsk|r8|dckr_pat|wandb_v1|lsv2)_\w{16,} | npm_[A-Za-z0-9]{36} | pypi-AgE[\w-]{16,}
        | (?:xai|nvapi|tvly|pplx)-[\w-]{16,} | SG\.[\w-]{16,}[\w.-]*
        | eyJ[\w-]{8,}\.[\w-]+\.[\w-]*  # JSON web tokens
        | (?i:Bearer)\s+\S{8,}
        | (?i:Basic)\s+(?=\S*(?:[\d=+/]|[a-z][A-Z]))[\w+/=-]{8,}  # and no prose
    )
    """,
    re.VERBOSE | re.DOTALL,
)
"""Keys with a recognisable form."""
_LOGINS = ("-u", "--user", "--proxy-user")
"""Options before ``user:password``."""
_LEAST = 6
"""Characters of a secret that is looked for in texts; a shorter one may be a part of many words."""


def without_secrets(config: Mapping[str, object]) -> dict[str, Any]:
    """A pipeline's configuration with `HIDDEN` in place of likely secrets.

    Hidden are all values of a section ``env``, texts under a key whose last word is that of a secret (``api_key``,
    ``dbPassword``) or after such an option in a list (``--api-key``), and, in any text, what `hide_secrets` hides.
    """
    cleaned = _cleaned_mapping(config, secret=False)
    # A secret may also occur elsewhere, as in a command. Other values of an environment may be any words.
    known = [value for value, name in _hidden_values(config, cleaned) if not name or _is_secret(name)]
    known.sort(key=len, reverse=True)  # one may contain another
    return _without(known, cleaned)


def hide_secrets(text: str) -> str:
    """A text with `HIDDEN` in place of likely secrets.

    Hidden are the password and such parameters of a URL, values after the name of a secret (``PGPASSWORD=...``,
    ``--api-key ...``), headers that authorize, and keys of well-known forms.
    """
    text = _HEADER.sub(rf"\g<1>{HIDDEN}", _URL.sub(_cleaned_url, text))
    return _KNOWN_FORMS.sub(HIDDEN, "".join(_without_assigned(text)))


def hide_in_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command as `without_secrets` has them."""
    return [*_cleaned_items(arguments, secret=False)]


def hiding(config: Mapping[str, object]) -> Callable[[str], str]:
    """Return a `hide_secrets` that also hides the secrets of this configuration, wherever they stand in a text."""
    hidden = _hidden_values(config, _cleaned_mapping(config, secret=False))
    known = sorted({value for value, _ in hidden}, key=len, reverse=True)
    return lambda text: hide_secrets(_replaced(known, text))


def _hidden_values(before: object, after: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the secrets that a configuration had before, and the name of each in an environment."""
    if isinstance(before, Mapping):
        for key, value in before.items():
            yield from _hidden_values(value, after[key], str(key))
    elif isinstance(before, list | tuple):
        for value, cleaned in zip(before, after, strict=True):
            yield from _hidden_values(value, cleaned)
    elif isinstance(before, str) and after == HIDDEN and len(before) >= _LEAST:
        yield before, name


def _without(known: Sequence[str], config: Any) -> Any:
    if isinstance(config, Mapping):
        return {key: _without(known, value) for key, value in config.items()}
    if isinstance(config, list):
        return [_without(known, value) for value in config]
    return _replaced(known, config) if isinstance(config, str) else config


def _replaced(known: Sequence[str], text: str) -> str:
    return reduce(lambda left, value: left.replace(value, HIDDEN), known, text)


def _cleaned_mapping(config: Mapping[str, object], *, secret: bool) -> dict[str, object]:
    named = str(config.get("name", ""))  # {name: Authorization, value: ...}
    return {
        key: _cleaned(
            value,
            secret=secret
            or _is_secret(named if key == "value" else str(key))
            # `env` may also be the name of something.
            or (key in _ENVIRONMENTS and type(value) is not str),
        )
        for key, value in config.items()
    }


def _cleaned(value: object, *, secret: bool) -> object:
    if isinstance(value, Mapping):
        return _cleaned_mapping(value, secret=secret)
    if isinstance(value, list | tuple):
        return [*_cleaned_items(value, secret=secret)]
    if isinstance(value, str):
        return HIDDEN if secret and value else hide_secrets(value)
    return HIDDEN if secret and type(value) is int and value >= 10 ** (_LEAST - 1) else value


def _cleaned_items(items: Sequence[Any], *, secret: bool) -> Iterator[Any]:
    """Clean the items of a list; the item after an option of a command belongs to it, as does the value of a pair."""
    option = ""
    for item in items:
        login = option in _LOGINS and isinstance(item, str) and ":" in item
        yield _cleaned(item, secret=secret or login or _is_secret(option))
        named = isinstance(item, str) and (len(items) == 2 or item.startswith("-"))
        option = item if named and "=" not in item else ""


def _is_secret(name: str) -> bool:
    *before, last = ["", *(word.lower() for word in _WORD.findall(name))]
    around = before[-1] if before else ""
    match last:
        case "key" | "keys":
            return around in _KEYS_TO
        case "token":
            return around not in _TOKENS_OF_TEXT
        case "tokens":
            return around in _TOKENS_TO
        case "pwd":
            return around not in ("", "old")
        case "pat":
            return around in ("azure", "github", "gitlab")
    return last in _SECRET_WORDS or last.endswith(_SECRET_ENDS)


def _without_assigned(text: str) -> Iterator[str]:
    """Yield the pieces of a text, with `HIDDEN` in place of the values of secrets."""
    written = begin = 0
    while match := _NAME.search(text, begin):
        begin = match.end()
        section, _, name = match["name"].rpartition(".")
        is_prose = ":" in match["between"] and name.lower() in _GENERIC
        is_secret = _is_secret(name) or not _ENVIRONMENTS.isdisjoint(section.split("."))
        if is_secret and not is_prose and (value := _VALUE.match(text, begin)):
            yield f"{text[written:begin]}{value[1]}{HIDDEN}"
            written = begin = value.end()
    yield text[written:]


def _cleaned_url(match: re.Match[str]) -> str:
    try:
        parts = urlsplit(match[0])
        user, at, host = parts.netloc.rpartition("@")
        netloc = f"{user.partition(':')[0]}:{HIDDEN}{at}{host}" if ":" in user else parts.netloc
        query = parts.query
        secret = {name for name, _ in parse_qsl(query) if _is_secret(name) or name.lower() == "key"}
        if secret:
            pairs = [(name, HIDDEN if name in secret else value) for name, value in parse_qsl(query)]
            query = urlencode(pairs, safe="*")
    except ValueError:
        return match[0]
    if (netloc, query) == (parts.netloc, parts.query):
        return match[0]  # Joining its parts again may change it: `sqlite:////path`.
    return urlunsplit(parts._replace(netloc=netloc, query=query))
