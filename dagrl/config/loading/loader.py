"""YAML + `extends` + dotted overrides -> a `Pipeline`, with the line of everything for later messages.

- ``engines.actor.optimizer.lr=3e-6`` on the command line sets one key, its value read as YAML.
- ``prompts_per_node`` and ``mini_batch_per_node`` are multiplied by the machines of the trained group.
- Paths (``model.path``, ``model.tokenizer``, ``data.train``, ``data.val``, an engine's ``dist_checkpointing_path`` and
  own ``model``) may begin with ``~``, and are relative to the folder of the file that says them; in an override, to the
  working directory.

``yaml_source.py`` reads the files, ``extends.py`` lays them over each other, ``sentences.py`` words pydantic's errors,
``checks`` holds all further rules.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dagrl.config.errors import PipelineError, Place, Problem, dotted, suggest
from dagrl.config.loading.bounds import Allowance, TooLargeError
from dagrl.config.loading.error_messages import MOST_FAULTS, Fault, faults_of, keys_anywhere
from dagrl.config.loading.extends import expanded, forget, keeps_nulls, read_with_parents, takes_away
from dagrl.config.loading.per_node import multiply_out
from dagrl.config.loading.positions import COMMAND_LINE, Findings, Position, Positions
from dagrl.config.loading.yaml_source import HALF, Document, Tree, dump_document, encodable, parse_value
from dagrl.config.schema import Pipeline

_VALIDATION: Place = ("data", "val")
PATH_PLACES: tuple[Place, ...] = (("model", "path"), ("model", "tokenizer"), ("data", "train"), _VALIDATION)
ENGINE_PATHS: tuple[Place, ...] = (("dist_checkpointing_path",), ("model", "path"), ("model", "tokenizer"))
_NAMED = ("groups", "engines", "nodes")


@dataclass(frozen=True, slots=True)
class LoadedPipeline:
    """A pipeline and where it came from."""

    pipeline: Pipeline
    path: Path
    positions: Positions
    resolved: Mapping[str, Any]
    """The file's content after `extends` and overrides, with absolute paths: what `pipeline` was made from."""

    @property
    def folder(self) -> Path:
        """Where the user's own modules are looked for: the folder of the pipeline file."""
        return self.path.resolve().parent

    def to_yaml(self) -> str:
        """`resolved` as YAML that loads as the same pipeline from any folder."""
        return dump_document(dict(self.resolved))


def load_pipeline(path: Path | str, overrides: Sequence[str] = ()) -> LoadedPipeline:
    """Read a pipeline file. PipelineError with all problems of form; `dagrl.validation` finds those of substance."""
    loaded, findings = salvage_pipeline(path, overrides)
    findings.raise_if_any()
    assert loaded is not None
    return loaded


def salvage_pipeline(path: Path | str, overrides: Sequence[str] = ()) -> tuple[LoadedPipeline | None, Findings]:
    """Read a pipeline file and go on past its mistakes, so that further checks can look at the rest.

    The second result holds the problems found; the first is None where too little is left to go on with.
    """
    path, allowance = Path(path), Allowance()
    try:
        document = read_with_parents(path, allowance)
        for number, override in enumerate(overrides, start=1):
            _apply_override(document, override, number, allowance)
    except PipelineError as error:
        return None, Findings(Positions({}), error.problems)
    _prune_nulls(document.tree, document)
    if len(document.problems) > MOST_FAULTS:
        return None, Findings(Positions({}), _first(document.problems, path))
    multiply_out(document)
    _resolve_paths(document)
    positions = Positions(document.positions)
    pipeline, faults = _validate(document.tree, document)
    problems = document.problems + [positions.problem(fault.place, fault.message) for fault in faults]
    if len(faults) > MOST_FAULTS:
        return None, Findings(positions, _first(problems, path))
    findings = Findings(positions, problems, document.broken.union(fault.place for fault in faults))
    loaded = LoadedPipeline(pipeline, path, positions, document.tree) if pipeline else None
    return loaded, findings


def _first(problems: list[Problem], path: Path) -> list[Problem]:
    """The first of very many problems: each takes time to word, and nobody reads thousands."""
    more = Problem(str(path), 1, "file", f"has more faults than the {MOST_FAULTS} told here; mend these first")
    return [*sorted(set(problems))[:MOST_FAULTS], more]


def _apply_override(document: Document, override: str, number: int, allowance: Allowance) -> None:
    """Set one key. PipelineError if that makes the pipeline too large."""
    position = Position(COMMAND_LINE, number, override)
    key, equals, text = override.partition("=")
    place: tuple[str, ...] = tuple(key.split("."))
    try:
        if not equals or not all(place):
            raise ValueError("is not KEY=VALUE; write for example `run.steps=10`")
        if place[0] == "extends":
            raise ValueError("what a file extends is said in it; write a file that begins with `extends: NAME`")
        if not encodable(key):
            raise ValueError(f"the key {HALF}")
        allowance.take_values(len(place), number)
        value = parse_value(text, allowance, level=len(place))
        section = _section_for(document, place, position)
    except TooLargeError as error:
        raise PipelineError([Problem(COMMAND_LINE, number, f"override {override}", str(error))]) from error
    except ValueError as error:
        document.problems.append(Problem(COMMAND_LINE, number, f"override {override}", str(error)))
        return
    forget(document.positions, place, section.get(place[-1]))
    if takes_away(value, place) and place[-1] in section:
        del section[place[-1]]
    else:
        section[place[-1]] = value
        document.positions[place] = position


def _section_for(document: Document, place: tuple[str, ...], position: Position) -> Tree:
    """The mapping that holds the last key of `place`; made where the schema has it and the file does not."""
    section = document.tree
    for depth, key in enumerate(place[:-1], start=1):
        if key not in section or section[key] is None:
            if depth == 2 and place[0] in _NAMED:
                kind = place[0].removesuffix("s")
                there = [name for name, value in section.items() if value is not None]
                raise ValueError(f"there is no {kind} `{key}`; {suggest(key, there)}")
            section[key] = {}
            document.positions[place[:depth]] = position
        section = section[key]
        if not isinstance(section, dict):
            raise ValueError(f"`{dotted(place[:depth])}` has no keys of its own; override it as a whole")
    return section


def _prune_nulls(tree: Tree, document: Document, place: Place = ()) -> None:
    """Take nulls out, which stand for a key's absence; of a key that no section has, a misspelt one, that is told."""
    if keeps_nulls(place):
        return
    for key in [key for key, value in tree.items() if value is None]:
        inner = (*place, key)
        told_enough = len(document.problems) > MOST_FAULTS
        if not told_enough and inner not in document.broken and (known := keys_anywhere(place)) and key not in known:
            message = f"unknown key `{key}`; {suggest(key, known)}"
            document.problems.append(Positions(document.positions).problem(inner, message))
        del tree[key]
    for key, value in tree.items():
        if isinstance(value, dict):
            _prune_nulls(value, document, (*place, key))


def _resolve_paths(document: Document) -> None:
    positions = Positions(document.positions)
    engines = document.tree.get("engines")
    names = engines if isinstance(engines, dict) else ()
    data = document.tree.get("data")
    sets = data.get("val") if isinstance(data, dict) else None
    several = [(*_VALIDATION, name) for name in sets] if isinstance(sets, dict) else []
    of_engines = [("engines", name, *path) for name in names for path in ENGINE_PATHS]
    for place in (*PATH_PLACES, *several, *of_engines):
        holder: Any = document.tree
        for key in place[:-1]:
            holder = holder.get(key) if isinstance(holder, dict) else None
        if not isinstance(holder, dict):
            continue
        value = holder.get(place[-1])
        if isinstance(value, str) and "\0" in value:
            message = "a path cannot hold a NUL character; take it out"
            document.problems.append(positions.problem(place, message))
            document.broken.add(place)
            del holder[place[-1]]
        elif isinstance(value, str) and value:
            # Not `Path.resolve`, which raises where symbolic links lead in a circle.
            holder[place[-1]] = os.path.realpath(positions.at(place).folder / expanded(value))


def _validate(tree: Tree, document: Document) -> tuple[Pipeline | None, list[Fault]]:
    """The pipeline, and what is wrong with it; where something is, a pipeline of the parts that are right, or None.

    Repairs go from small to large: first a wrong key goes, then the whole engine, group, node or section.
    """
    told: list[Fault] = []
    remains: Tree = json.loads(json.dumps(tree))
    for depth in (None, 2, 1):
        try:
            # Through JSON: only there does pydantic's strict mode take a text for a path and a list for a tuple.
            return Pipeline.model_validate_json(json.dumps(remains), strict=True), told
        except ValidationError as error:
            faults = faults_of(error, remains)
            if len(faults) > MOST_FAULTS:
                return None, faults
        if depth is None:
            unread = document.broken.intersection
            told = [fault for fault in faults if not unread({fault.place, ()} if fault.missing else {fault.place})]
            document.broken.update(fault.place for fault in faults)
            document.broken.update(fault.meant for fault in faults if fault.meant)
        for fault in faults:
            _repair(remains, fault.place[:depth])
    return None, told


_STAND_INS: dict[Place, Any] = {
    ("name",): "unnamed",
    ("model",): {},
    ("data",): {"train": "unknown", "prompts_per_step": 1, "max_prompt_tokens": 1},
    ("data", "train"): "unknown",
    ("data", "prompts_per_step"): 1,
    ("data", "max_prompt_tokens"): 1,
    ("run",): {"steps": 1},
    ("run", "steps"): 1,
}
"""What takes the place of required keys that are missing or wrong; no message ever shows them."""


def _repair(tree: Tree, place: Place) -> None:
    section: Any = tree
    key: Any
    for key in place[:-1]:
        if not isinstance(section, list) and key not in section:
            return
        section = section[key]
    if isinstance(section, list):
        section.clear()  # An entry alone cannot go: the others' indices would move.
    elif place in _STAND_INS:
        section[place[-1]] = _STAND_INS[place]
    elif place:
        section.pop(place[-1], None)
