"""Find model families by the ``model_type`` of a config, and describe models with them.

Families are the modules of this package that define ``FAMILY``, and the entry points of installed packages in the group
``dagrl.families`` (name: the model type; value: a `Family` instance).
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from importlib.metadata import entry_points

import dagrl.backends.families as package
from dagrl.backends.families.base import Family
from dagrl.backends.families.bridge_models import bridge_models
from dagrl.backends.families.config_fields import ConfigFields, HfConfig
from dagrl.backends.families.generic import Generic
from dagrl.backends.families.shape import ModelShape
from dagrl.config.errors import suggest
from dagrl.config.schema import ModelSpec, Pipeline
from dagrl.model_files.hf_config import read_config
from dagrl.model_files.library_classes import config_class

ENTRY_POINTS = "dagrl.families"


class _Unknown(Family):
    """Models of other architectures, whose configs often have the usual names."""

    model_type = ""
    expert_count = ("num_experts", "num_local_experts", "n_routed_experts")


UNKNOWN = _Unknown()
"""A placeholder for an unknown family, in checks by names of fields."""


def find_family(model_type: object) -> Family | None:
    """Return the family with that model type; None if neither dagrl nor megatron-bridge has one."""
    if not isinstance(model_type, str):
        return None
    return _built_in().get(model_type) or installed_families().get(model_type) or _generic(model_type)


def family_named(model_type: object) -> Family:
    """Return the family with that model type. ValueError with the known ones for an unknown type."""
    family = find_family(model_type)
    if family is None:
        raise ValueError(f"no family has the model type {model_type!r}; known are {', '.join(family_names())}")
    return family


def unknown_family(model_type: str) -> str:
    return f"the megatron engine has no model type {model_type!r}; {suggest(model_type, family_names())}"


def family_names() -> list[str]:
    return list(_built_in() | installed_families())


def shape_of(config: HfConfig) -> ModelShape:
    """Return the shape that a Hugging Face config describes. ValueError for an unknown family, or a missing size."""
    family = family_named(config.get("model_type"))
    return family.shape(family.fields(config))


def model_shape(model: ModelSpec) -> ModelShape:
    """Return the shape of a pipeline's model. ValueError, with a remedy, if it is unknown."""
    return shape_of(read_config(model))


def engine_shape(pipeline: Pipeline, engine: str, shape: ModelShape) -> ModelShape:
    """Return the shape of an engine's model; `shape` is the pipeline's. ValueError as in `model_shape`."""
    return shape if pipeline.model_section(engine) == ("model",) else model_shape(pipeline.model_of(engine))


def buildable(config: HfConfig) -> tuple[Family, ConfigFields]:
    """Return the family and the fields of a config. ValueError for one that the Megatron backend does not build."""
    family = find_family(config.get("model_type"))
    if family is None:
        raise ValueError(unknown_family(str(config.get("model_type"))))
    fields = family.fields(config)
    for _, reason in family.unsupported(fields):
        raise ValueError(reason)
    return family, fields


@cache
def _generic(model_type: str) -> Family | None:
    if model_type not in bridge_models():
        return None
    types = config_class(model_type).types
    width = UNKNOWN.expert_width if UNKNOWN.expert_width in types else "intermediate_size"
    return Generic(model_type, tuple(name for name in UNKNOWN.expert_count if name in types), width)


@cache
def _built_in() -> dict[str, Family]:
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    families = [getattr(module, "FAMILY", None) for module in modules]
    return {family.model_type: family for family in families if isinstance(family, Family)}


@cache
def installed_families() -> dict[str, Family]:
    return {point.name: point.load() for point in entry_points(group=ENTRY_POINTS)}
