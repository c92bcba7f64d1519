"""Loads a pipeline file: YAML, ``extends`` and overrides become a `Pipeline` with the position of every key.

- ``engines.actor.optimizer.lr=3e-6`` on the command line sets one key; its value is read as YAML.
- ``prompts_per_node`` and ``mini_batch_per_node`` are multiplied by the ``nodes`` of the largest trained group, as the
  file declares them: the same file trains with the same batch for each machine.
- ``run.epochs`` becomes ``run.steps``, by the rows of all training sources.
- Paths (``model.path``, ``model.tokenizer``, those of ``data.train`` and ``data.val``, fields of engines with a path)
  may begin with ``~``, and are relative to the folder of the file that contains them; in an override, to the working
  directory. Data of dagrl's own templates is looked for in the pipeline's folder: `dagrl.resources`.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from dagrl.config.errors import PipelineError, Place, Problem, dotted, listed, suggest
from dagrl.config.loading.error_messages import MOST_FAULTS, Fault, faults_of, known_keys, value_at
from dagrl.config.loading.extends import expanded, forget, forget_args, keeps_nulls, read_with_parents, takes_away
from dagrl.config.loading.hub import HubError, hub_model, locate
from dagrl.config.loading.positions import COMMAND_LINE, Position, Positions
from dagrl.config.loading.prompt_files import count_rows, files_of
from dagrl.config.loading.yaml_source import (
    HALF,
    Allowance,
    Document,
    TooLargeError,
    Tree,
    dump_document,
    encodable,
    parse_value,
)
from dagrl.config.schema import EngineSpec, Pipeline, TrainSourceSpec
from dagrl.config.schema.backends import engine_sections
from dagrl.config.schema.data import is_one_source
from dagrl.config.schema.run import UNKNOWN_STEPS
from dagrl.config.schema.section import Section
from dagrl.resources import path_in_template, why_no_path

_PATHS: tuple[Place, ...] = (("model", "path"), ("model", "tokenizer"))
_SOURCE_DEPTH = len(("data", "train", "NAME"))
_NAMED = ("groups", "engines", "nodes")
_MOST_EPOCHS = 1e6
_TRAINING = ("update", "critic", "sft", "dpo")
"""Ops that train in mini-batches."""


MODULES = ".modules"


def modules_of(folder: Path) -> Path:
    """The folder of the user's modules for a pipeline in `folder`: in a run folder, that of the file it began with."""
    try:
        return Path((folder / MODULES).read_text(encoding="utf-8").strip())
    except (OSError, ValueError):
        return folder


@dataclass(frozen=True, slots=True)
class LoadedPipeline:
    """A pipeline and its source."""

    pipeline: Pipeline
    path: Path
    positions: Positions
    resolved: Mapping[str, object]
    """The file's content after `extends` and overrides, with absolute paths; `pipeline` is built from it."""
    overrides: tuple[str, ...] = ()
    """Overrides in the form of the command line: ``run.steps=10``."""

    @property
    def folder(self) -> Path:
        """The folder of the pipeline file, where user modules are looked for; of a run's, see `modules_of`."""
        return modules_of(self.path.resolve().parent)

    def to_yaml(self) -> str:
        """`resolved` as YAML that loads as the same pipeline from any folder."""
        return dump_document(dict(self.resolved))


def load_pipeline(path: Path | str, overrides: Sequence[str] = ()) -> LoadedPipeline:
    """Read a pipeline file. Raises PipelineError with every problem of syntax and schema; `dagrl.validation` checks the
    rest.
    """
    path, allowance = Path(path), Allowance()
    document = read_with_parents(path, allowance)
    for number, override in enumerate(overrides, start=1):
        _apply_override(document, override, number, allowance)
    positions = Positions(document.positions)
    _prune_nulls(document.tree, document, positions)
    _multiply_by_machines(document, positions)
    _resolve_paths(document, positions, path)
    tree = _with_steps(document, positions)
    pipeline, faults = _built(tree)
    for fault in _by_choice(faults, tree, positions):
        suppressed = {fault.place, ()} if fault.code == "missing-key" else {fault.place}
        if not suppressed & document.broken:
            document.problems.append(positions.problem(fault.place, fault.message, fault.code))
    if document.problems:
        raise PipelineError(_first(document.problems, path))
    assert pipeline is not None, "a pipeline that cannot be built without a problem"
    return LoadedPipeline(pipeline, path, positions, document.tree, tuple(overrides))


def _built(tree: Tree) -> tuple[Pipeline | None, list[Fault]]:
    try:
        # In strict mode only JSON input accepts a text for a path and a list for a tuple.
        return Pipeline.model_validate_json(json.dumps(tree), strict=True), []
    except ValidationError as error:
        return None, faults_of(error, tree)


def _by_choice(faults: list[Fault], tree: Tree, positions: Positions) -> list[Fault]:
    """Report inherited keys that belong to another ``backend`` or ``op`` than the file or the command line chooses."""
    left_over: dict[Place, list[Place]] = {}
    kept = []
    for fault in faults:
        if fault.chosen_by and positions.overrules(fault.chosen_by, fault.place):
            left_over.setdefault(fault.chosen_by, []).append(fault.place)
        else:
            kept.append(fault)
    for choice, places in left_over.items():
        keys = [str(place[-1]) for place in places]
        parent = Path(positions.at(places[0]).file).name
        fact = f"`{choice[-1]}: {value_at(tree, choice)}` does not take {listed(keys)}, which {parent} sets"
        remedy = f"choose another, or write {listed(f'{key}: null' for key in keys)} beside it"
        kept.append(Fault(choice, "other-kind", f"{fact}; {remedy}"))
    return kept


def _first(problems: list[Problem], path: Path) -> list[Problem]:
    if len(problems) <= MOST_FAULTS:
        return problems
    message = f"has more faults than the {MOST_FAULTS} reported here; fix these first"
    return [*sorted(set(problems))[:MOST_FAULTS], Problem(str(path), 1, "file", message, "too-large")]


def _apply_override(document: Document, override: str, number: int, allowance: Allowance) -> None:
    """Set one key. PipelineError if the pipeline becomes too large."""
    position = Position(COMMAND_LINE, number, override)
    key, equals, text = override.partition("=")
    place: tuple[str, ...] = tuple(key.split("."))
    try:
        if not equals or not all(place):
            raise ValueError("is not KEY=VALUE; write for example `run.steps=10`")
        if place[0] == "extends":
            raise ValueError("only a file can extend others; write a file that begins with `extends: NAME`")
        if not encodable(key):
            raise ValueError(f"the key {HALF}")
        allowance.take(number, len(place), values=len(place))
        value = parse_value(text, allowance, level=len(place))
        section = _section_for(document, place, position)
    except TooLargeError as error:
        raise PipelineError([Problem(COMMAND_LINE, number, f"override {override}", str(error), "too-large")]) from error
    except ValueError as error:
        document.problems.append(Problem(COMMAND_LINE, number, f"override {override}", str(error), "invalid-override"))
        return
    arguments = document.positions.get((*place[:-1], "args"))
    if place[-1] == "fn" and arguments is not None and arguments.file != COMMAND_LINE:
        forget_args(document, section, place[:-1], value)
    forget(document.positions, place, section.get(place[-1]))
    if takes_away(value, place) and place[-1] in section:
        del section[place[-1]]
    else:
        section[place[-1]] = value
        document.positions[place] = position


def _section_for(document: Document, place: tuple[str, ...], position: Position) -> Tree:
    """The mapping that holds the last key of `place`, created if the file has none."""
    section = document.tree
    for depth, key in enumerate(place[:-1], start=1):
        if key not in section or section[key] is None:
            if depth == 2 and place[0] in _NAMED:
                names = [name for name, value in section.items() if value is not None]
                raise ValueError(f"there is no {place[0].removesuffix('s')} `{key}`; {suggest(key, names)}")
            section[key] = {}
            document.positions[place[:depth]] = position
        section = section[key]
        if not isinstance(section, dict):
            raise ValueError(f"`{dotted(place[:depth])}` is not a section; override it as a whole")
    return section


def _prune_nulls(tree: Tree, document: Document, positions: Positions, place: Place = ()) -> None:
    """Remove nulls, which stand for a key's absence, and report those of unknown keys."""
    if keeps_nulls(place):
        return
    known = known_keys(place)
    for key in [key for key, value in tree.items() if value is None]:
        inner = (*place, key)
        if len(document.problems) <= MOST_FAULTS and inner not in document.broken and known and key not in known:
            problem = positions.problem(inner, f"unknown key `{key}`; {suggest(key, known)}", "unknown-key")
            document.problems.append(problem)
        del tree[key]
    for key, value in tree.items():
        if isinstance(value, dict):
            _prune_nulls(value, document, positions, (*place, key))


def _multiply_by_machines(document: Document, positions: Positions) -> None:
    """Replace sizes for each machine by ``prompts_per_step`` and ``mini_batch``."""
    tree = document.tree
    nodes, engines, groups = (_sections(tree, kind) for kind in ("nodes", "engines", "groups"))
    trained = {name: node for name, node in nodes.items() if node.get("op") in _TRAINING}
    homes = [engines.get(str(node.get("engine")), {}).get("group") for node in trained.values()]
    machines = [groups.get(str(home), {}).get("nodes", 1) for home in homes]
    factor = max([1, *(number for number in machines if type(number) is int)])
    sizes: list[tuple[Place, Tree, str, str]] = [
        (("data",), _mapping(tree.get("data")), "prompts_per_node", "prompts_per_step")
    ]
    sizes += [(("nodes", name), node, "mini_batch_per_node", "mini_batch") for name, node in trained.items()]
    for place, section, for_each, in_all in sizes:
        if for_each not in section:
            continue
        if in_all in section:
            message = f"`{for_each}` and `{in_all}` are both set; keep one, or write `{in_all}: null`"
            document.problems.append(positions.problem((*place, for_each), message, "size-set-twice"))
        elif type(section[for_each]) is int and section[for_each] >= 1:
            document.positions[(*place, in_all)] = positions.at((*place, for_each))
            section[in_all] = section.pop(for_each) * factor
        else:
            document.broken.add((*place, in_all))  # The schema reports the wrong value.


def _with_steps(document: Document, positions: Positions) -> Tree:
    """The tree with the steps of ``run.epochs``, at most: prompts that are too long, or filtered, make them fewer.

    The document keeps the epochs: the file may have other rows when the run is resumed.
    """
    run, data = _mapping(document.tree.get("run")), _mapping(document.tree.get("data"))
    if "epochs" not in run:
        return document.tree
    if "steps" in run:
        message = "`epochs` and `steps` are both set; keep one, or set `steps: null`"
        document.problems.append(positions.problem(("run", "epochs"), message, "length-set-twice"))
        return document.tree
    epochs, prompts, steps = run["epochs"], data.get("prompts_per_step"), UNKNOWN_STEPS
    rows = _rows_of(data.get("train"))
    if rows and type(prompts) is int and prompts > 0 and type(epochs) in (int, float) and 0 < epochs <= _MOST_EPOCHS:
        steps = min(-(-math.ceil(round(epochs * rows, 6)) // prompts), UNKNOWN_STEPS)
    return {**document.tree, "run": {**run, "steps": steps}}


def _rows_of(train: object) -> int | None:
    """The rows of all sources; None if a file is missing or wrong, which `dagrl.validate` reports."""
    several = train.values() if isinstance(train, dict) and not is_one_source(train) else [train]
    try:
        specs = [TrainSourceSpec.model_validate(item if isinstance(item, dict) else {"path": item}) for item in several]
        rows = sum(count_rows(file) for spec in specs for file in files_of(spec))
    except (OSError, ValueError):
        return None
    return rows if all(spec.hub is None for spec in specs) else None


def _sections(tree: Tree, kind: str) -> dict[str, Tree]:
    return {name: section for name, section in _mapping(tree.get(kind)).items() if isinstance(section, dict)}


def _path_fields(section: type[Section]) -> Iterator[Place]:
    """Yield the fields of a section, and of the sections in it, that hold a path."""
    for name, field in section.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if kind is Path:
                yield (name,)
            elif isinstance(kind, type) and issubclass(kind, Section):
                yield from ((name, *place) for place in _path_fields(kind))


def _resolve_paths(document: Document, positions: Positions, pipeline: Path) -> None:
    tree = document.tree
    engines: list[Place] = []
    for name, engine in _sections(tree, "engines").items():
        spec = engine_sections().get(str(engine.get("backend")), EngineSpec)
        engines += [("engines", name, *place) for place in _path_fields(spec)]
    engines += [("nodes", name, "agent", "python") for name in _sections(tree, "nodes")]
    sources = [place for key in ("train", "val") for place in _source_paths(tree, ("data", key))]
    for place in (*_PATHS, *sources, *engines):
        holder: Any = value_at(tree, place[:-1])
        value, of_data = value_at(tree, place) if isinstance(holder, dict | list) else None, place[0] == "data"
        if isinstance(value, str) and (why := why_no_path(value)):
            problem = positions.problem(place, f"is a path that {why}; give another", "invalid-value")
            document.problems.append(problem)
        elif not of_data and place[-1] == "environment" and isinstance(value, str) and re.fullmatch(r"\w[\w-]*", value):
            holder["environment"] = f"{sys.prefix}-{value}"
        elif not of_data and isinstance(value, str) and value and place[-2:] == ("model", "path"):
            _resolve_model(document, positions, place, holder, value)
        elif isinstance(value, str) and value:
            # Unlike `Path.resolve`, this accepts circular links.
            found = path_in_template(positions.at(place).folder, str(expanded(value)), pipeline)
            if place[-1] == "python":
                # Python finds its packages by the link to it.
                holder["python"] = f"{os.path.realpath(found.parent)}/{found.name}"
            else:
                holder[place[-1]] = os.path.realpath(found)


def _source_paths(tree: Tree, place: Place) -> Iterator[Place]:
    """Yield the places of the paths in a source, or in a mapping of names to sources."""
    value = value_at(tree, place)
    if isinstance(value, list):
        yield from ((*place, index) for index in range(len(value)))
    elif isinstance(value, dict) and len(place) < _SOURCE_DEPTH and not is_one_source(value):
        for name in value:
            yield from _source_paths(tree, (*place, name))
    elif isinstance(value, dict):
        yield from _source_paths(tree, (*place, "path"))
    else:
        yield place


def _resolve_model(document: Document, positions: Positions, place: Place, holder: Tree, value: str) -> None:
    """Replace ``model.path`` by a folder: the one that it names, or the cached folder of a published model."""
    folder = positions.at(place).folder / expanded(value)
    holder["path"] = os.path.realpath(folder)
    hub = holder.pop("hub", None)
    # The path of a resumed run is a folder in its machine's cache.
    resumed = hub_model(hub) if isinstance(hub, str) and folder.name in hub else None
    if resumed is not None and folder.is_dir():
        holder["hub"] = hub
    elif (named := resumed or hub_model(value)) is not None and not folder.exists():
        try:
            found, holder["hub"] = locate(named)
        except HubError as error:
            document.problems.append(positions.problem(place, str(error), "no-such-model"))
        else:
            holder["path"] = str(found)


def _mapping(value: object) -> Tree:
    return value if isinstance(value, dict) else {}
