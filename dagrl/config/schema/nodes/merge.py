"""`merge`: combines columns that several nodes wrote for different rows."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dagrl.config.schema.engine import EngineSpec
from dagrl.config.schema.nodes.base import NodeBase, OpContract
from dagrl.config.schema.section import Name


class MergeNode(NodeBase):
    """Takes each row from the first of several columns that has the row, for example of several teachers.

    A column lacks a row if all of the row's numbers are NaN or, in a column of integers, negative. It writes
    ``teacher_logprob``, or a column of another kind, which `write` names.
    """

    op: Literal["merge"]
    columns: Annotated[tuple[Name, ...], Field(min_length=1)]
    """The columns, of one kind, in order of precedence."""
    uncovered: Literal["stop", "skip"] = "stop"
    """Treatment of rows that no column has: end the run and name a sample, or exclude them from distillation by 0 in
    ``teacher_mask``; then only distillation can read the column."""

    def contract(self, engine: EngineSpec | None = None, declared: OpContract | None = None) -> OpContract:
        # The column's kind is that of the columns that are merged, so its name in the pipeline is used.
        written = self.write if isinstance(self.write, str) else _first(self.write or {})
        mask = ("teacher_mask",) if self.uncovered == "skip" else ()
        return OpContract(tuple(dict.fromkeys(self.columns)), (written, *mask), reads_if_written=("data_set",))

    def named(self, name: str, writes: tuple[str, ...]) -> dict[str, str]:
        return {writes[0]: name}


def _first(names: dict[str, str]) -> str:
    return next((column for column in names if column != "teacher_mask"), "teacher_logprob")
