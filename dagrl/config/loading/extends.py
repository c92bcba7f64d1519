"""Merges a pipeline file with the files that it extends, and keeps the file and line of every key.

- ``extends: NAME`` takes ``NAME.yaml`` beside the file, in its ``dag_templates/`` or in dagrl's own;
  ``extends: some/path.yaml`` is relative to the file.
- ``extends: [NAME, NAME]`` merges several in this order, and then the file itself. A file that two of them extend is
  merged once, below both.
- Mappings merge key by key; lists and single values replace inherited ones; ``key: null`` removes an inherited key.
  In ``data.train`` and ``data.val``, names of sources replace a single source, and it replaces them.
  A node with another ``fn`` inherits no ``args``, because these belong to the function.
  In a model's ``init`` a null that removes nothing is a value, as in Hugging Face's configs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from dagrl.config.errors import PipelineError, Place, Problem, dotted, shown, suggest
from dagrl.config.loading.positions import Position
from dagrl.config.loading.yaml_source import MOST_FILES, Allowance, Document, Tree, read_document, why_no_file
from dagrl.config.schema.data import is_one_source
from dagrl.resources import OWN_TEMPLATES


def read_with_parents(path: Path, allowance: Allowance | None = None) -> Document:
    """Read a pipeline file and the files that it extends. PipelineError if one of them cannot be read at all."""
    if not path.name.endswith((".yaml", ".yml")) and not os.path.lexists(str(path).replace("\0", "")):
        own = OWN_TEMPLATES / f"{str(path)[:100]}.yaml"
        if "=" in str(path) or own.is_file():
            remedy = "the pipeline file comes first, then KEY=VALUE" if "=" in str(path) else f"the template is {own}"
            raise PipelineError([Problem(str(path), 1, "file", f"does not exist; {remedy}", "unreadable-file")])
    layers: dict[str, Document] = {}
    _add_layers(path, {}, layers, allowance or Allowance())
    bottom, *others = layers.values()
    for layer in others:
        _merge(bottom, layer, bottom.tree, layer.tree, ())
        bottom.positions[()] = layer.positions[()]
        bottom.problems += layer.problems
        bottom.broken |= layer.broken
    return bottom


def forget(positions: dict[Place, Position], place: Place, value: object) -> None:
    """Drop the positions of a place and of everything in its value."""
    positions.pop(place, None)
    for key, inner in _entries(value):
        forget(positions, (*place, key), inner)


def _entries(value: object) -> Iterable[tuple[str | int, object]]:
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list) else ()


def expanded(path: str) -> Path:
    """A path with ``~`` expanded."""
    return Path(path).expanduser() if path == "~" or path.startswith("~/") else Path(path)


def takes_away(value: object, place: Place) -> bool:
    """Whether a null removes the value at `place` at once. Elsewhere nulls are removed at the end."""
    return value is None and any(keeps_nulls(place[:depth]) for depth in range(len(place)))


def keeps_nulls(place: Place) -> bool:
    """Whether null is a value in the section at `place`: the ``init`` of the model or of an engine's model."""
    return place == ("model", "init") or (len(place) == 4 and place[0] == "engines" and place[2:] == ("model", "init"))


def forget_args(document: Document, node: Tree, place: Place, function: object) -> None:
    """Remove the `args` at `place`, a node or its section for a source, if another function replaces its own."""
    has_function = len(place) == 2 or (len(place) == 4 and place[2] == "by_source")
    if has_function and place[0] == "nodes" and node.get("fn", function) != function and "args" in node:
        forget(document.positions, (*place, "args"), node.pop("args"))


def _add_layers(path: Path, children: dict[str, Path], layers: dict[str, Document], allowance: Allowance) -> None:
    """Append a file after the files that it extends, each real path once."""
    real = _real(path)
    if real in layers:
        return
    document = read_document(path, allowance)
    family = children | {real: path}
    for place, parent in _parents(document):
        try:
            found = _find_parent(parent, path)
            if _real(found) in family:
                circle = " -> ".join(str(member) for member in (*family.values(), found))
                raise ValueError(f"the files extend each other in a circle ({circle}); remove one `extends`")
            if len(layers) + len(family) >= MOST_FILES:
                raise ValueError(f"a pipeline may extend {MOST_FILES - 1} files; put some of them into one")
        except (ValueError, OSError) as error:
            message = str(error)
            if isinstance(error, OSError):  # An example is a name that is too long.
                message = f"{shown(parent)} cannot be read: {error.strerror}; check the path"
            position = document.positions[place]
            document.problems.append(Problem(position.file, position.line, dotted(place), message, "unknown-template"))
            document.broken.add(())  # A missing key may be inherited.
        else:
            _add_layers(found, family, layers, allowance)
    layers[real] = document


def _real(path: Path) -> str:
    """The path without links. Unlike `Path.resolve`, it accepts circular links, which reading then reports."""
    return os.path.realpath(str(path).replace("\0", ""))


def _parents(document: Document) -> list[tuple[Place, object]]:
    """Remove ``extends`` from a document; its entries and their places."""
    if "extends" not in document.tree:
        return []
    extended = document.tree.pop("extends")
    if ("extends",) in document.broken:
        document.broken.add(())
        return []
    if not isinstance(extended, list) or not extended:
        return [(("extends",), extended)]
    if len(extended) > MOST_FILES:
        position = document.positions["extends",]
        message = f"extends {len(extended):,} files, of which {MOST_FILES} are the most; put some of them into one"
        raise PipelineError([Problem(position.file, position.line, "extends", message, "too-large")])
    entries: list[tuple[Place, object]] = [(("extends", index), parent) for index, parent in enumerate(extended)]
    return [(place, parent) for place, parent in entries if place not in document.broken]


def _find_parent(parent: object, path: Path) -> Path:
    if not isinstance(parent, str) or not parent:
        message = f"expected a template's name or a file's path, got {shown(parent)}"
        raise ValueError(f"{message}; write `extends: NAME`, or `extends: [NAME, NAME]`")
    if "/" in parent or parent.endswith((".yaml", ".yml")):
        found = path.parent / expanded(parent)
        if not os.path.lexists(found):
            raise ValueError(f"there is no file {found}; check the path, which is relative to {path.parent}")
        if why := why_no_file(found):
            raise ValueError(f"{found} {why}")
        return found
    folders = [path.parent, path.parent / "dag_templates", OWN_TEMPLATES]
    for folder in folders:
        found = folder / f"{parent}.yaml"
        # A file may extend the template that it is named after.
        if found.is_file() and not (folder == path.parent and _real(found) == _real(path)):
            return found
    known = {found.stem for folder in folders[1:] for found in folder.glob("*.yaml")}
    raise ValueError(f"there is no template `{parent}`; {suggest(parent, sorted(known))}")


def _merge(into: Document, source: Document, old: Tree, new: Tree, place: Place) -> None:
    if "fn" in new:
        forget_args(into, old, place, new["fn"])
    for key, value in new.items():
        inner = (*place, key)
        if isinstance(value, dict) and isinstance(old.get(key), dict) and _are_alike(inner, old[key], value):
            into.positions[inner] = source.positions[inner]
            _merge(into, source, old[key], value, inner)
            continue
        if key in old:
            forget(into.positions, inner, old[key])
        if takes_away(value, inner) and key in old:
            del old[key]
        else:
            _copy_positions(into, source, inner, value)
            old[key] = value


def _are_alike(place: Place, old: Tree, new: Tree) -> bool:
    """Whether two mappings can be merged: names of sources replace a source, and a source replaces names."""
    return place not in (("data", "train"), ("data", "val")) or is_one_source(old) == is_one_source(new)


def _copy_positions(into: Document, source: Document, place: Place, value: object) -> None:
    into.positions[place] = source.positions[place]
    for key, inner in _entries(value):
        _copy_positions(into, source, (*place, key), inner)
