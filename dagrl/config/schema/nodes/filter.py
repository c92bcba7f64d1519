"""`filter`: selects the groups that a step trains on (dynamic sampling)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from dagrl.config.schema.engine import EngineSpec
from dagrl.config.schema.nodes.base import NodeBase, OpContract, Scope
from dagrl.config.schema.section import Coefficient, Name, OwnFunction, PositiveInt, Section


class SourceBounds(Section):
    """Bounds of one source. Bounds that are not set here are the node's."""

    lower: FiniteFloat | None = None
    """A group passes if its mean is above this."""
    upper: FiniteFloat | None = None
    """A group passes if its mean is below this."""
    min_std: Coefficient | None = None
    """A group passes if its standard deviation is above this."""


class FilterNode(NodeBase):
    """Keeps only the groups with a learning signal: dynamic sampling.

    The nodes before it run in rounds, each on new prompts, until ``data.prompts_per_step`` groups have passed. All
    other nodes work on these groups alone. Validation is not filtered.
    """

    op: Literal["filter"]
    metric: Name = "reward"
    """The column to filter by: one with a number for each sample."""
    lower: FiniteFloat | None = None
    """A group passes if its mean is above this."""
    upper: FiniteFloat | None = None
    """A group passes if its mean is below this."""
    min_std: Coefficient | None = None
    """A group passes if its standard deviation is above this. Default: 0 without `lower` and `upper`, so that groups of
    equal values are rejected."""
    by_source: dict[Name, SourceBounds] = Field(default_factory=dict)
    """Other bounds for the groups of single sources, by their names."""
    fn: OwnFunction | None = None
    """Your own rule instead, ``module:function``: it takes columns of a group by name and returns whether it
    passes."""
    args: dict[str, object] = Field(default_factory=dict)
    """Further keyword arguments of `fn`."""
    prompts_per_round: PositiveInt | None = None
    """Prompts of the first round, and the most of a later round, which takes as many as are likely to be missing.
    Default: ``data.prompts_per_step``. More prompts make further rounds rare; surplus groups are discarded."""
    max_rounds: PositiveInt = 10
    """Rounds in which a step must become full."""
    when_short: Literal["stop", "fill"] = "stop"
    """If it does not: end the run, or fill the step with groups that did not pass."""
    expected_kept_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Expected fraction of groups that pass, for `dagrl plan` only. Default: the plan has one round."""

    @property
    def least_std(self) -> float | None:
        """Lower bound of a group's standard deviation, if there is one."""
        return 0.0 if self.min_std is None and self.lower is None and self.upper is None else self.min_std

    def bounds_of(self, source: str) -> FilterNode:
        """The node with the bounds of a source."""
        own = self.by_source.get(source)
        # A bound of a source does not remove the default that the node has without bounds.
        return (
            self.model_copy(update={"min_std": self.least_std, **own.model_dump(exclude_unset=True)}) if own else self
        )

    @property
    def user_function(self) -> tuple[tuple[str, ...], str] | None:
        return (("fn",), self.fn) if self.fn else None

    def contract(self, engine: EngineSpec | None = None, declared: OpContract | None = None) -> OpContract:
        columns = declared.reads if declared else (self.metric,)
        # Only a whole round shows whether another one is needed.
        reads = tuple(dict.fromkeys(("group_id", *columns, *(("data_set",) if self.by_source else ()))))
        return OpContract(reads, (), Scope.BATCH, reads_if_written=() if "excluded" in reads else ("excluded",))
