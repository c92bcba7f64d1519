"""`dagrl ui`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dagrl.cli.errors import exit_on
from dagrl.cli.parameters import parse_path
from dagrl.config.errors import counted


def ui(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            parser=parse_path,
            metavar="RUN",
            help="run folders, or folders that hold some (default: runs)",
            show_default=False,
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="the port on this machine; 0 takes a free one")] = 8765,
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="the GPU of groups that name none, for plans")] = None,
) -> int:
    """Show runs in a browser, live, on this machine alone: curves, DAG, timelines, samples. Ctrl-C ends it.

    Examples:
        dagrl ui
        dagrl ui runs/first runs/second --port 8080
    """
    from dagrl.backends.planning.gpus import gpu_named
    from dagrl.reporting.server import HOST, RUNS, Runs, listen, serve

    with exit_on("ui", ValueError, OSError):
        served = Runs(runs or [RUNS], gpu=gpu and gpu_named(gpu).name)
        what = counted(len(served.entries()), "run")
        listener = listen(port)
    print(f"http://{HOST}:{listener.getsockname()[1]}/ shows {what}; Ctrl-C ends", flush=True)
    serve(served, listener)
    return 0
