"""``sft``: trains an engine on the likelihood of the data set's responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dagrl.algorithms.sft import SftObjective
from dagrl.config.schema import SftNode
from dagrl.ops.base import Context, OpInput, Output
from dagrl.ops.demonstrations import learn


def sft(parts: Sequence[OpInput], context: Context) -> Iterator[Output]:
    node = context.declared(SftNode)
    longest = context.pipeline.data.max_response_tokens
    return learn(parts, context, SftObjective(node.aggregation, longest))
