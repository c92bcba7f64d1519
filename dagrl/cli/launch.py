"""`dagrl launch`."""

from __future__ import annotations

from dagrl.cli.errors import complain
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
from dagrl.cli.run import run


def launch(
    pipeline: Pipeline,
    overrides: Overrides = None,
    run_dir: NewRunFolder = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
    only: Only = None,
    explorer: Explorer = None,
    experience: Experience = None,
) -> int:
    """Train on several machines: call it on each of them.

    PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE, PET_MASTER_ADDR (or MASTER_ADDR) and PET_MASTER_PORT describe the
    job. Rank 0 runs the pipeline as `dagrl run` does, on all of them; all exit with its code. On one machine it is
    `dagrl run`.

    Examples:
        PET_NNODES=2 PET_NODE_RANK=0 PET_MASTER_ADDR=10.0.0.1 dagrl launch pipeline.yaml
        dagrl launch pipeline.yaml groups.train.nodes=2
        dagrl launch pipeline.yaml --only advantage,update
    """
    from dagrl.launcher.command import launch_pipeline
    from dagrl.launcher.errors import LaunchError

    try:
        code = launch_pipeline(pipeline, overrides or [], run_dir, parse_part(only, explorer, experience), experience)
    except LaunchError as error:
        complain("dagrl launch", error)
        return error.code
    return run(pipeline, overrides, run_dir, verbose, quiet, only, explorer, experience) if code is None else code
