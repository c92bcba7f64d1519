"""How well a node has used its ranks in a step: tokens a second, model FLOPs utilization, memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from dagrl.scheduler.intervals import busy_seconds
from dagrl.workers.messages import Effort, Span


@dataclass(slots=True)
class TaskUse:
    """What all runs of one task in a step have taken of its ranks."""

    ranks: int = 0
    """Ranks of the task's engine, idle ones included."""
    _spans: list[Span] = field(default_factory=list)
    _efforts: list[Effort] = field(default_factory=list)

    def add(self, span: Span, effort: Effort) -> None:
        """Keep what one rank says of a part of a run."""
        self._spans.append(span)
        self._efforts.append(effort)

    def metrics(self, task: str) -> dict[str, float]:
        """By the names of the contract; what is not known on every rank is left out."""
        rank_seconds = busy_seconds(self._spans) * self.ranks
        if rank_seconds <= 0:
            return {}
        tokens = sum(effort.tokens for effort in self._efforts)
        found = {f"throughput/{task}_tokens_per_s_per_gpu": tokens / rank_seconds}
        flops = [effort.flops for effort in self._efforts if effort.flops is not None]
        peaks = [effort.peak_flops_per_s for effort in self._efforts if effort.peak_flops_per_s is not None]
        if len(flops) == len(peaks) == len(self._efforts):
            # One group has GPUs of one kind; of several, the best is the honest measure.
            found[f"mfu/{task}"] = sum(flops) / (rank_seconds * max(peaks))
        memory = [effort.peak_bytes for effort in self._efforts if effort.peak_bytes is not None]
        if memory:
            found[f"memory/{task}_peak_gib"] = max(memory) / 2**30
        return found
