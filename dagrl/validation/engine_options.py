"""Options of engines beside layouts and libraries' fields: heads, and a Megatron engine's bridge and start."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from dagrl.config.errors import Place
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import (
    HfEngineSpec,
    MegatronEngineSpec,
    Pipeline,
    SglangEngineSpec,
)
from dagrl.models.megatron_folder import CONFIG, format_of, newest_checkpoint

_HEADS = {"lm": "the language model's", "value": "a critic's", "reward": "a reward model's"}
_OWN_HEADS = {"values": "value", "critic": "value", "reward_model": "reward"}
"""What ops need of their engine that do not need a language model."""

_BRIDGE_PACKAGES = ("omegaconf", "einops")
"""What megatron-bridge needs beside what dagrl has."""
_BRIDGE_INSTALL = "uv pip install --no-deps -r requirements/bridge.txt"


def check_engine_options(pipeline: Pipeline, findings: Findings) -> None:
    """Report options that cannot be had here, and nodes whose engine has another head than they need."""
    for name, engine in pipeline.engines.items():
        place: Place = ("engines", name)
        if isinstance(engine, HfEngineSpec | SglangEngineSpec):
            if engine.weights_from is not None:
                _check_generator(pipeline, engine.weights_from, engine, place, findings)
            continue
        if engine.bridge == "megatron-bridge" and not _has_bridge():
            message = f"megatron-bridge is not installed; install it with `{_BRIDGE_INSTALL}`, or say `bridge: native`"
            findings.error((*place, "bridge"), message)
        elif engine.bridge == "megatron-bridge" and engine.head != "lm":
            message = f"megatron-bridge has no {engine.head} head; set bridge: native"
            findings.error((*place, "bridge"), message, depends_on=[(*place, "head")])
        if engine.fused_linear_cross_entropy and engine.head != "lm":
            message = f"a {engine.head} head has no logits to compute in chunks; take it out"
            findings.error((*place, "fused_linear_cross_entropy"), message, depends_on=[(*place, "head")])
        if engine.dist_checkpointing_path is not None:
            _check_start(engine.dist_checkpointing_path, (*place, "dist_checkpointing_path"), findings)
    for name, node in pipeline.nodes.items():
        if (engine_name := getattr(node, "engine", None)) is not None:
            op = str(node.op)
            needed = _OWN_HEADS.get(op, "lm")
            _check_head_of(pipeline, engine_name, needed, ("nodes", name, "engine"), f"op {op} needs", findings)


def _check_generator(
    pipeline: Pipeline, weights_from: str, engine: HfEngineSpec | SglangEngineSpec, place: Place, findings: Findings
) -> None:
    _check_head_of(pipeline, weights_from, "lm", (*place, "weights_from"), "a generator needs", findings)
    if isinstance(engine, HfEngineSpec) and engine.head != "lm":
        message = "a reward model here is what its folder says, and takes nobody's weights; take `weights_from` out"
        findings.error((*place, "weights_from"), message, depends_on=[(*place, "head")])


def _check_head_of(pipeline: Pipeline, name: str, needed: str, place: Place, who: str, findings: Findings) -> None:
    """Report an engine that has another head than is needed."""
    engine = pipeline.engines.get(name)
    if isinstance(engine, MegatronEngineSpec) and engine.frozen_copy_of is not None:
        engine = pipeline.engines.get(engine.frozen_copy_of)
    head = getattr(engine, "head", "lm")
    if engine is None or head == needed:
        return
    has = "the language model's head" if head == "lm" else f"a {head} head"
    message = f"`{name}` has {has}, and {who} {_HEADS[needed]}; name an engine with `head: {needed}`"
    findings.error(place, message, depends_on=[place, ("engines", name, "head")])


def _has_bridge() -> bool:
    # Not find_spec("megatron.bridge"), which would import the package around it.
    package = importlib.util.find_spec("megatron")
    locations = package.submodule_search_locations if package else None
    found = any((Path(location) / "bridge" / "__init__.py").is_file() for location in locations or ())
    return found and all(importlib.util.find_spec(name) for name in _BRIDGE_PACKAGES)


def _check_start(folder: Path, place: Place, findings: Findings) -> None:
    """Report a folder that holds no checkpoint in Megatron's distributed format."""
    try:
        folder = newest_checkpoint(folder)
        if not folder.is_dir():
            what = "is a file, not a folder" if folder.exists() else "does not exist"
            findings.error(place, f"{folder} {what}; give a folder in Megatron's distributed format")
        elif not (folder / CONFIG).is_file():
            message = f"{folder} has no {CONFIG}, so it is no checkpoint in Megatron's distributed format, or a "
            findings.error(place, f"{message}torn one; give a whole one, or make it with `dagrl convert`")
        elif (kind := format_of(folder)) != "torch_dist":
            kind = kind or f"of no readable {CONFIG}"
            message = f"{folder} is in the format {kind}; save it as torch_dist (Megatron's `--ckpt-format`)"
            findings.error(place, message)
        elif not (folder / ".metadata").is_file():
            findings.error(place, f"{folder} has no .metadata, which says where each tensor lies; copy it again")
        elif not any(file.stat().st_size for file in folder.glob("*.distcp")):
            findings.error(place, f"{folder} has no *.distcp files with tensors; copy it again")
    except ValueError as error:
        findings.error(place, str(error))
    except OSError as error:
        message = f"{folder} cannot be read ({error.strerror}); check the path and its permissions"
        findings.error(place, message)
