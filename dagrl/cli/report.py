"""`dagrl report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dagrl.cli.errors import exit_on
from dagrl.cli.parameters import AsJson, RunFolders, parse_path, print_json


def report(
    run_dirs: RunFolders,
    timeline: Annotated[
        bool,
        typer.Option("--timeline", help="compare plan and run, as tables and as RUN/timeline_planned.json"),
    ] = False,
    html: Annotated[
        bool,
        typer.Option(
            "--html", help="write one file for a browser: curves, DAG, timelines, samples; of several runs too"
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", parser=parse_path, metavar="FILE", help="with --html: the file (default: RUN/report.html)"
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="with --timeline or --html: the GPU of groups that name none"),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Summarize a run from its folder, also while it runs: rewards, seconds by node, idle groups and restarts.

    Examples:
        dagrl report runs/first
        dagrl report runs/first --timeline
        dagrl report runs/first runs/second --html -o both.html
        dagrl report runs/first --json
    """
    from dagrl.reporting.html_report import write_html
    from dagrl.reporting.run_report import report_run, run_values

    with exit_on("report", ValueError):
        if as_json and (html or timeline):
            raise ValueError("--json has the summary; remove --html and --timeline")
        if html and timeline:
            raise ValueError("--html has the tables of --timeline; leave one of them out")
        if gpu is not None and not (timeline or html):
            raise ValueError("--gpu is for --timeline and --html; add one of them, or remove it")
        if html:
            print(write_html(run_dirs, output or run_dirs[0] / "report.html", gpu=gpu))
            return 0
        if output is not None:
            raise ValueError("--output is for --html; add that, or remove it")
        if len(run_dirs) > 1:
            raise ValueError("several runs are for --html; add that, or name one run")
        if as_json:
            print_json(run_values(run_dirs[0]))
            return 0
        print(report_run(run_dirs[0], timeline=timeline, gpu=gpu), end="")
    return 0
