"""MLflow: on the server named by ``MLFLOW_TRACKING_URI``, or in a database in the run folder."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import batched
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import yaml

from dagrl.config.schema import TrackerSpec
from dagrl.tracking.base import SampleTable

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

EXPERIMENT = "dagrl"
"""Default of ``MLFLOW_EXPERIMENT_NAME``."""
PATIENCE_S = 30.0
"""Longest wait for a server when the run starts."""
_CONNECT_TIMEOUT_S, _PAUSE_S = 5.0, 1.0
_PARAMETERS_AT_ONCE = 100
_METRICS_AT_ONCE = 1000
_LONGEST_PARAMETER = 500
"""Limits of MLflow's servers, including older versions."""
_TABLES = "mlflow.loggedArtifacts"
"""Tag by which MLflow's UI recognises tables among artifacts."""
_NEWEST_TABLES = 20
"""Number of tables in the tag, whose length is limited. Older tables remain artifacts."""
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]", re.ASCII)


class Mlflow:
    """Logs to MLflow: metrics, the pipeline as parameters and as ``pipeline.yaml``, samples as tables.

    A resumed run keeps its MLflow run, by an id in the run folder. MLflow cannot remove steps: repeated steps are in a
    metric's history twice, the later value last. Metric names replace ``@``: ``mean@4`` is ``mean_at_4``.
    """

    def __init__(self, name: str, note: Callable[[str], None], spec: TrackerSpec) -> None:
        """`name` of the run; `note` prints a message. The project is the experiment."""
        self._name, self._note, self._project = name, note, spec.project
        self._client: MlflowClient | None = None
        self._run_id = ""
        self._tables: list[dict[str, str]] = []

    def start(self, run_dir: Path, config: Mapping[str, object], resumed_step: int | None) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        # Their log lines would disturb the live table.
        for library in ("mlflow", "alembic"):
            logging.getLogger(library).setLevel(logging.WARNING)
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        folder = (run_dir / "mlflow").resolve()
        folder.mkdir(parents=True, exist_ok=True)
        remote = os.environ.get("MLFLOW_TRACKING_URI")
        if remote:
            _check_reachable(remote)
        self._client = MlflowClient(tracking_uri=remote or f"sqlite:///{folder / 'mlflow.db'}")
        known = folder / "run_id"
        if resumed_step is not None and known.is_file() and self._resume(known.read_text().strip()):
            self._run_id = known.read_text().strip()
        else:
            self._run_id = self._client.create_run(self._experiment(remote, folder), run_name=self._name).info.run_id
            known.write_text(self._run_id + "\n")
            parameters = [Param(name, value) for name, value in _parameters(config)]
            for some in batched(parameters, _PARAMETERS_AT_ONCE):
                self._client.log_batch(self._run_id, params=some)
        self._client.log_text(self._run_id, yaml.safe_dump(dict(config), sort_keys=False), "pipeline.yaml")
        look = f"look at it with: mlflow ui --backend-store-uri sqlite:///{folder / 'mlflow.db'}"
        self._note(f"mlflow: run {self._run_id} " + (f"at {remote}" if remote else f"in {folder}; {look}"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        assert self._client is not None, "log before start"
        now = int(time.time() * 1000)
        values = [Metric(metric_name(name), _shown(value), now, step) for name, value in metrics.items()]
        for some in batched(values, _METRICS_AT_ONCE):
            self._client.log_batch(self._run_id, metrics=some)

    def samples(self, step: int, table: SampleTable) -> None:
        assert self._client is not None, "samples before start"
        path = f"samples/step_{step}_val.json"
        self._client.log_dict(self._run_id, {"columns": list(table.columns), "data": [*map(list, table.rows)]}, path)
        others = [table_entry for table_entry in self._tables if table_entry["path"] != path]
        self._tables = [*others, {"path": path, "type": "table"}][-_NEWEST_TABLES:]
        self._client.set_tag(self._run_id, _TABLES, json.dumps(self._tables))

    def close(self, ok: bool) -> None:
        client, self._client = self._client, None
        if client is not None and self._run_id:
            client.set_terminated(self._run_id, "FINISHED" if ok else "FAILED")

    def _experiment(self, remote: str | None, folder: Path) -> str:
        assert self._client is not None
        name = self._project or os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        if (experiment := self._client.get_experiment_by_name(name)) is not None:
            return experiment.experiment_id
        artifacts = None if remote else str(folder / "artifacts")
        with _unless("RESOURCE_ALREADY_EXISTS"):
            return self._client.create_experiment(name, artifact_location=artifacts)
        # Another run has created it at the same time.
        experiment = self._client.get_experiment_by_name(name)
        assert experiment is not None, "it exists already"
        return experiment.experiment_id

    def _resume(self, run_id: str) -> bool:
        """Resume a run; False if the server lacks it, or it was deleted."""
        assert self._client is not None
        with _unless("RESOURCE_DOES_NOT_EXIST"):
            run = self._client.get_run(run_id)
            if run.info.lifecycle_stage == "active":
                self._client.update_run(run_id, status="RUNNING")
                self._tables = json.loads(run.data.tags.get(_TABLES, "[]"))
                return True
        return False


def _check_reachable(address: str) -> None:
    """Raise OSError if nothing listens at `address`. MLflow itself would retry silently for minutes.

    Skipped behind a proxy.
    """
    parts = urlsplit(address)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    if not parts.hostname or not port or (parts.scheme in getproxies() and not proxy_bypass(parts.hostname)):
        return
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            socket.create_connection((parts.hostname, port), timeout=_CONNECT_TIMEOUT_S).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise OSError(
                    f"{parts.hostname}:{port} does not answer: {error.strerror or error} (MLFLOW_TRACKING_URI)"
                ) from error
            time.sleep(_PAUSE_S)
        else:
            return


@contextmanager
def _unless(code: str) -> Iterator[None]:
    """Context that ends early if the server returns error `code`."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code != code:
            raise


def _shown(value: float) -> float:
    """A value that MLflow can draw: it replaces infinity by the largest float, which flattens a chart."""
    return float(value) if math.isfinite(value) else math.nan


def metric_name(name: str) -> str:
    return _NOT_IN_NAMES.sub("_", name.replace("@", "_at_"))


def _parameters(config: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _parameters(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            yield metric_name(f"{prefix}{key}"), text[:_LONGEST_PARAMETER]
