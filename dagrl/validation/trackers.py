"""Trackers that are packages of their own: whether they are here."""

from __future__ import annotations

from importlib.util import find_spec

from dagrl.config.loading.positions import Findings
from dagrl.config.schema import Pipeline

_EXTRAS = ("mlflow", "swanlab")
"""Trackers that `pip install dagrl` does not bring."""


def check_trackers(pipeline: Pipeline, findings: Findings) -> None:
    """Warn of trackers that are not installed: the run goes on without them."""
    for index, name in enumerate(pipeline.track):
        if name in _EXTRAS and find_spec(name) is None:
            message = f"{name} is not installed here, and a run goes on without it; pip install 'dagrl[{name}]'"
            findings.warning(("track", index), message)
