"""SwanLab, online or offline; files are under ``swanlab/`` in the run folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dagrl.config.schema import TrackerSpec
from dagrl.redact import hide_in_arguments, hide_secrets
from dagrl.tracking.background_tracker import TrackerFailedError, failures_of, stable_id
from dagrl.tracking.base import SampleTable

if TYPE_CHECKING:
    import swanlab


class SwanLab:
    """Logs to SwanLab: metrics, the pipeline as its configuration, samples as tables.

    Without a key (``SWANLAB_API_KEY`` or `swanlab login`) it works offline, and ``swanlab sync`` uploads later. A
    resumed run keeps its SwanLab run, by an id in the run folder.
    """

    def __init__(self, name: str, note: Callable[[str], None], spec: TrackerSpec) -> None:
        """`name` of the run; `note` prints a message. SwanLab's variables set options that `spec` omits."""
        self._name, self._note, self._spec = name, note, spec
        self._run: swanlab.Run | None = None

    def start(self, run_dir: Path, config: Mapping[str, object], resumed_step: int | None) -> None:
        """Begin or resume the run; offline if the server rejects it."""
        import swanlab

        # Its output would disturb the live table, and it has no public switch.
        with suppress(AttributeError):
            swanlab.pkg.console.c.quiet = True
        folder = (run_dir / "swanlab").resolve()
        settings = swanlab.Settings(
            interactive=False, terminal=swanlab.Settings.Terminal(proxy_type="none"), probe=_unprobed()
        )
        begin = partial(
            swanlab.init,
            project=self._spec.project or settings.project.name or "dagrl",
            workspace=self._spec.entity,
            group=self._spec.group,
            name=self._name,
            id=stable_id(folder / "run_id"),
            resume="allow",
            log_dir=str(folder),
            config=dict(config),
            settings=settings,
        )
        try:
            with failures_of("swanlab"):
                no_key = settings.mode == "online" and settings.api_key is None
                self._run = begin(mode="offline" if no_key else settings.mode)
        except TrackerFailedError as error:
            self._note(f"swanlab: {error}; logging offline")
            self._run = begin(mode="offline")
        if self._run.mode == "online":
            self._note(f"swanlab: {self._run.url}")
        else:
            self._note(f"swanlab: {self._run.mode}; upload with: swanlab sync {self._run.dir}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        assert self._run is not None, "log before start"
        self._run.log({name: float(value) for name, value in metrics.items()}, step=step)

    def samples(self, step: int, table: SampleTable) -> None:
        import swanlab

        assert self._run is not None, "samples before start"
        shown = swanlab.echarts.Table()
        shown.add(list(table.columns), [[str(value) for value in row] for row in table.rows])
        self._run.log({"val/samples": shown}, step=step)

    def close(self, ok: bool) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish(state="success" if ok else "crashed", error=None if ok else "the run failed")


def _unprobed() -> dict[str, bool]:
    """Turn off probes of SwanLab whose results hold a secret: the command, or the address of git."""
    probes = {}
    if hide_in_arguments(sys.argv) != sys.argv:
        probes["runtime"] = False
    with suppress(OSError, subprocess.SubprocessError):
        call = ["git", "config", "--get", "remote.origin.url"]
        address = subprocess.run(call, capture_output=True, text=True, timeout=5).stdout
        if hide_secrets(address) != address:
            probes["git"] = False
    return probes
