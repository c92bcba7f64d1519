"""`filter`: selects the groups that a step trains on (dynamic sampling)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from dagrl.config.schema.engine import EngineSpec
from dagrl.config.schema.nodes.base import NodeBase, OpContract, Scope
from dagrl.config.schema.section import Coefficient, Name, OwnFunction, PositiveInt, Section


class SourceBounds(Section):
    """Bounds of one source; those that it does not name are the node's."""

    lower: FiniteFloat | None = None
    """A group passes if its mean is above this."""
    upper: FiniteFloat | None = None
    """A group passes if its mean is below this."""
    min_std: Coefficient | None = None
    """A group passes if its standard deviation is above this."""


class FilterNode(NodeBase):
    """Takes only groups that something can be learned from into the step: dynamic sampling.

    What comes before it runs in rounds, each on new prompts, until ``data.prompts_per_step`` groups have passed.
    Everything else works on those alone. Validation is not filtered.
    """

    op: Literal["filter"]
    metric: Name = "reward"
    """The column that is looked at: one with a number for each sample."""
    lower: FiniteFloat | None = None
    """A group passes if its mean is above this."""
    upper: FiniteFloat | None = None
    """A group passes if its mean is below this."""
    min_std: Coefficient | None = None
    """A group passes if its standard deviation is above this. Default: 0 where there is neither `lower` nor `upper`, so
    that its values are not all the same."""
    by_source: dict[Name, SourceBounds] = Field(default_factory=dict)
    """Other bounds for the groups of single sources, by their names."""
    fn: OwnFunction | None = None
    """Your own rule instead, ``module:function``: it takes columns of a group by name and returns whether it
    passes."""
    args: dict[str, object] = Field(default_factory=dict)
    """Further keyword arguments of `fn`."""
    prompts_per_round: PositiveInt | None = None
    """Prompts of the first round, and of a later one at most: those take as many as are likely to be missing. Default:
    ``data.prompts_per_step``. More of them make further rounds rare; what is left over is thrown away."""
    max_rounds: PositiveInt = 10
    """Rounds in which a step has to be full."""
    when_short: Literal["stop", "fill"] = "stop"
    """When it is not: end the run, or fill the step up with groups that did not pass."""
    expected_kept_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Part of the groups that will pass, for `dagrl plan` alone. Default: it counts with one round."""

    @property
    def least_std(self) -> float | None:
        """Lower bound of a group's standard deviation, if there is one."""
        return 0.0 if self.min_std is None and self.lower is None and self.upper is None else self.min_std

    def bounds_of(self, source: str) -> FilterNode:
        """The node with the bounds of a source."""
        own = self.by_source.get(source)
        # A bound of a source does not take away the default that the node has without bounds.
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
