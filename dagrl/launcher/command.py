"""The command: finds out who this machine is, and leads or follows."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dagrl.config.errors import PipelineError
from dagrl.config.loading.loader import LoadedPipeline, load_pipeline
from dagrl.config.schema import Pipeline
from dagrl.launcher.addresses import leads_nowhere
from dagrl.launcher.errors import LaunchError
from dagrl.launcher.follower import follow
from dagrl.launcher.job import Job
from dagrl.launcher.leader import dismiss, lead
from dagrl.launcher.node_rank import Place, WrongPlaceError, place_from
from dagrl.orchestrator.folder.examine import examine
from dagrl.scheduler.machines import Machine
from dagrl.validation import check_file
from dagrl.workers.errors import RefusedFolderError


def launch_pipeline(pipeline: Path, overrides: Sequence[str], run_dir: Path | None) -> int | None:
    """Run a pipeline on all machines of the job; the exit code of all. None where this machine is the only one.

    PipelineError where the file is wrong; LaunchError, with the exit code, where a variable is.
    """
    variables = dict(os.environ)
    try:
        place = place_from(variables)
    except WrongPlaceError as error:
        raise LaunchError(str(error), code=2) from error
    if place is None:
        return None
    if not place.leads and leads_nowhere(place):
        raise LaunchError(f"PET_MASTER_ADDR is `{place.master}`, which is this machine; give rank 0's address", code=2)
    loaded = load_pipeline(pipeline, overrides).pipeline
    note = _noter(place)
    try:
        folder = run_dir or Path("runs") / loaded.name
        if place.leads:
            _check_folder(folder, check_file(pipeline, overrides).loaded)
        machine = offered(place, loaded, visible_gpus(), os.cpu_count() or 1)
    except (PipelineError, LaunchError) as error:
        if place.leads:
            note("there will be no run, as is said below; the others are told")
            why = str(error) if isinstance(error, LaunchError) else "the pipeline file is wrong; rank 0 says where"
            asyncio.run(dismiss(place, 2, why, note))
        raise
    arguments = [str(pipeline), *overrides, "--run-dir", str(folder)]
    job = Job(place, machine, loaded, arguments, folder / "logs", variables, note)
    return asyncio.run(lead(job) if place.leads else follow(job))


def _check_folder(folder: Path, loaded: LoadedPipeline) -> None:
    """LaunchError if `dagrl run` would refuse the folder once all machines have met."""
    try:
        examine(folder, loaded.pipeline, loaded.resolved)
    except RefusedFolderError as error:
        raise LaunchError(str(error), code=2) from error


def offered(place: Place, pipeline: Pipeline, gpus: int, cpus: int) -> Machine:
    """What groups may have of this machine, which has so many GPUs and CPUs. LaunchError where it has too few."""
    name = socket.gethostname()
    slots = place.slots
    if slots is not None and gpus and slots > gpus:
        raise LaunchError(
            f"PET_NPROC_PER_NODE is {slots} and {name} (rank {place.rank}) has {gpus} GPUs to use; "
            f"set it to {gpus} or less",
            code=2,
        )
    # As on a single machine: more CPU slots than cores are slow, and work.
    asked = sum(group.cpus_per_node for group in pipeline.groups.values())
    if gpus or slots is None:
        return Machine(name, gpus if slots is None else slots, max(cpus, asked))
    return Machine(name, 0, slots)


def visible_gpus() -> int:
    """GPUs that Ray would use here: those there are, within CUDA_VISIBLE_DEVICES."""
    from ray._private.accelerators import NvidiaGPUAcceleratorManager as Nvidia

    there, visible = Nvidia.get_current_node_num_accelerators(), Nvidia.get_current_process_visible_accelerator_ids()
    return there if visible is None else min(there, len(visible))


def _noter(place: Place) -> Callable[[str], None]:
    def note(text: str) -> None:
        # Where the terminal is gone the job goes on, or ends in good order.
        with contextlib.suppress(OSError):
            print(f"dagrl launch [rank {place.rank}]: {text}", file=sys.stderr, flush=True)

    return note
