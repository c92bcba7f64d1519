"""`dagrl run`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dagrl.cli.parameters import NewRunFolder, Overrides, Pipeline

_INTERRUPTED = 130


def run(pipeline: Pipeline, overrides: Overrides = None, run_dir: NewRunFolder = None) -> int:
    """Train as a pipeline file says, or continue from the newest checkpoint in the run folder.

    Ctrl-C saves and stops. Exits 0 at the end; 1 if the run failed, with node, worker and cause on the last lines.
    """
    from dagrl.cli.errors import exit_on
    from dagrl.config.loading.hub import HubError, download
    from dagrl.validation import check_file
    from dagrl.validation.placing import place_engines

    found = check_file(pipeline, overrides or [])
    with exit_on("run", HubError):
        if download(found.loaded.pipeline):
            # Now with the weights.
            found = check_file(pipeline, overrides or [])
    checked, plan = place_engines(found)
    for warning in checked.warnings:
        print(f"dagrl run: warning: {warning}", file=sys.stderr)
    folder = run_dir or Path("runs") / checked.loaded.pipeline.name
    # The next import takes seconds.
    print(f"starting {checked.loaded.pipeline.name}, {checked.loaded.pipeline.run.steps} steps", flush=True)
    from dagrl.orchestrator.run import run_pipeline
    from dagrl.workers.errors import InterruptedRunError, RefusedFolderError, RunError

    try:
        outcome = run_pipeline(checked, plan, folder)
    except RefusedFolderError as error:
        print(f"dagrl run: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        left = f"; the run folder is {folder}" if folder.is_dir() else ""
        print(f"dagrl run: failed{left}", *error.lines(), sep="\n", file=sys.stderr)
        return 1
    except (InterruptedRunError, KeyboardInterrupt):
        told = "stopped at once; `dagrl run` goes on from the last checkpoint, if there is one,"
        print(f"dagrl run: {told} in {folder}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # Everything is cleaned up, and Ray's libraries can crash at exit if they were interrupted while they connected.
        os._exit(_INTERRUPTED)
    print(outcome.summary(folder))
    return 0
