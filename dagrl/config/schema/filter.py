"""``filter``: which groups a step trains on, and how many more are rolled out for those that it does not."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat

from dagrl.config.schema.node_base import NodeBase
from dagrl.config.schema.section import Coefficient, OwnFunction, PositiveInt

ColumnName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]


class FilterNode(NodeBase):
    """Takes only groups that something can be learned from into the step: dynamic sampling.

    What comes before it runs in rounds, each on new prompts, until ``data.prompts_per_step`` groups have passed.
    Everything else works on those alone. Validation is not filtered.
    """

    op: Literal["filter"]
    """Names this kind of node."""
    metric: ColumnName = "reward"
    """The column that is looked at: one with a number for each sample."""
    lower: FiniteFloat | None = None
    """A group passes if its mean is above this."""
    upper: FiniteFloat | None = None
    """A group passes if its mean is below this."""
    min_std: Coefficient | None = None
    """A group passes if its standard deviation is above this. Default: 0 where there is neither `lower` nor `upper`, so
    that its values are not all the same."""
    fn: OwnFunction | None = None
    """Your own rule instead, ``module:function``: it takes columns of a group by their names and says whether it
    passes."""
    args: dict[str, Any] = Field(default_factory=dict)
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
        """What a group's standard deviation has to be above, if there is such a bound."""
        return 0.0 if self.min_std is None and self.lower is None and self.upper is None else self.min_std
