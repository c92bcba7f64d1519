"""A model's architecture, held against what the megatron engine builds: it would find out when ranks have started."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any

from dagrl.backends.registry import backend_of
from dagrl.config.errors import Place, suggest
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import Pipeline
from dagrl.models.architecture import unsupported
from dagrl.models.config_class import model_defaults
from dagrl.models.families import FAMILIES


def check_family(
    pipeline: Pipeline, names: Sequence[str], section: Place, config: Mapping[str, Any], findings: Findings
) -> None:
    """Report what megatron engines cannot build of the model that the engines `names` have.

    `section` is where the file says the model's config, ``model.init`` or ``model.path``. The config has no values that
    `wrong_values` finds.
    """
    native = [name for name in names if backend_of(pipeline.engines[name]).builds_family_itself(pipeline.engines[name])]
    family = config.get("model_type")
    if not native or not isinstance(family, str):
        return
    depends: list[Place] = [("engines", name, "bridge") for name in native]
    if family not in FAMILIES:
        message = f"the megatron engine has no model type {family!r}; {suggest(family, FAMILIES)}"
        findings.error(said_at(section, "model_type"), message, depends_on=depends)
        return
    fields = ChainMap(dict(config), model_defaults(family))
    for field, message in unsupported(fields):
        findings.error(said_at(section, field), message, depends_on=depends)
    normalised = family == "mixtral" or (family == "qwen3_moe" and fields.get("norm_topk_prob"))
    if normalised and fields.get("num_experts_per_tok") == 1:
        message = "the weight of a single chosen expert is always 1, so routers get no gradient and stay as they are"
        findings.warning(said_at(section, "num_experts_per_tok"), f"{message}; choose 2 or more to train them")


def said_at(section: Place, field: str) -> Place:
    """Where the file says a field of the config: itself in ``init``, the whole folder otherwise."""
    return (*section, field) if section[-1] == "init" else section
