"""The pipeline file's reference, made from the schema: ``python -m dagrl.graph.reference > docs/pipeline.md``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAliasType, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dagrl.config.schema import (
    AdvantageNode,
    CosineRewardSpec,
    CovarianceNode,
    CriticNode,
    CustomNode,
    DataSpec,
    DpoNode,
    EngineSpec,
    FilterNode,
    GroupSpec,
    JudgeNode,
    KeepBestSpec,
    KlInRewardSpec,
    LengthRewardSpec,
    LogprobNode,
    LossSpec,
    MixNode,
    ModelSpec,
    OverlongBufferSpec,
    Pipeline,
    ProfileSpec,
    RewardModelNode,
    RewardNode,
    RolloutCorrectionSpec,
    RolloutNode,
    RunSpec,
    SamplingSpec,
    ScheduleSpec,
    SftNode,
    TokenizerSpec,
    TurnOptions,
    UpdateNode,
    ValuesNode,
    WeightSyncSpec,
)
from dagrl.config.schema.backends import engine_sections
from dagrl.graph.columns import CORE_COLUMNS


def _engines() -> Iterator[tuple[str, type[BaseModel]]]:
    """Every backend's section, and the sections in it that all engines do not have."""
    for name, section in engine_sections().items():
        yield f"engines.NAME, backend: {name}", section
        for key, field in section.model_fields.items():
            kind = field.annotation
            if key not in EngineSpec.model_fields and isinstance(kind, type) and issubclass(kind, BaseModel):
                yield f"engines.NAME.{key}", kind


_SECTIONS: tuple[tuple[str, type[BaseModel]], ...] = (
    ("The file", Pipeline),
    ("model", ModelSpec),
    ("model.tokenizer", TokenizerSpec),
    ("data", DataSpec),
    ("groups.NAME", GroupSpec),
    *_engines(),
    ("engines.NAME.weight_sync", WeightSyncSpec),
    ("nodes.NAME, op: rollout", RolloutNode),
    ("nodes.NAME, op: rollout, several turns", TurnOptions),
    ("nodes.NAME.sampling", SamplingSpec),
    ("nodes.NAME, op: reward", RewardNode),
    ("nodes.NAME, op: logprob", LogprobNode),
    ("nodes.NAME, op: advantage", AdvantageNode),
    ("nodes.NAME.kl_in_reward", KlInRewardSpec),
    ("nodes.NAME.overlong_buffer", OverlongBufferSpec),
    ("nodes.NAME.length_reward", LengthRewardSpec),
    ("nodes.NAME.cosine_reward", CosineRewardSpec),
    ("nodes.NAME, op: update", UpdateNode),
    ("nodes.NAME.loss", LossSpec),
    ("nodes.NAME.rollout_correction", RolloutCorrectionSpec),
    ("nodes.NAME, op: values", ValuesNode),
    ("nodes.NAME, op: critic", CriticNode),
    ("nodes.NAME, op: reward_model", RewardModelNode),
    ("nodes.NAME, op: judge", JudgeNode),
    ("nodes.NAME, op: filter", FilterNode),
    ("nodes.NAME, op: covariance", CovarianceNode),
    ("nodes.NAME, op: sft", SftNode),
    ("nodes.NAME, op: dpo", DpoNode),
    ("nodes.NAME, op: mix", MixNode),
    ("nodes.NAME, op: module:function", CustomNode),
    ("schedule", ScheduleSpec),
    ("run", RunSpec),
    ("run.keep_best", KeepBestSpec),
    ("profile", ProfileSpec),
)

_INTRODUCTION = """\
# The pipeline file

Made from the schema by `python -m dagrl.graph.reference`; a test keeps it up to date.

YAML, read with a safe loader. `extends: NAME` takes a file of `dag_templates/` (or a path) and keeps only differences:
mappings are merged, everything else is replaced, `null` takes a key away. `extends: [dapo, tiny]` lays several over
each other, the last one on top, and the file itself over all. Paths are relative to the file they stand in.
`dagrl run FILE engines.actor.optimizer.lr=3e-6` sets any key by its dotted path. Unknown keys are errors.
"""


def reference() -> str:
    """The whole reference, as Markdown."""
    parts = [_INTRODUCTION]
    for title, section in _SECTIONS:
        parts.append(
            f"## {title}\n\n{inspect.cleandoc(section.__doc__ or '')}\n\n| key | value | default | |\n|---|---|---|---|"
        )
        parts[-1] += "".join(f"\n{row}" for row in _rows(section)) + "\n"
    columns = [f"| `{each.name}` | {each.shape.value} | {each.meaning} |" for each in CORE_COLUMNS.values()]
    table = "| column | values | |\n|---|---|---|\n" + "\n".join(columns)
    parts.append(f"## Columns\n\nWhat nodes read and write; a column has one writer.\n\n{table}\n")
    return "\n".join(parts)


def _rows(section: type[BaseModel]) -> Iterator[str]:
    # Keys that a section takes over from another one have their place there.
    others = [other for _, other in _SECTIONS if other in section.__mro__[1:]]
    for name, field in section.model_fields.items():
        if any(name in other.model_fields for other in others):
            continue
        meaning = " ".join((field.description or "").split())
        yield f"| `{name}` | {_type(field.annotation)} | {_default(field)} | {meaning} |"


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None or isinstance(field.default, BaseModel):
        return "{}"
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None:
        return ""
    return f"`{list(field.default) if isinstance(field.default, tuple) else field.default}`"


def _type(annotation: Any) -> str:
    """A type in a user's words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, TypeAliasType):
        return _type(annotation.__value__)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return " \\| ".join(f"`{each}`" for each in arguments)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_type(each) for each in arguments if each is not NoneType))
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return f"name -> {_type(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    names = {"int": "whole number", "float": "number", "str": "text", "bool": "true or false", "Path": "path"}
    return names.get(getattr(annotation, "__name__", ""), "anything")


if __name__ == "__main__":
    print(reference(), end="")
