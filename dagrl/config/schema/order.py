"""``data.order``: which prompts each step takes."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, FiniteFloat, model_validator

from dagrl.config.schema.section import Name, OwnFunction, PositiveInt, Section, Weight

Fraction = Annotated[float, Field(ge=0, le=1)]
_STEPS = Annotated[int, Field(ge=0, le=2**31 - 1)]


class StageSpec(Section):
    """Weights of the sources for a part of the run. A stage without `until_step` and `until_metric` is the last one."""

    weights: Annotated[dict[Name, Weight], Field(min_length=1)]
    """Source -> weight; a source that is not named has the weight 0."""
    until_step: PositiveInt | None = None
    """Last step of the stage."""
    until_metric: Annotated[dict[str, FiniteFloat], Field(min_length=1)] | None = None
    """Metric in metrics.jsonl -> value; the stage ends when a step has reached all of them."""
    move_over: _STEPS = 0
    """Steps in which the weights move linearly from the previous stage's."""

    @model_validator(mode="after")
    def _check_weights(self) -> StageSpec:
        if not any(self.weights.values()):
            raise ValueError("each source has the weight 0; give one of them a weight above 0")
        return self


class AdaptiveSpec(Section):
    """Draws prompts by their last pass rates, the fraction of samples with a reward of at least ``val_pass_reward``.

    Prompts in the band, new prompts, and prompts above the band after their pause have the weight 1.
    """

    band: tuple[Fraction, Fraction] = (0.2, 0.8)
    """The preferred pass rates, both ends included."""
    skip_solved_for: _STEPS = 20
    """Steps for which a prompt above the band is paused."""
    priority: Literal["advantage", "pass_rate"] = "pass_rate"
    """Weight of prompts below the band: the last mean |advantage|, at most 1, or 1 - pass rate."""
    floor: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Lowest weight of a prompt that is not paused."""

    @model_validator(mode="after")
    def _check_band(self) -> AdaptiveSpec:
        if self.band[0] > self.band[1]:
            raise ValueError(f"`band` ends at {self.band[1]} before it begins at {self.band[0]}; swap the two")
        return self


class OrderSpec(Section):
    """An order with options."""

    by: Annotated[str, Field(min_length=1)] | None = None
    """Column, or field of a struct such as ``extra_info.steps``: prompts come in the order of its values, the same in
    each epoch."""
    descending: bool = False
    """With `by`: the largest value first."""
    adaptive: AdaptiveSpec | None = None
    """Prefer prompts that the policy sometimes solves."""
    stages: tuple[StageSpec, ...] = ()
    """Weights of the sources that change over the run; prompts of a source are shuffled, or ordered by `by` or
    `adaptive`."""
    sampler: OwnFunction | None = None
    """Your own sampler: ``module:Class``. See docs/curriculum.md."""
    args: dict[str, object] = Field(default_factory=dict)
    """Arguments of the sampler's constructor."""

    @model_validator(mode="after")
    def _check_parts(self) -> OrderSpec:
        if self.sampler is not None and (self.by or self.adaptive or self.stages):
            raise ValueError("`sampler` replaces `by`, `adaptive` and `stages`; remove them")
        if self.by is not None and self.adaptive is not None:
            raise ValueError("has both `by` and `adaptive`; keep one")
        if self.descending and self.by is None:
            raise ValueError("`descending` needs `by`; add the column")
        if self.args and self.sampler is None:
            raise ValueError("`args` needs `sampler`; add it")
        for number, stage in enumerate(self.stages, 1):
            ends = stage.until_step is not None or stage.until_metric is not None
            if not ends and number < len(self.stages):
                raise ValueError(f"stage {number} has no end; give it `until_step` or `until_metric`")
        if self.stages and self.stages[0].move_over:
            raise ValueError("the first stage has nothing to move from; remove its `move_over`")
        return self


def _check_name(order: str) -> str:
    if order in ("shuffled", "file") or re.fullmatch(r"[\w.]+:\w+", order):
        return order
    raise ValueError(f"`{order}` is not an order; write shuffled, file, your own as `module:Class`, or a section")


OrderName = Annotated[str, AfterValidator(_check_name)]
"""``shuffled``, ``file``, or the user's sampler."""
