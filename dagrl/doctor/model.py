"""Reports whether dagrl and the installed libraries support a model, from its config.json. Nothing is imported."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dagrl.backends.families.base import Family
from dagrl.backends.families.bridge_models import bridges
from dagrl.backends.families.config_fields import ConfigFields
from dagrl.backends.families.registry import family_named, family_names, find_family
from dagrl.backends.tested import version_of
from dagrl.config.errors import listed
from dagrl.config.loading.hub import hub_model, locate
from dagrl.config.loading.positions import Findings, Position, Positions
from dagrl.doctor.findings import Finding, hint, ok, refused
from dagrl.doctor.hardware import list_gpus
from dagrl.doctor.libraries import libraries
from dagrl.model_files.hf_config import HfConfig, flat_config, folder_config
from dagrl.model_files.library_classes import auto_classes, config_class, fields_of_class, source_of
from dagrl.validation.model_config import check_architecture, check_config
from dagrl.validation.model_weights import quantisation_problem

type Sections = list[tuple[str, list[Finding]]]

_ENGINE = ("config.py", "model.py")
"""Modules of the Megatron engine that read fields themselves."""
_WITHOUT_EFFECT = re.compile(r"\w+_token_id|torch_dtype|auto_map|_\w+|use_cache|initializer_range|\w+_config")
"""Fields that do not change log-probs, or that have their own check."""

_MALFORMED = (AttributeError, KeyError, TypeError, ValueError)
"""Exceptions of fields that transformers would fill in, or whose values nothing has checked: the type is unknown."""


def examine_model(path: Path) -> tuple[Sections, str]:
    """Return the findings about a model, by section, and the next step of its user.

    `path` is a Hugging Face folder, or a name as in ``model.path``. ValueError if its config.json cannot be read or
    fetched; OSError like `folder_config`.
    """
    folder, named = path.expanduser(), hub_model(str(path))
    if named is not None and not folder.exists():
        folder, _ = locate(named)
    config = flat_config(folder_config(folder))
    model_type, family = str(config["model_type"]), find_family(config["model_type"])
    problems = _findings(folder / "config.json", config)
    is_valid = all(problem.code != "invalid-config" for problem in problems.problems)
    sections = [
        ("config.json", list(_fields(config, family if is_valid else None))),
        ("training", [*_builders(config, family), *_told(problems)]),
        ("installed libraries", list(libraries(model_type, _architectures(config), on_gpus=bool(list_gpus())))),
    ]
    if family is None:
        step = 'describe the family, as "A model family" in CONTRIBUTING.md says, beginning with the nearest one'
    elif problems.problems:
        step = "the checks say why it does not train; the backends hf, sglang and vllm may serve it (docs/models.md)"
    else:
        step = f"`dagrl plan grpo model.path={path}` estimates memory and time of a run"
    return sections, step


def _findings(file: Path, config: HfConfig) -> Findings:
    """Return what `dagrl validate` says of a model that the Megatron engine trains."""
    place, findings = ("path",), Findings(Positions({(): Position(str(file), 1)}))
    if check_config(place, config, file, findings) and find_family(config["model_type"]):
        check_architecture(place, config, findings)
    if problem := quantisation_problem(file, config):
        findings.error(place, problem)
    return findings


def _told(findings: Findings) -> Iterator[Finding]:
    yield from (refused("check", problem.message) for problem in findings.problems)
    yield from (hint("check", problem.message) for problem in findings.warnings)


def _fields(config: HfConfig, family: Family | None) -> Iterator[Finding]:
    """Yield which fields are known; with a family, also those that do not reach the Megatron model."""
    model_type, architectures = str(config["model_type"]), listed(_architectures(config))
    yield ok("model_type", f"{model_type}, with the class {architectures}" if architectures else model_type)
    class_name, types, defaults = config_class(model_type)
    if not class_name:
        yield hint("fields", f"not checked: the installed transformers has no config class for {model_type}")
        return
    own, read = _telling(config), _read_by(family, config) if family else set()
    changed = {name for name in own if own[name] != defaults.get(name)}
    yield ok("fields", f"{len(own.keys() & types.keys())} of {len(own)} are fields of transformers' {class_name}")
    if unknown := sorted(own.keys() - types.keys() - read):
        yield hint("unknown fields", f"{listed(unknown)}: ignored by transformers")
    if family and (ignored := sorted(changed & types.keys() - read)):
        yield hint("ignored in training", f"{listed(ignored)}: not read by the Megatron engine")


def _builders(config: HfConfig, family: Family | None) -> Iterator[Finding]:
    """Yield what builds the Megatron model, or what comes nearest."""
    bridge = next((bridges()[name] for name in _architectures(config) if name in bridges()), None)
    version = version_of("megatron-bridge")
    if family is not None:
        native = f"dagrl ({type(family).__module__})"
        builder = f"megatron-bridge {version} ({bridge.name if bridge else 'class not found'})"
        yield ok("model", f"built by {builder if family.bridged else native}")
        yield ok("weights", f"converted by {'tables of dagrl' if family.has_tables else 'megatron-bridge'}")
        return
    other = f"megatron-bridge {version}" if version else "megatron-bridge, which is not installed"
    yield refused("model", f"neither dagrl nor {other} describes {config['model_type']} as a GPTModel of transformers")
    if bridge is not None:
        lack = "transformers lacks" if bridge.target == "GPTModel" else f"it builds a {bridge.target} for"
        yield hint("megatron-bridge", f"has {bridge.name}, which dagrl cannot use: {lack} {config['model_type']}")
    yield _compared(config, _nearest(config))


def _compared(config: HfConfig, near: Family) -> Finding:
    """Compare a model without a family with the nearest one."""
    types = config_class(str(config["model_type"])).types or config
    known = config_class(near.model_type).types.keys() | _read_by(near, config)
    lacks = sorted(_telling(config).keys() & types.keys() - known)
    others: list[str] = []
    with suppress(*_MALFORMED):
        others = [message for _, message in near.unsupported(near.fields(config))]
    text = f"does not know {listed(lacks)}" if lacks else "knows all fields that this config sets"
    return hint("nearest family", "; ".join([f"{near.model_type} {text}", *others]))


def _nearest(config: HfConfig) -> Family:
    """Return the family with the same class, or the one that lacks the fewest fields."""
    own, classes = config.keys(), auto_classes("MODEL_FOR_CAUSAL_LM")

    def likeness(name: str) -> tuple[bool, int, int]:
        theirs = config_class(name).types.keys()
        return classes.get(name) in _architectures(config), -len(own - theirs), -len(theirs - own)

    return family_named(max(family_names(), key=likeness))


def _telling(config: HfConfig) -> dict[str, Any]:
    """Return the fields that may change what a model computes: neither common to all models nor switched off."""
    common = fields_of_class(source_of("transformers", "configuration_utils.py") or "", "PreTrainedConfig")
    return {
        name: value
        for name, value in config.items()
        if value and name not in common and not _WITHOUT_EFFECT.fullmatch(name)
    }


def _architectures(config: HfConfig) -> list[str]:
    """Return the classes of the model, which a config.json may leave to its type."""
    named, model_type = config.get("architectures"), str(config["model_type"])
    if isinstance(named, list) and named:
        return [str(name) for name in named]
    mappings = (auto_classes("MODEL_FOR_IMAGE_TEXT_TO_TEXT"), auto_classes("MODEL_FOR_CAUSAL_LM"))
    return [mapping[model_type] for mapping in mappings if model_type in mapping][:1]


class _Recorder(dict[str, Any]):
    """A config that records which of its fields are read."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__(config)
        self.read: set[str] = set()

    def __contains__(self, name: object) -> bool:
        self.read.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


def _read_by(family: Family, config: HfConfig) -> set[str]:
    """Return the fields that reach the Megatron model, or that dagrl checks."""
    fields = family.fields(config)
    fields.maps[0] = recorder = _Recorder(config)
    scaling = config.get("rope_scaling")
    rope = {"rope_theta": config.get("rope_theta"), **(scaling if isinstance(scaling, Mapping) else {})}
    recorder.setdefault("rope_parameters", rope)  # as transformers does with older files
    recorder.read |= {"rope_theta", "rope_scaling"}
    steps: list[Callable[[ConfigFields], object]] = [
        family.shape,
        family.transformer_fields,
        lambda config: list(family.unsupported(config)),
    ]
    for step in steps if family.bridged else [*steps, family.rope_arguments]:
        with suppress(*_MALFORMED):
            step(fields)
    texts = [source_of("dagrl", f"backends/megatron/engine/{name}") or "" for name in _ENGINE]
    if family.bridged and (bridge := bridges().get(next(iter(_architectures(config)), ""))):
        models = bridge.file.parent
        texts += [
            path.read_text() for path in (*models.glob("*.py"), *models.parent.glob("conversion/model_bridge.py"))
        ]
    return recorder.read | {
        name for name in config if any(re.search(rf"\b{re.escape(name)}\b", text) for text in texts)
    }
