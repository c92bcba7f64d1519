"""Serves the page of runs on this machine: `dagrl ui`."""

from __future__ import annotations

import socket
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from dagrl.reporting.html_report import distinct_names
from dagrl.reporting.page.assemble import content_security_policy, page, to_json
from dagrl.reporting.run_data.overview import overview
from dagrl.reporting.run_data.run_reader import RunReader, is_run, open_run
from dagrl.reporting.run_data.sample_view import sample_steps, sample_view
from dagrl.reporting.run_data.views import metrics_table, plan_view, step_view
from dagrl.version import __version__

HOST = "127.0.0.1"
RUNS = Path("runs")
"""The default folder of runs."""
_DIGITS = 12
"""Upper bound of a step's activities."""
_HOSTS = ["127.0.0.1", "localhost"]
"""Names that a browser on this machine uses. Pages of other sites cannot reach the server under another name."""


class Runs:
    """The runs that are served. Folders are searched in each request, because runs may start later."""

    def __init__(self, folders: Sequence[Path], *, gpu: str | None = None) -> None:
        """`folders` are run folders, or contain some. ValueError if one is neither."""
        self._folders = folders
        self._gpu = gpu
        self._readers: dict[Path, RunReader] = {}
        # A reader is not thread-safe. Each has its own lock, so that a slow run does not delay others.
        self._reading: dict[Path, threading.Lock] = defaultdict(threading.Lock)
        self._lock = threading.Lock()
        for folder in folders:
            if not is_run(folder) and not folder.is_dir():
                raise ValueError(f"{folder} is not a folder; name run folders, or a folder that holds some")
        self._ids: list[Path] = []

    def entries(self) -> list[dict[str, object]]:
        """Id, name and time of the last change of each run, in a stable order."""
        with self._lock:
            return self._found()

    def ask(self, run_id: str, question: Callable[[RunReader], Any]) -> Any:
        """The answer of a run, after a refresh. KeyError if there is no such run."""
        with self._lock:
            if not self._ids:
                self._found()
            try:
                folder = self._ids[int(run_id)]
            except (ValueError, IndexError) as error:
                raise KeyError(run_id) from error
            own = self._reading[folder]
        with own:
            if folder not in self._readers:
                self._readers[folder] = open_run(folder)
            reader = self._readers[folder]
            reader.refresh()
            return question(reader)

    def plan(self, run: RunReader) -> dict[str, object]:
        return plan_view(run, self._gpu)

    def _found(self) -> list[dict[str, object]]:
        for folder in self._folders:
            inner = [folder] if is_run(folder) else []
            with suppress(FileNotFoundError):  # the folder was removed
                inner = inner or sorted(path for path in folder.iterdir() if is_run(path))
            self._ids += [path for path in inner if path not in self._ids]
        names = distinct_names(self._ids)
        return [
            {"id": str(place), "name": name, "changed": _changed(folder)}
            for place, (folder, name) in enumerate(zip(self._ids, names, strict=True))
        ]


def application(runs: Runs) -> Starlette:
    """The page at ``/``, and its data below ``/api``: only GET, only from this machine."""
    headers = {
        "Content-Security-Policy": content_security_policy(live=True) + "; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }

    async def index(request: Request) -> Response:
        entries = await run_in_threadpool(runs.entries)
        parts = page({"version": __version__, "live": True, "runs": entries})
        return StreamingResponse(iter(parts), media_type="text/html; charset=utf-8", headers=headers)

    def answers(question: Callable[[Request, RunReader], Any]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                value = await run_in_threadpool(
                    runs.ask, request.path_params["run"], lambda reader: question(request, reader)
                )
            except KeyError:
                value = None
            except (OSError, ValueError) as error:
                return PlainTextResponse(str(error), status_code=500, headers=headers)
            if value is None:
                return PlainTextResponse("there is no such run or step", status_code=404, headers=headers)
            return Response(to_json(value), media_type="application/json", headers=headers)

        return answer

    async def entries(request: Request) -> Response:
        listed = await run_in_threadpool(runs.entries)
        return Response(to_json(listed), media_type="application/json", headers=headers)

    routes = [
        Route("/", index),
        Route("/api/runs", entries),
        Route("/api/{run}/overview", answers(lambda request, run: overview(run))),
        Route("/api/{run}/metrics", answers(_metrics)),
        Route("/api/{run}/plan", answers(lambda request, run: runs.plan(run))),
        Route("/api/{run}/steps/{step:int}", answers(_step)),
        Route("/api/{run}/samples/{kind}/{step:int}", answers(_samples)),
    ]
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=_HOSTS)])


def serve(runs: Runs, listener: socket.socket) -> None:
    config = uvicorn.Config(application(runs), log_level="warning", lifespan="off")
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])


def listen(port: int) -> socket.socket:
    """A socket of this machine alone; `port` 0 takes a free one. OSError if the port is taken."""
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        raise OSError(f"cannot listen on {HOST}:{port}: {error.strerror}; choose another --port") from error


def _step(request: Request, run: RunReader) -> dict[str, object] | None:
    return step_view(run, request.path_params["step"], run.plan)


def _metrics(request: Request, run: RunReader) -> dict[str, object]:
    """The steps from ``first`` on; all of them if the page has those of another generation."""
    asked = request.query_params
    first = asked.get("first", "0")
    known = asked.get("generation") == str(run.generation) and first.isdecimal() and len(first) < _DIGITS
    return metrics_table(run, min(int(first), len(run.steps)) if known else 0)


def _samples(request: Request, run: RunReader) -> list[dict[str, object]] | None:
    kind, step = request.path_params["kind"], request.path_params["step"]
    if step not in sample_steps(run.folder).get(kind, []):
        return None
    return sample_view(run.folder, step, validation=kind == "val")


def _changed(folder: Path) -> float:
    """Time of the run's last write, in seconds since the epoch; 0 if it was removed."""
    paths = (folder / "metrics.jsonl", folder / "pipeline.yaml")
    return max((path.stat().st_mtime for path in paths if path.is_file()), default=0.0)
