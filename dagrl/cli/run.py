"""`dagrl run`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dagrl.cli.errors import complain, exit_on
from dagrl.cli.parameters import (
    Experience,
    Explorer,
    NewRunFolder,
    Only,
    Overrides,
    Pipeline,
    Quiet,
    Verbose,
    parse_part,
)
from dagrl.config.errors import counted

if TYPE_CHECKING:
    from dagrl.tracking.console import Verbosity
    from dagrl.validation.part import PartOptions
    from dagrl.validation.prepare import PreparedPipeline

_INTERRUPTED = 130
_DOES_NOT_FIT = 3
_OUT_OF_TIME = 4
_ALARM = 5
_DryRun = Annotated[
    bool, typer.Option("--dry-run", help="check, plan, and print what would be started; start and write nothing")
]


def run(
    pipeline: Pipeline,
    overrides: Overrides = None,
    run_dir: NewRunFolder = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
    only: Only = None,
    explorer: Explorer = None,
    experience: Experience = None,
    dry_run: _DryRun = False,
) -> int:
    """Train as a pipeline file says, or continue from the newest checkpoint in the run folder.

    With run.val_only=true, validate that checkpoint, or the start weights, and train nothing.
    Ctrl-C saves and stops. Exits 0 at the end; 1 if the run failed, with node, worker and cause on the last lines; 4 if
    run.stop_after has stopped it, 5 if run.stop_when has.

    Examples:
        dagrl run pipeline.yaml
        dagrl run pipeline.yaml run.steps=60 engines.actor.optimizer.lr=3e-6
        dagrl run tiny_grpo --run-dir runs/demo -q
        dagrl run pipeline.yaml run.val_only=true
        dagrl run pipeline.yaml --dry-run
        dagrl run pipeline.yaml --only rollout,reward --explorer 1/2
        dagrl run pipeline.yaml --only advantage,update
    """
    from dagrl.config.loading.hub import HubError
    from dagrl.graph.cut import PartError
    from dagrl.validation.prepare import prepare

    part = parse_part(only, explorer, experience)
    if verbose and quiet:
        raise typer.BadParameter("not allowed together with --quiet", param_hint="'--verbose'")
    if dry_run:
        return _dry_run(pipeline, overrides or [], run_dir, part)
    with exit_on("run", HubError, PartError):
        prepared = prepare(pipeline, overrides or [], with_weights=True, part=part)
    for warning in prepared.warnings:
        print(f"dagrl run: warning: {warning}", file=sys.stderr)
    whole = run_dir or Path("runs") / prepared.loaded.pipeline.name
    folder = prepared.part.run_folder(whole) if prepared.part is not None else whole
    if not quiet:
        # The next import takes seconds.
        run = prepared.loaded.pipeline.run
        what = "a validation alone" if run.only_validates else counted(run.steps, "step")
        print(f"starting {prepared.loaded.pipeline.name}, {what}", flush=True)
    from dagrl.tracking.console import Verbosity

    verbosity = Verbosity.QUIET if quiet else Verbosity.VERBOSE if verbose else Verbosity.NORMAL
    return _run(prepared, folder, experience or whole / "experience", verbosity)


def _run(prepared: PreparedPipeline, folder: Path, experience: Path, verbosity: Verbosity) -> int:
    from dagrl.orchestrator.run import run_pipeline
    from dagrl.tracking.console import Verbosity
    from dagrl.workers.errors import InterruptedRunError, RefusedFolderError, RunError

    try:
        outcome = run_pipeline(prepared, folder, verbosity, experience)
    except RefusedFolderError as error:
        complain("dagrl run", error)
        return 2
    except RunError as error:
        left = f"; the run folder is {folder}" if folder.is_dir() else ""
        print(f"dagrl run: failed{left}", *error.lines(), sep="\n", file=sys.stderr)
        return 1
    except (InterruptedRunError, KeyboardInterrupt):
        what = "stopped at once; `dagrl run` goes on from the last checkpoint, if there is one,"
        print(f"dagrl run: {what} in {folder}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # Everything is cleaned up, and Ray's libraries can crash at exit if they were interrupted while they connected.
        os._exit(_INTERRUPTED)
    if verbosity is not Verbosity.QUIET:
        from dagrl.reporting.summary import closing_text

        print(closing_text(outcome, folder))
    return _ALARM if outcome.alarm else _OUT_OF_TIME if outcome.out_of_time else 0


def _dry_run(pipeline: Path, overrides: list[str], run_dir: Path | None, part: PartOptions | None) -> int:
    from dagrl.graph.cut import PartError
    from dagrl.planner.showing.show import problems_in_words
    from dagrl.reporting.dry_run import describe_start
    from dagrl.workers.errors import RefusedFolderError

    with exit_on("run", RefusedFolderError, PartError):
        report, text = describe_start(pipeline, overrides, run_dir, part)
    for warning in report.checked.warnings:
        print(f"dagrl run: warning: {warning}", file=sys.stderr)
    print(text, end="", flush=True)
    for line in problems_in_words(report):
        print(line, file=sys.stderr)
    return 0 if report.fits else _DOES_NOT_FIT
