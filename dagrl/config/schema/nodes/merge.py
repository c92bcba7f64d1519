"""`merge`: makes one column of those that several nodes have written for different rows."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dagrl.config.schema.engine import EngineSpec
from dagrl.config.schema.nodes.base import NodeBase, OpContract
from dagrl.config.schema.section import Name


class MergeNode(NodeBase):
    """Takes each row from the first of several columns that has it: the teachers of different rows.

    A column lacks a row if all of the row's numbers are NaN or, in a column of integers, negative. It writes
    ``teacher_logprob``, or the column of another kind that `write` names.
    """

    op: Literal["merge"]
    columns: Annotated[tuple[Name, ...], Field(min_length=1)]
    """The columns, of one kind; the first that has a row gives it."""
    uncovered: Literal["stop", "skip"] = "stop"
    """Rows that no column has: end the run, naming a sample, or leave them out of distillation, by 0 in
    ``teacher_mask``; then only distillation can read the column."""

    def contract(self, engine: EngineSpec | None = None, declared: OpContract | None = None) -> OpContract:
        # By its own name, because it has the kind of the columns that it merges.
        written = self.write if isinstance(self.write, str) else _first(self.write or {})
        mask = ("teacher_mask",) if self.uncovered == "skip" else ()
        return OpContract(tuple(dict.fromkeys(self.columns)), (written, *mask), reads_if_written=("data_set",))

    def named(self, name: str, writes: tuple[str, ...]) -> dict[str, str]:
        return {writes[0]: name}


def _first(names: dict[str, str]) -> str:
    return next((column for column in names if column != "teacher_mask"), "teacher_logprob")
