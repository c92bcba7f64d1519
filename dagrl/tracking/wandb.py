"""Weights & Biases, online or offline. If it fails, the run continues and prints one note."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dagrl.config.schema import TrackerSpec
from dagrl.redact import hide_in_arguments
from dagrl.tracking.background_tracker import TrackerFailedError, failures_of, stable_id
from dagrl.tracking.base import SampleTable

if TYPE_CHECKING:
    import wandb

START_TIMEOUT_S = 60.0
"""Longest wait for the server when the run starts."""
FINISH_TIMEOUT_S = 120.0
"""Longest wait for uploads at the end; the rest stays in the run folder."""


class Wandb:
    """Logs to wandb; files are under ``wandb/`` in the run folder.

    Without a key (``WANDB_API_KEY``) and ``WANDB_MODE`` it works offline, and ``wandb sync`` uploads later. A resumed
    run keeps its wandb run, by an id in the run folder. wandb cannot remove steps, so metrics are plotted over their
    ``step``, and repeated steps appear twice.
    """

    def __init__(self, name: str, note: Callable[[str], None], spec: TrackerSpec) -> None:
        """`name` of the run; `note` prints a message. wandb's variables set options that `spec` omits."""
        self._name, self._note, self._spec = name, note, spec
        self._run: wandb.Run | None = None

    def start(self, run_dir: Path, config: Mapping[str, object], resumed_step: int | None) -> None:
        """Begin or resume the run; offline if the server does not answer."""
        mode: Literal["offline"] | None = None
        if not os.environ.keys() & {"WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE"}:
            mode = "offline"
        with self._forgiven():
            run_id = stable_id(run_dir / "wandb" / "run_id")
            try:
                with failures_of("wandb"):
                    self._run = self._begin(run_dir, config, run_id, mode)
            except TrackerFailedError as error:
                self._note(f"wandb: {error}; logging offline")
                # The failed start still holds the run's id in wandb's process.
                self._stop()
                self._run = self._begin(run_dir, config, run_id, "offline")
        if self._run is not None and self._run.offline:
            self._note(f"wandb: offline; upload with: wandb sync {run_dir / 'wandb'}/offline-run-*")
        elif self._run is not None and self._run.url:
            self._note(f"wandb: {self._run.url}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._run is not None:
            with self._forgiven():
                self._run.log({"step": step, **metrics})

    def samples(self, step: int, table: SampleTable) -> None:
        if self._run is not None:
            import wandb

            with self._forgiven():
                shown = wandb.Table(columns=list(table.columns), data=[*map(list, table.rows)])
                self._run.log({"step": step, "val/samples": shown})

    def close(self, ok: bool) -> None:
        """Upload the rest, mark the run as finished or failed, and end wandb's process."""
        if self._run is None:
            return
        with self._forgiven():
            self._run.finish(exit_code=0 if ok else 1)
        if self._run is not None:
            self._stop()

    def _begin(
        self, run_dir: Path, config: Mapping[str, object], run_id: str, mode: Literal["offline"] | None
    ) -> wandb.Run:
        import wandb

        settings = wandb.Settings(
            # wandb's output would disturb the live table, and it would capture the table.
            silent=True,
            console="off",
            init_timeout=START_TIMEOUT_S,
            finish_timeout=FINISH_TIMEOUT_S,
        )
        with _hidden_arguments():
            run = wandb.init(
                project=self._spec.project or os.environ.get("WANDB_PROJECT", "dagrl"),
                entity=self._spec.entity,
                group=self._spec.group,
                name=self._name,
                id=run_id,
                resume="allow",
                dir=run_dir,
                mode=mode,
                config=dict(config),
                settings=settings,
            )
        run.define_metric("*", step_metric="step")
        return run

    @contextmanager
    def _forgiven(self) -> Iterator[None]:
        try:
            with failures_of("wandb"):
                yield
        except TrackerFailedError as error:
            self._note(f"wandb stopped: {error}; metrics.jsonl has every step")
            self._stop()

    def _stop(self) -> None:
        """End wandb's process, a child that must not outlive the run."""
        self._run = None
        import wandb

        # The first failure has been reported already.
        with suppress(TrackerFailedError), failures_of("wandb"):
            wandb.teardown()


@contextmanager
def _hidden_arguments() -> Iterator[None]:
    """Context in which the arguments of this command, which wandb stores, have no secrets: overrides may set some."""
    given, sys.argv = sys.argv, hide_in_arguments(sys.argv)
    try:
        yield
    finally:
        sys.argv = given
