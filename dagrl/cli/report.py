"""`dagrl report`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from dagrl.cli.parameters import RunFolder
from dagrl.config.errors import PipelineError


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

    try:
        if gpu is not None and not timeline:
            raise ValueError("--gpu is for --timeline; add that, or take it out")
        print(report_run(run_dir, timeline=timeline, gpu=gpu), end="")
    except PipelineError:
        raise
    except ValueError as error:
        print(f"dagrl report: {error}", file=sys.stderr)
        return 2
    return 0
