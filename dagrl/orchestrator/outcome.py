"""The outcome of a run and its summary."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dagrl.tracking.report import in_a_line, read_run, scores

_CONTENTS = {
    "metrics.jsonl": "metrics, one line a step",
    "samples": "responses of the policy, as parquet",
    "timeline.json": "timeline: open it in ui.perfetto.dev",
    "profile": "traces of the profiled steps, by step",
    "tensorboard": "tensorboard --logdir",
    "checkpoints": "where `dagrl run` goes on",
}


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The end of a successful run."""

    step: int
    """Newest finished step."""
    stopped: bool
    """Whether the user stopped it before its last step."""
    out_of_time: bool = False
    """Whether ``run.stop_after`` stopped it."""
    before: bool = False
    """Whether the run had finished before."""
    changed: str = ""
    """How the pipeline differs from that of the finished run."""
    seconds: float | None = None
    """Duration since this start."""
    only_validated: bool = False
    """Whether the run has validated step `step`, and trained nothing."""
    policies: tuple[str, ...] = ()
    """Trained engines whose weights can be exported."""

    def summary(self, folder: Path) -> str:
        """Text for the user: the last step, the results, the files and the next commands."""
        took = "" if self.seconds is None else f" in {in_words(self.seconds)}"
        lines = [f"finished step {self.step}{took}"]
        if self.only_validated:
            weights = f"the checkpoint of step {self.step}" if self.step else "the start weights"
            lines = [f"validated {weights}{took}"]
        elif self.stopped:
            why = ", as run.stop_after says" if self.out_of_time else ""
            lines = [f"stopped after step {self.step}{took}{why}; `dagrl run` with the same folder goes on"]
        elif self.before:
            lines = [
                f"finished step {self.step} before; nothing is left to do, a larger run.steps (or run.epochs) goes on"
            ]
            if self.changed:
                lines.append(f"  without effect, and not noted in the folder: {self.changed}")
        with suppress(ValueError):  # the metrics may have been removed meanwhile
            run = read_run(folder)
            lines += [
                f"  {told}" for told in (scores(run, self.step) if self.only_validated else [in_a_line(run)]) if told
            ]
        for name, what in _CONTENTS.items():
            if (folder / name).exists():
                lines.append(f"  {folder / name}  {what}")
        return "\n".join([*lines, "next", *(f"  {command}" for command in self._next(folder))])

    def _next(self, folder: Path) -> list[str]:
        run, name = shlex.quote(str(folder)), folder.resolve().name
        several = len(self.policies) > 1
        # The validation before the first step leaves no checkpoint.
        policies = self.policies if self.step and not self.only_validated else ()
        exports = [
            f"dagrl export {run} -o {shlex.quote(f'{name}-{policy}-hf')} --engine {policy}"
            if several
            else f"dagrl export {run} -o {shlex.quote(f'{name}-hf')}"
            for policy in policies
        ]
        return [f"dagrl report {run}", *exports]


def in_words(seconds: float) -> str:
    """A duration: ``36 s``, ``12 min``, ``3 h 05 min``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
