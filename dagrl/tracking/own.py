"""Trackers of the user: ``module:Class`` beside the pipeline file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dagrl.plugins.calls import ending_children
from dagrl.plugins.custom import load_function, raised_by
from dagrl.plugins.tracker import check_tracker
from dagrl.tracking.background_tracker import TrackerFailedError
from dagrl.tracking.base import SampleTable


class OwnTracker:
    """Calls a user's tracker, and tells the line where it fails."""

    def __init__(self, place: str, args: Mapping[str, Any], folder: Path | None) -> None:
        """Import the class at `place`, for which `folder` is searched, and make an instance.

        Raises ValueError if there is no such class, it is no tracker, or its constructor fails.
        """
        made = load_function(place, folder)
        check_tracker(made, place, args)
        try:
            self._tracker: Any = made(**args)
        except Exception as error:
            raise ValueError(f"the tracker {place} {raised_by(made.__init__, error)}") from error

    def start(self, run_dir: Path, config: Mapping[str, Any], resumed_step: int | None) -> None:
        self._call(self._tracker.start, run_dir, config, resumed_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call(self._tracker.log, step, metrics)

    def samples(self, step: int, table: SampleTable) -> None:
        """Show a table, if the tracker has such a method."""
        if (shows := getattr(self._tracker, "samples", None)) is not None:
            self._call(shows, step, table)

    def close(self, ok: bool) -> None:
        self._call(self._tracker.close, ok)

    def _call(self, method: Callable[..., Any], *arguments: Any) -> None:
        try:
            with ending_children(method):
                method(*arguments)
        except Exception as error:
            raise TrackerFailedError(raised_by(method, error)) from error
