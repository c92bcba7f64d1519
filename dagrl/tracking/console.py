"""The terminal: one line per step, with progress bars below.

If the output is not a terminal there are no bars, and each line names its metrics.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path

from rich.console import Console as Terminal
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from dagrl.tracking.base import Progress
from dagrl.tracking.run_notes import run_notes

QUIET_S = 10.0
"""Time between two lines about a rollout, if the output is not a terminal."""
STEPS_PER_HEADING = 20
"""Rows between two lines of headings in a terminal."""
_WIDTH = 7

COLUMNS: tuple[tuple[str, tuple[str, ...], Callable[[float], str]], ...] = (
    ("reward", ("reward/mean",), "{:.3f}".format),
    ("margin", ("dpo/margin",), "{:.3f}".format),
    ("loss", ("loss/policy", "loss/dpo", "loss/sft"), "{:.4f}".format),
    ("teacher", ("distillation/loss", "distillation/kl"), "{:.4f}".format),
    ("kl", ("kl/ref",), "{:.5f}".format),
    ("entropy", ("entropy",), "{:.3f}".format),
    ("tokens", ("response_tokens/mean", "demonstration_tokens/mean"), "{:.1f}".format),
    ("staleness", ("staleness/mean",), "{:.2f}".format),
    ("grad norm", ("grad_norm",), "{:.3f}".format),
    ("tokens/s", ("throughput/tokens_per_s",), "{:,.0f}".format),
    ("seconds", ("time/step_s",), "{:.2f}".format),
)
"""Heading, metrics (the first available one is shown), format. ``tokens`` is the mean length of a response,
``teacher`` the divergence from a teacher."""
_OF_EVERY_POLICY = ("reward", "loss")
"""Headings that are also shown for policies beside the first."""

VALIDATION = (
    ("val/reward/mean", "reward"),
    ("val/response_tokens/mean", "tokens"),
    ("val/loss/dpo", "loss of dpo"),
    ("val/dpo/accuracy", "accuracy of dpo"),
    ("val/loss/sft", "loss of sft"),
)
"""Metric and heading of a validation's line."""


OF_A_SET = re.compile(r"val/(.+/mean@\d+)")
"""Metrics of a single validation set or data source."""
VISIBLE_SETS = 8
"""Number of them shown per validation. metrics.jsonl has all."""


class Verbosity(Enum):
    """How much a run prints."""

    QUIET = "quiet"
    """Nothing: failures and warnings are printed by `dagrl run` itself."""
    NORMAL = "normal"
    VERBOSE = "verbose"
    """Also every metric of each step."""


class _Terminal(Terminal):
    """Standard output; silent after its reader has gone, because a closed pipe or terminal must not end a run."""

    def _write_buffer(self) -> None:
        try:
            super()._write_buffer()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            # A closed terminal; rich handles only pipes.
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True
        # Python flushes stdout at exit, which must not fail either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _values(metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Heading and text of each shown metric of a step, in the order of `COLUMNS`."""
    for heading, names, form in COLUMNS:
        name = next((name for name in names if name in metrics), None)
        if name is not None:
            yield heading, form(metrics[name])
        if heading in _OF_EVERY_POLICY:
            others = (pair for name_of_first in names for pair in same_of_others(name_of_first, metrics))
            yield from ((f"{heading} {other}", form(metrics[metric])) for metric, other in others)


class Console:
    """Shows the run in the terminal."""

    def __init__(
        self,
        total_steps: int,
        terminal: Terminal | None = None,
        clock: Callable[[], float] = time.monotonic,
        verbosity: Verbosity = Verbosity.NORMAL,
    ) -> None:
        """`total_steps` of the whole run; `terminal` defaults to standard output. `clock` returns seconds."""
        self._terminal = terminal or _Terminal(highlight=False)
        self._terminal.quiet = verbosity is Verbosity.QUIET
        self._is_verbose = verbosity is Verbosity.VERBOSE
        self._total_steps = total_steps
        self._headings: list[str] = []
        self._rows = 0
        """Steps since the last line of headings."""
        self._is_stale = False
        """Whether any step used samples of older weights; only then their age is shown."""
        self._progress = Bars(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("elapsed"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            auto_refresh=False,
        )
        self._task = self._progress.add_task("steps", total=total_steps, start=False)
        self._rollout = Bars(
            TextColumn("{task.description}"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[rate]}"),
            auto_refresh=False,
        )
        self._prompts = self._rollout.add_task("", visible=False, rate="")
        self._clock = clock
        self._quiet_until: float | None = None
        """Earliest time of the next line about a rollout; None if none is running."""
        self._live: Live | None = None
        self._config: Mapping[str, object] = {}
        self._told_notes: set[str] = set()
        """Metrics that a note has been about."""

    def start(self, run_dir: Path, config: Mapping[str, object], resumed_step: int | None) -> None:
        """Start drawing; progress counts from `resumed_step`."""
        self._config = config
        self._progress.update(self._task, completed=resumed_step or 0)
        self._progress.start_task(self._task)
        if self._terminal.is_terminal and not self._terminal.is_dumb_terminal and not self._terminal.quiet:
            self._live = Live(
                console=self._terminal,
                get_renderable=lambda: Group(self._progress, self._rollout),
                refresh_per_second=2,
            )
            self._live.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a step; a validation gets its own line."""
        if step > 0:
            self._progress.update(self._task, completed=step)
            self._is_stale |= metrics.get("staleness/mean", 0.0) > 0
            values = {head: value for head, value in _values(metrics) if head != "staleness" or self._is_stale}
            if not values:  # it was trained before, and is validated now
                pass
            elif self._live is None:
                shown = "  ".join(f"{head} {value}" for head, value in values.items())
                self._line(f"step {step}/{self._total_steps}  {shown}")
            else:
                self._row(step, values)
        if self._is_verbose:
            for name in sorted(metrics):
                self._line(f"  {name} {metrics[name]:.6g}")
        validation = [f"{head} {metrics[name]:.4g}" for name, head in VALIDATION if name in metrics]
        others = same_of_others("val/reward/mean", metrics)
        validation += [f"reward {other} {metrics[name]:.4g}" for name, other in others]
        sets = [(match[1], value) for name, value in metrics.items() if (match := OF_A_SET.fullmatch(name))]
        validation += [f"{head} {value:.4g}" for head, value in sets[:VISIBLE_SETS]]
        if validation:
            of = f"/{self._total_steps}" if self._total_steps else ""
            self._line(f"step {step}{of} validation  " + "  ".join(validation))
        for metric, note in run_notes([metrics], self._config).items():
            if metric not in self._told_notes:
                self._told_notes.add(metric)
                self._line(f"step {step}: {note}")
        if self._live is not None:
            self._live.refresh()

    def progress(self, progress: Progress) -> None:
        """Show the progress of a rollout: a bar, or a line every `QUIET_S` seconds."""
        over = progress.done >= progress.total
        rate = f"{progress.tokens:,} tokens  {progress.tokens / max(progress.seconds, 1e-9):,.0f} tokens/s"
        if self._live is not None:
            self._rollout.update(
                self._prompts,
                # With overlapping steps it may not be the next step shown.
                description=f"{progress.name} of step {progress.step}",
                completed=progress.done,
                total=progress.total,
                rate=rate,
                visible=not over,
            )
            return
        now = self._clock()
        if over or self._quiet_until is None:
            self._quiet_until = None if over else now + QUIET_S
        elif now >= self._quiet_until:
            self._quiet_until = now + QUIET_S
            done = f"{progress.name} {progress.done}/{progress.total} prompts"
            self._line(f"step {progress.step}/{self._total_steps}  {done}  {rate}")

    @property
    def is_quiet(self) -> bool:
        return self._terminal.quiet

    def note(self, message: str) -> None:
        self._line(message)

    def close(self, ok: bool) -> None:
        """Keep the last bar on the screen and restore the cursor."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _row(self, step: int, values: Mapping[str, str]) -> None:
        new = [head for head in values if head not in self._headings]
        if new or self._rows == STEPS_PER_HEADING:
            order = [head for head, _, _ in COLUMNS]
            # Columns of other policies follow the first one's column of the same heading.
            self._headings = sorted([*self._headings, *new], key=lambda head: _place(head, order))
            self._rows = 0
        if self._rows == 0:
            self._line("  ".join(["step", *(head.rjust(_WIDTH) for head in self._headings)]), style="bold")
        self._rows += 1
        cells = (values.get(head, "-").rjust(max(_WIDTH, len(head))) for head in self._headings)
        self._line("  ".join([str(step).rjust(len("step")), *cells]))

    def _line(self, text: str, style: str | None = None) -> None:
        # soft_wrap: a log file has no width.
        self._terminal.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
        self._terminal.file.flush()


def _place(heading: str, order: list[str]) -> int:
    """Position of a heading, which may end with the name of another policy."""
    return next(place for place, head in enumerate(order) if heading == head or heading.startswith(f"{head} "))


_REWARD = "reward/mean"
_PARTS_OF_REWARD = frozenset(
    ("mean", "std", "cosine", "length", "overlong", "failed_fraction", "cut_fraction", "cut_mean")
)
"""Names after ``reward/`` that belong to the first reward."""


def same_of_others(name: str, metrics: Iterable[str]) -> list[tuple[str, str]]:
    """The metric `name` of other policies in `metrics`: full name, and its node or reward."""
    where = "val/" if name.startswith("val/") else ""
    plain = name.removeprefix(where)
    others = []
    for metric in metrics:
        if not metric.startswith(where):
            continue
        rest = metric.removeprefix(where)
        if plain == _REWARD:
            first, _, other = rest.partition("/")
            is_other = first == "reward" and other not in _PARTS_OF_REWARD
        else:
            other = rest.removesuffix(f"/{plain}")
            is_other = other != rest and other != "val"
        if is_other and "/" not in other:
            others.append((metric, other))
    return others
