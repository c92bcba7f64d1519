"""What nodes have in common; those of each family are declared in a module of their own, and joined in `nodes`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dagrl.config.schema.section import Name, PositiveInt, Section


class NodeBase(Section):
    """What every node may say."""

    read: dict[str, str] = Field(default_factory=dict)
    """Column the op reads -> where it comes from: another column, or ``node.column``."""
    read_from: tuple[Name, ...] = ()
    """Nodes that are meant where several write a column that the op reads, instead of saying so column by column."""
    write: str | dict[str, str] | None = None
    """Name of the column it writes, or (op's name -> name in this pipeline) where it writes several."""

    def written_as(self, column: str) -> str:
        """What the pipeline calls the column `column` of an op that writes no other."""
        return self.write.get(column, column) if isinstance(self.write, dict) else self.write or column


class TrainingNode(NodeBase):
    """What every node may say that trains an engine, in optimizer steps of one mini-batch each."""

    op: str
    """Names this kind of node."""
    engine: Name
    """The engine that is trained."""
    mini_batch: PositiveInt | None = None
    """Prompts in one optimizer step. Default: all of the step."""
    mini_batch_per_node: PositiveInt | None = None
    """Instead of `mini_batch`: prompts in one optimizer step for each machine, as with ``data.prompts_per_node``."""
    epochs: Annotated[int, Field(ge=1, le=1000)] = 1
    """Passes over the step's samples."""
    tokens_per_micro_batch: PositiveInt = 16384
    """Packed tokens in one forward and backward pass of a model replica."""

    def optimizer_steps(self, prompts_per_step: int) -> int:
        """Optimizer steps on one step's batch."""
        return -(-prompts_per_step // (self.mini_batch or prompts_per_step)) * self.epochs
