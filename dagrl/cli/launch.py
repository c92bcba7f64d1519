"""`dagrl launch`."""

from __future__ import annotations

import sys

from dagrl.cli.parameters import NewRunFolder, Overrides, Pipeline
from dagrl.cli.run import run


def launch(pipeline: Pipeline, overrides: Overrides = None, run_dir: NewRunFolder = None) -> int:
    """Train on several machines: call it on each of them.

    PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE, PET_MASTER_ADDR (or MASTER_ADDR) and PET_MASTER_PORT describe the
    job. Rank 0 runs the pipeline as `dagrl run` does, on all of them; all exit with its code. On one machine it is
    `dagrl run`.
    """
    from dagrl.launcher.command import launch_pipeline
    from dagrl.launcher.errors import LaunchError

    try:
        code = launch_pipeline(pipeline, overrides or [], run_dir)
    except LaunchError as error:
        print(f"dagrl launch: {error}", file=sys.stderr)
        return error.code
    return run(pipeline, overrides, run_dir) if code is None else code
