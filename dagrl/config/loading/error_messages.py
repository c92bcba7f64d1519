"""Turns pydantic's errors into faults with a place; unknown and missing keys get a suggestion."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from typing_extensions import TypeIs

from dagrl.config.errors import Place, nearest, removal, shown, suggest
from dagrl.config.loading.yaml_source import Tree
from dagrl.config.schema import Pipeline, Section
from dagrl.config.schema.data import is_one_source
from dagrl.config.schema.library_fields import LibraryFields, meant_fields

MOST_FAULTS = 100
_YAML_WORDS = {
    **dict.fromkeys(("an object", "a valid dictionary"), "a mapping"),
    "a valid array": "a list",
    "a valid string": "text",
    "a valid boolean": "true or false",
    "a valid integer": "an integer",
    "a valid number": "a number",
}
"""Pydantic's words for JSON -> the words for YAML."""
_NO_OPTION = ("literal_error", "string_pattern_mismatch", "string_type", "model_type", "model_attributes_type")
"""Errors of a value that is neither one of the options nor ``module:function``."""
_OWN = " (write your own as `module:function`)"


@dataclass(frozen=True, slots=True)
class Fault:
    """A place and the problem there."""

    place: Place
    code: str
    message: str
    meant: Place | None = None
    """The key that a misspelt one most likely stands for."""
    chosen_by: Place | None = None
    """The ``backend`` or ``op`` that makes this the wrong key, if other kinds of the section have it."""


def faults_of(error: ValidationError, tree: Tree) -> list[Fault]:
    """Everything that pydantic reports about `tree`, one fault for each place; at most `MOST_FAULTS` and one more."""
    by_place: dict[Place, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        by_place.setdefault(_place_of(details, tree), []).append(details)
    # Every type of a union reports an error. The one that the value resembles reports it for a place inside the value.
    around = {place[:depth] for place in by_place for depth in range(len(place))}
    places = [place for place in by_place if place not in around][: MOST_FAULTS + 1]
    faults = [_fault(place, by_place[place], tree) for place in places]
    meant = {fault.meant for fault in faults}
    return [fault for fault in faults if not (fault.code == "missing-key" and fault.place in meant)]


def _place_of(details: ErrorDetails, tree: Tree) -> Place:
    """Pydantic's location without the names of union members."""
    place: list[str | int] = []
    value: Any = tree
    for key in details["loc"]:
        if isinstance(value, dict) and key in value:
            value = value[str(key)]
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            value = value[key]
        else:
            continue
        place.append(key)
    of_default = details["type"] == "value_error" and not isinstance(details["input"], dict)
    if (details["type"] == "missing" or of_default) and isinstance(value, dict):
        place.append(details["loc"][-1])
    elif details["type"].startswith("union_tag") and isinstance(value, dict):
        place.append("backend" if place[:1] == ["engines"] else "op")
    return tuple(place)


def _fault(place: Place, several: list[ErrorDetails], tree: Tree) -> Fault:
    details, key, value = several[0], str(place[-1]), value_at(tree, place)
    match details["type"]:
        case "extra_forbidden":
            return _unknown_key(place, tree)
        case "missing" if not isinstance(value, list):
            return Fault(place, "missing-key", f"the key is missing; add `{key}:`")
        case "union_tag_not_found" | "union_tag_invalid" if isinstance(details["input"], dict):
            if value is None:
                return Fault(place, "missing-key", f"the key is missing; add `{key}:`, or {_instead(place, tree)}")
            tags = [tag.strip(" '") for tag in details["ctx"]["expected_tags"].split(",")]
            own = _OWN if "custom" in tags else ""
            remedy = suggest(str(value), [tag for tag in tags if tag != "custom"])
            return Fault(place, f"unknown-{key}", f"there is no {key} {shown(value)}{own}; {remedy}")
        case "literal_error" if all(item["type"] in _NO_OPTION for item in several) and not isinstance(
            details["input"], dict
        ):
            options = [option.strip(" '") for option in details["ctx"]["expected"].replace(" or ", ",").split(",")]
            own = _OWN if len(several) > 1 else ""
            given = details["input"]
            message = f"{shown(given)} is not one of the options{own}; {suggest(str(given), options)}"
            return Fault(place, "unknown-option", message)
        case "string_pattern_mismatch" if details["loc"][-1] == "[key]":
            rule = "begin with a lower-case letter, then use lower-case letters, digits and _"
            return Fault(place, "invalid-name", f"{key!r} is not a name; {rule}")
        case "value_error":
            # A missing value is an error of its default.
            return Fault(place, "missing-key" if value is None else "invalid-value", str(details["ctx"]["error"]))
    wanted = " or ".join(dict.fromkeys(_wanted(item) for item in several)).replace(" or be ", " or ")
    return Fault(place, "invalid-value", f"got {shown(value)}; it must {wanted}")


def _wanted(details: ErrorDetails) -> str:
    if details["type"] == "missing":
        return "have another item"
    if details["type"].startswith(("union_tag", "model_attributes")):
        return "be a mapping"
    wanted = re.sub(r"^\w+ should ", "", details["msg"]).replace(" after validation", "")
    for words, in_yaml in _YAML_WORDS.items():
        wanted = wanted.replace(words, in_yaml)
    return wanted


def _unknown_key(place: Place, tree: Tree) -> Fault:
    key = str(place[-1])
    sections = _sections_at(place[:-1], tree)
    known = [name for section in sections for name in section.model_fields]
    for section in sections:
        if reason := section.refused.get(key):
            return Fault(place, "refused-key", reason)
    if key in known_keys(place[:-1]):
        tag = (*place[:-1], "backend" if place[0] == "engines" else "op")
        return Fault(place, "unknown-key", removal(f"`{key}` belongs to other kinds of {place[0]}"), chosen_by=tag)
    for section in sections:
        if issubclass(section, LibraryFields):
            meant = meant_fields(section, key)
            other = f", or {meant}" if meant else ""
            message = f"not tested with dagrl; put it under `extra: {{{place[-2]}: {{{key}: ...}}}}`{other}"
            if key in section.called_elsewhere:
                message = f"it has another name here; {meant}"
            return Fault(place, "untested-field", message)
    near = nearest(key, known)
    return Fault(place, "unknown-key", f"unknown key `{key}`; {suggest(key, known)}", (*place[:-1], near or ""))


def _instead(place: Place, tree: Tree) -> str:
    """The remedy for an incomplete node or engine: often it is a misspelt name of an inherited one."""
    section, name = str(place[0]), str(place[1])
    others = [other for other, value in tree[section].items() if isinstance(value, dict) and place[-1] in value]
    near = nearest(name, others)
    return f"rename `{name}` to `{near}`" if near else f"remove `{name}`"


def value_at(tree: Any, place: Place) -> Any:
    """The value at a place; None if the place does not exist."""
    for key in place:
        if isinstance(tree, list) and isinstance(key, int):
            tree = tree[key]
        else:
            tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def known_keys(place: Place) -> list[str]:
    """Keys of all kinds of sections that can stand at `place`; none if any name is allowed there."""
    return list(dict.fromkeys(name for section in _sections_at(place) for name in section.model_fields))


def keys_below(place: Place, tree: Tree) -> dict[str, bool]:
    """Keys of the section at `place`, of the kind that `tree` names there, and whether each is a section."""
    return {
        name: any(_is_section(kind) or get_origin(kind) is dict for kind in _members(field.annotation))
        for section in _sections_at(place, tree)
        for name, field in section.model_fields.items()
    }


def _sections_at(place: Place, tree: Tree | None = None) -> list[type[Section]]:
    """Sections that can stand at `place`, reduced to the kinds that `op` and `backend` name in `tree`."""
    kinds: list[object] = [Pipeline]
    for depth, key in enumerate(place, start=1):
        kinds = [inner for kind in kinds for inner in _below(kind, key)]
        if tree is not None and len(kinds) > 1 and isinstance(value := value_at(tree, place[:depth]), dict):
            if any(get_origin(kind) is dict for kind in kinds) and is_one_source(value):
                kinds = [kind for kind in kinds if get_origin(kind) is not dict]
            kinds = [kind for kind in kinds if _has_tag(kind, value)] or kinds
    return [] if any(get_origin(kind) is dict for kind in kinds) else [kind for kind in kinds if _is_section(kind)]


def _is_section(kind: object) -> TypeIs[type[Section]]:
    return isinstance(kind, type) and issubclass(kind, Section)


def _below(kind: object, key: str | int) -> Iterator[object]:
    """The types of the value that `key` has in a value of type `kind`."""
    if get_origin(kind) is dict:
        yield from _members(get_args(kind)[1])
    elif get_origin(kind) is tuple and isinstance(key, int):
        yield from _members(get_args(kind)[0])
    elif _is_section(kind) and key in kind.model_fields:
        yield from _members(kind.model_fields[str(key)].annotation)


def _members(annotation: object) -> Iterator[object]:
    """The types of a union, annotated or not."""
    if get_origin(annotation) is Annotated:
        yield from _members(get_args(annotation)[0])
    elif get_origin(annotation) in (None, dict, tuple, list, Literal):
        yield annotation
    else:
        for argument in get_args(annotation):
            yield from _members(argument)


def _has_tag(kind: object, value: Tree) -> bool:
    fields = kind.model_fields if _is_section(kind) else {}
    tags = [get_args(fields[key].annotation) for key in ("backend", "op") if key in fields]
    given = value.get("backend", value.get("op"))
    return any(given in tag or (not tag and ":" in str(given)) for tag in tags)
