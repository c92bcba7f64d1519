"""`dagrl report`."""

from __future__ import annotations

from typing import Annotated

import typer

from dagrl.cli.errors import exit_on
from dagrl.cli.parameters import RunFolder


def report(
    run_dir: RunFolder,
    timeline: Annotated[
        bool,
        typer.Option("--timeline", help="compare plan and run, as tables and as RUN/timeline_planned.json"),
    ] = False,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="with --timeline: the GPU of groups that name none")
    ] = None,
) -> int:
    """Summarize a run from its folder, also while it runs: rewards, seconds by node, idle groups and restarts."""
    from dagrl.reporting.run_report import report_run

    with exit_on("report", ValueError):
        if gpu is not None and not timeline:
            raise ValueError("--gpu is for --timeline; add that, or take it out")
        print(report_run(run_dir, timeline=timeline, gpu=gpu), end="")
    return 0
