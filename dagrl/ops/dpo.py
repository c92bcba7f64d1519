"""``dpo``: trains an engine to prefer the first of a prompt's two responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dagrl.algorithms.dpo import DpoObjective
from dagrl.config.schema import DpoNode
from dagrl.ops.base import Context, OpInput, Output
from dagrl.ops.demonstrations import learn


def dpo(parts: Sequence[OpInput], context: Context) -> Iterator[Output]:
    node = context.declared(DpoNode)
    objective = DpoObjective(node.loss, beta=node.beta, label_smoothing=node.label_smoothing, sft_coef=node.sft_coef)
    return learn(parts, context, objective)
