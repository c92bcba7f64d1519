"""Pydantic's errors in the words of people who write pipeline files: the place, what is wrong, what to do.

`load.py` gives it what pydantic said and the tree that it said it about.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from dagrl.config.errors import Place, nearest, shown, suggest
from dagrl.config.schema import CustomNode, Pipeline, Section

MOST_FAULTS = 100
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "text",
    "dict": "a mapping",
    "model": "a mapping",
    "tuple": "a list",
    "list": "a list",
}
_REMEDIES = {
    "a whole number": "write digits without quotes",
    "a number": "write it in digits, such as 0.5 or 1e-6, without quotes",
    "a finite number": "write it in digits, such as 0.5 or 1e-6",
    "true or false": "write `true` or `false` without quotes",
    "text": "write a word, or text in quotes",
    "a mapping": "write `key: value` lines beneath it",
    "a list": "write `[one, two]`",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
_NAME_RULE = "begin with a lower-case letter, then use lower-case letters, digits and `_`"
_PATTERN_RULES = {
    r"^[a-z][a-z0-9_]*$": _NAME_RULE,
    r"^https?://": "an address begins with http:// or https://",
    r"^[A-Za-z_][A-Za-z0-9_]*$": "it is the name of an environment variable, not what it holds",
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$": (
        "use letters, digits, `.`, `_` and `-`, at most 200 of them, and begin with a letter or digit"
    ),
    r"^[\w.]+:\w+$": "write it as `module:function`",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A place and what is wrong there."""

    place: Place
    message: str
    missing: bool = False
    meant: Place | None = None
    """The key that a misspelt one was meant to be."""


def faults_of(error: ValidationError, tree: dict[str, Any]) -> list[Fault]:
    """All that pydantic found wrong with `tree`, one fault for each place; of very many, `MOST_FAULTS` and one more."""
    by_place: dict[Place, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        by_place.setdefault(_place_of(details, tree), []).append(details)
    faults: list[Fault] = []
    for place, several in by_place.items():
        if len(faults) > MOST_FAULTS:
            break
        # A value that may be one of two types draws an error from each; where it looks like one of them and is wrong
        # within, only that one counts.
        # So does a list whose entries are wrong: pydantic counts only the right ones.
        if all(_expected(details) or details["type"] == "too_short" for details in several) and any(
            len(other) > len(place) and other[: len(place)] == place for other in by_place
        ):
            continue
        faults.append(_fault(place, several, tree))
    meant = {fault.meant for fault in faults}
    return [fault for fault in faults if not (fault.missing and fault.place in meant)]


def _place_of(details: ErrorDetails, tree: dict[str, Any]) -> Place:
    """Pydantic's location without the names of union members and the mark of a key."""
    place: list[str | int] = []
    value: Any = tree
    location = details["loc"]
    for index, key in enumerate(location):
        last = index == len(location) - 1
        if (isinstance(value, dict) and key in value) or (
            isinstance(value, list) and isinstance(key, int) and key < len(value)
        ):
            place.append(key)
            value = value[key]  # type: ignore[index]
        elif last and details["type"] == "missing" and not isinstance(value, list):
            place.append(key)
    if details["type"] == "union_tag_invalid" and isinstance(value, dict):
        place.append(_tag_key(value))
    elif details["type"] == "union_tag_not_found":
        place.append("backend")
    return tuple(place)


def _tag_key(value: dict[str, Any]) -> str:
    return "backend" if "backend" in value else "op"


def _fault(place: Place, several: list[ErrorDetails], tree: dict[str, Any]) -> Fault:
    # A mapping that may not be empty, and a number out of bounds, are closer to what was meant than any other type that
    # could stand there.
    closer = ("too_short", *_BOUNDS)
    details = next((each for each in several if each["type"] in closer), several[0])
    kind = details["type"]
    if isinstance(given := _value_at(tree, place), list) and kind in ("missing", "too_long"):
        # Of a list of fixed length, pydantic names each place where an entry is missing.
        needed = (
            details["ctx"]["max_length"] if kind == "too_long" else 1 + max(int(each["loc"][-1]) for each in several)
        )
        return Fault(place, f"expected {needed} entries, got {len(given)}; write {needed}, as `[one, two]`")
    expected = [] if kind == "too_short" else list(dict.fromkeys(filter(None, map(_expected, several))))
    if kind == "missing" or (kind.startswith("union_tag") and _value_at(tree, place) is None):
        return Fault(place, _missing(place, tree), missing=True)
    if kind == "extra_forbidden":
        known = fields_at(place[:-1], tree)
        near = nearest(str(place[-1]), known)
        message = f"unknown key `{place[-1]}`; {suggest(str(place[-1]), known)}"
        if place[-1] in keys_anywhere(place[:-1]):
            message = f"is for other kinds of {place[0]}; take it out"
        elif reason := _refusal(place, tree):
            return Fault(place, reason)
        return Fault(place, message, meant=(*place[:-1], near) if near else None)
    if kind == "union_tag_invalid":
        return Fault(place, _unknown_tag(details, place, tree))
    if kind == "literal_error" and not expected:
        options = _literal_options(details)
        may_be_own = any(each["type"] == "string_pattern_mismatch" for each in several)
        own = " (your own is written `module:function`)" if may_be_own else ""
        remedy = suggest(str(details["input"]), options)
        return Fault(place, f"{shown(details['input'])} is not known here{own}; {remedy}")
    if expected:
        got = shown(several[-1]["input"])
        literals = [option for each in several if each["type"] == "literal_error" for option in _literal_options(each)]
        wanted = " or ".join([*(f"`{option}`" for option in literals), *expected])
        remedy = _REMEDIES[expected[0]] if len(expected) + len(literals) == 1 else "write one of these"
        return Fault(place, f"expected {wanted}, got {got}; {remedy}")
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        limit = f"{words} {_number(details['ctx'][bound])}"
        return Fault(place, f"must be {limit}, got {shown(details['input'])}; choose a number that is {limit}")
    if kind == "string_pattern_mismatch":
        rule = _PATTERN_RULES[details["ctx"]["pattern"]]
        return Fault(place, f"{shown(details['input'])} is not a name that can stand here; {rule}")
    if kind == "too_short":
        return Fault(place, "is empty; it needs at least one entry")
    return Fault(place, f"{shown(details['input'])} cannot stand here; {details['msg'].lower()}")


def _refusal(place: Place, tree: dict[str, Any]) -> str | None:
    """Why a key is not there that many would look for, where its section knows it."""
    section = _section_at(place[:-1], tree)
    return section.refused.get(str(place[-1])) if section else None


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _expected(details: ErrorDetails) -> str | None:
    stem, _, what = details["type"].partition("_")
    return _KINDS.get(stem) if what in ("type", "parsing", "from_float", "attributes_type", "number") else None


def _missing(place: Place, tree: dict[str, Any]) -> str:
    if len(place) == 3 and place[-1] in ("op", "backend"):
        return f"the key is missing; add `{place[-1]}:`, or {_instead(place, tree)}"
    field = fields_at(place[:-1], tree).get(str(place[-1]))
    meaning = " ".join((field.description or "").split()).partition(". ")[0].rstrip(".") if field else ""
    if meaning[1:2].islower():  # else: an abbreviation, such as GPUs
        meaning = meaning[0].lower() + meaning[1:]
    return f"the key is missing; add `{place[-1]}:`" + (f" ({meaning})" if meaning else "")


def _instead(place: Place, tree: dict[str, Any]) -> str:
    """What may have been meant by a node or an engine that does not say its kind: often another's name, misspelt."""
    section, name = str(place[0]), str(place[1])
    others = [other for other, value in tree[section].items() if isinstance(value, dict) and place[-1] in value]
    near = nearest(name, others)
    return f"say `{near}` if you mean that" if near else f"take `{name}` out"


def _unknown_tag(details: ErrorDetails, place: Place, tree: dict[str, Any]) -> str:
    value = _value_at(tree, place)
    if not isinstance(details["input"], dict):
        return f"expected a mapping, got {shown(value)}; {_REMEDIES['a mapping']}"
    known = [tag.strip(" '") for tag in details["ctx"]["expected_tags"].split(",")]
    remedy = suggest(str(value), [tag for tag in known if tag != "custom"])
    own = " (your own op is written `module:function`)" if "custom" in known else ""
    return f"{shown(value)} is not a known {place[-1]}{own}; {remedy}"


def _literal_options(details: ErrorDetails) -> list[str]:
    return [option.strip(" '") for option in details["ctx"]["expected"].replace(" or ", ",").split(",")]


def _value_at(tree: Any, place: Place) -> Any:
    for key in place:
        if isinstance(tree, dict):
            tree = tree.get(key)
        elif isinstance(tree, list) and isinstance(key, int):
            tree = tree[key]
    return tree


def fields_at(place: Place, tree: dict[str, Any]) -> dict[str, FieldInfo]:
    """The fields of the section at `place`; none where no section of fixed keys stands there."""
    section = _section_at(place, tree)
    return section.model_fields if section else {}


def _section_at(place: Place, tree: dict[str, Any]) -> type[Section] | None:
    kinds: list[Any] = [Pipeline]
    value: Any = tree
    for key in place:
        value = value.get(key) if isinstance(value, dict) else None
        kinds = _chosen(_below(kinds, key), value)
    sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
    return sections[0] if len(sections) == 1 else None


def keys_anywhere(place: Place) -> list[str]:
    """The keys of all sections that could stand at `place`, whatever `backend` or `op` says; none of free names."""
    kinds: list[Any] = [Pipeline]
    for key in place:
        kinds = _below(kinds, key)
    if any(get_origin(kind) is dict for kind in kinds):
        return []
    sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
    return list(dict.fromkeys(name for section in sections for name in section.model_fields))


def _below(kinds: list[Any], key: str | int) -> list[Any]:
    """The types that the value of `key` can have in a value of one of these types."""
    inner: list[Any] = []
    for kind in kinds:
        if get_origin(kind) is dict:
            inner += _members(get_args(kind)[1])
        elif isinstance(kind, type) and issubclass(kind, Section) and key in kind.model_fields:
            inner += _members(kind.model_fields[str(key)].annotation)
    return inner


def _members(annotation: Any) -> list[Any]:
    """The types that a union, annotated or not, is made of."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (None, dict, tuple, list, Literal):
        return [annotation]
    return [member for argument in get_args(annotation) for member in _members(argument)]


def _chosen(kinds: list[Any], value: Any) -> list[Any]:
    """Of several sections, the one that the value's `backend` or `op` names."""
    sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
    if len(sections) < 2 or not isinstance(value, dict):
        return kinds
    tag = value.get(_tag_key(value))
    if isinstance(tag, str) and ":" in tag:
        return [CustomNode]
    return [
        section
        for section in sections
        for field in (section.model_fields.get("backend") or section.model_fields["op"],)
        if tag in get_args(field.annotation)
    ]
