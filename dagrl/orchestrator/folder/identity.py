"""The differences between two versions of a pipeline, and the ones that prevent a resume."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dagrl.backends.registry import backend_of
from dagrl.config.capability import Capability
from dagrl.config.schema import Pipeline
from dagrl.redact import without_secrets
from dagrl.tracking.run_notes import section

_TRAINING = ("update", "critic", "sft", "dpo")
"""Ops that change an engine's weights."""
_CACHED = re.compile(r'"path":"(?:[^"\\]|\\.)*",(?="hub":"[^"]*@)')
"""The folder of a published model of a known revision, in the machine's cache."""
_LONGEST_VALUE = 40
_MOST = 8


def model_identity(pipeline: Pipeline) -> str:
    """The model of a checkpoint's weights and of the reference beside them, as text that can be compared."""
    trainers = {
        name: engine for name, engine in sorted(pipeline.engines.items()) if Capability.TRAIN in engine.capabilities
    }
    own = {name: pipeline.model_of(name) for name, engine in trainers.items() if engine.model is not None}
    drawn = pipeline.model.init or any(model.init for model in own.values())
    seed = f", start weights drawn from seed {pipeline.run.seed}" if drawn else ""
    of_engines = "".join(f", {name} is {model.model_dump_json(exclude_none=True)}" for name, model in own.items())
    folders = {name: backend_of(engine).start_folder(engine) for name, engine in trainers.items()}
    stored = "".join(f", {name} from {folder}" for name, folder in folders.items() if folder)
    return pipeline.model.model_dump_json(exclude_none=True) + seed + of_engines + stored


def is_same_model(saved: str, now: str) -> bool:
    """Whether two results of `model_identity` name the same weights, independent of the cache's folder."""
    return _CACHED.sub("", saved) == _CACHED.sub("", now)


def another_run(earlier: Mapping[str, object], now: Mapping[str, object], *, with_model: bool) -> str | None:
    """The reason why one resolved pipeline cannot continue from the weights of the other, as the end of a sentence;
    None if it can.

    `with_model`: compare the models in the files, if no checkpoint names them.
    """
    before, after = _trained(earlier), _trained(now)
    if before != after:
        return f"a run that trains {_in_words(before)}, and this pipeline trains {_in_words(after)}"
    for engine in before:
        # The two kinds of optimizers store their sections differently.
        kinds = [section(tree, "engines", engine, "optimizer").get(_DISTRIBUTED, True) for tree in (earlier, now)]
        if kinds[0] != kinds[1]:
            return f"a run with another `engines.{engine}.optimizer.{_DISTRIBUTED}` than the pipeline's"
        if key := _other_adapter(*(section(tree, "engines", engine).get("lora") for tree in (earlier, now))):
            return f"a run with another `engines.{engine}.{key}` than the pipeline's"
    return "another model's run" if with_model and _models(earlier) != _models(now) else None


_DISTRIBUTED = "use_distributed_optimizer"
_ADAPTER = {"rank": 32, "alpha": 32, "target_modules": "all-linear"}
"""Keys of ``lora`` that determine the function of stored adapters, and their defaults."""


def _other_adapter(before: Any, after: Any) -> str | None:
    """The key in which two ``lora`` sections make different models of stored weights; None if they do not."""
    if before is None or after is None:
        return None if before is after else "lora"
    values = [_ADAPTER | {key: lora[key] for key in _ADAPTER if key in lora} for lora in (before, after)]
    return next((f"lora.{key}" for key in _ADAPTER if values[0][key] != values[1][key]), None)


def _trained(tree: Mapping[str, object]) -> dict[str, list[str]]:
    ops: dict[str, set[str]] = {}
    for _, node in _sections(tree, "nodes"):
        if node.get("op") in _TRAINING:
            ops.setdefault(str(node.get("engine")), set()).add(str(node["op"]))
    return {engine: sorted(ops[engine]) for engine in sorted(ops)}


def _in_words(trained: Mapping[str, list[str]]) -> str:
    return ", ".join(f"`{engine}` by {' and '.join(ops)}" for engine, ops in trained.items()) or "no engine"


def _models(tree: Mapping[str, object]) -> list[object]:
    own = [
        (name, _without_cache(engine.get("model")), engine.get("dist_checkpointing_path"), lora.get("path"))
        for name, engine in _sections(tree, "engines")
        for lora in [section(engine, "lora")]
    ]
    shared = _without_cache(tree.get("model"))
    return [shared, sorted((engine for engine in own if any(engine[1:])), key=lambda engine: engine[0])]


def _without_cache(model: Any) -> Any:
    """A model section; without the folder for a published model of a known revision."""
    if isinstance(model, Mapping) and "@" in str(model.get("hub")):
        return {key: value for key, value in model.items() if key != "path"}
    return model


def _sections(tree: Mapping[str, object], kind: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    for name, inner in section(tree, kind).items():
        if isinstance(inner, Mapping):
            yield name, inner


def changes(before: Mapping[str, object], after: Mapping[str, object]) -> str:
    """The keys that differ between two resolved pipelines, with both values; empty if none does."""
    old, new = dict(_values(without_secrets(before))), dict(_values(without_secrets(after)))
    differing = [
        f"{key} {_shown(old, key)} -> {_shown(new, key)}"
        for key in dict.fromkeys((*old, *new))
        if key not in old or key not in new or old[key] != new[key]
    ]
    return ", ".join(differing[:_MOST]) + (f" and {len(differing) - _MOST} more" if len(differing) > _MOST else "")


def _values(section: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _values(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(values: Mapping[str, object], key: str) -> str:
    if key not in values:
        return "(default)"
    value = values[key]
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _LONGEST_VALUE else "..." + text[-_LONGEST_VALUE:]
