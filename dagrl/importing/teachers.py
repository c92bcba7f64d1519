"""Teachers of on-policy distillation, which the tables of several frameworks write."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import get_args

from dagrl.config.schema.nodes.distillation import SampledDivergence
from dagrl.importing.parts import put_logprob
from dagrl.importing.table import Translation

ADVANTAGE = "nodes.advantage.distillation"
LOSS = "nodes.update.loss.distillation"
SAMPLED = get_args(SampledDivergence)
SERVED = "a teacher is a Megatron-core engine here, which computes log-probs alone"


def engine_name(name: str) -> str:
    """Convert a framework's name of a teacher to a name of an engine."""
    plain = re.sub(r"\W", "_", name.lower())
    return plain if plain[:1].isalpha() else f"teacher_{plain}"


def put_teachers(
    t: Translation, teachers: Mapping[str, Sequence[object] | None], column: str, *, candidates: bool = False
) -> list[str]:
    """Put the nodes of teachers: engine -> the values of `column` whose rows it reads; None: all rows.

    With `candidates` the nodes also write these; the caller must put `top_k`. Returns the nodes' names.
    """
    for engine in teachers:
        t.put(f"engines.{engine}.backend", "megatron")
    if len(teachers) == 1 and None in teachers.values():
        put_logprob(t, "teacher", next(iter(teachers)), "teacher_logprob")
        return ["teacher"]
    for engine, values in teachers.items():
        put_logprob(t, f"{engine}_logprob", engine, f"{engine}_logprob")
        if values is not None:
            t.put(f"nodes.{engine}_logprob.rows", {column: list(values)})
    merged = {"topk_ids": "teacher_ids", "topk_logprob": "teacher"} if candidates else {"logprob": "teacher"}
    for name, node in merged.items():
        t.put(f"nodes.{node}.op", "merge")
        t.put(f"nodes.{node}.columns", [f"{engine}_{name}" for engine in teachers])
        if candidates:
            t.put(f"nodes.{node}.write", f"teacher_{name}")
    return [f"{engine}_logprob" for engine in teachers]


def without_policy(t: Translation, reason: str) -> None:
    """Reduce the loss to distillation: without advantages, and without nodes that only advantages read."""
    t.put("nodes.update.loss.policy", "none")
    unread = ("nodes.advantage.", "nodes.old.", "nodes.held.", "nodes.values.", "nodes.update.read")
    for target in [key for key in t.tree if key.startswith(unread)]:
        t.drop(target, reason)
