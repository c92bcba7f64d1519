"""The command: reads this machine's rank, and leads or follows."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from dagrl.config.errors import PipelineError
from dagrl.config.loading.hub import HubError, download
from dagrl.config.loading.loader import load_pipeline
from dagrl.config.schema import Pipeline
from dagrl.graph.cut import PartError
from dagrl.launcher.addresses import is_loopback
from dagrl.launcher.errors import LaunchError
from dagrl.launcher.follower import follow
from dagrl.launcher.job import Job
from dagrl.launcher.leader import dismiss, lead
from dagrl.launcher.node_rank import NodeRank, node_rank_from
from dagrl.orchestrator.folder.examine import examine
from dagrl.scheduler.machines import Machine
from dagrl.validation import check_file
from dagrl.validation.part import PartOptions, take_part
from dagrl.workers.errors import RefusedFolderError


def launch_pipeline(
    pipeline: Path,
    overrides: Sequence[str],
    run_dir: Path | None,
    part: PartOptions | None = None,
    experience: Path | None = None,
) -> int | None:
    """Run a pipeline, or one part, on all machines of the job; returns their exit code, None for a job of one machine.

    PipelineError for a wrong file; LaunchError, with the exit code, for a wrong variable.
    """
    variables = dict(os.environ)
    node_rank = node_rank_from(variables)
    if node_rank is None:
        return None
    if not node_rank.is_leader and is_loopback(node_rank.master):
        address = f"PET_MASTER_ADDR is `{node_rank.master}`"
        raise LaunchError(f"{address}, which is this machine; give rank 0's address", code=2)

    def note(text: str) -> None:
        # The job continues, or ends in good order, after its terminal has closed.
        with contextlib.suppress(OSError):
            print(f"dagrl launch [rank {node_rank.rank}]: {text}", file=sys.stderr, flush=True)

    loaded = load_pipeline(pipeline, overrides).pipeline
    whole = folder = run_dir or Path("runs") / loaded.name
    arguments = [str(pipeline), *overrides, "--run-dir", str(whole), *_options(part, experience)]
    try:
        if node_rank.is_leader or part is not None:
            checked = check_file(pipeline, overrides, with_files=node_rank.is_leader)
            try:
                if part is not None:
                    checked, taken = take_part(checked, part)
                    loaded, folder = checked.loaded.pipeline, taken.run_folder(whole)
                if node_rank.is_leader:
                    # Before the machines meet: `dagrl run` would refuse the folder afterwards.
                    examine(folder, loaded, checked.loaded.resolved)
            except (PartError, RefusedFolderError) as error:
                raise LaunchError(str(error), code=2) from error
        fetch_models(loaded)
        machine = offered(node_rank, loaded, visible_gpus(), os.cpu_count() or 1)
    except (PipelineError, LaunchError) as error:
        if node_rank.is_leader:
            note("the run does not start, see below; telling the other machines")
            why = str(error) if isinstance(error, LaunchError) else "the pipeline file is wrong; rank 0 says where"
            asyncio.run(dismiss(node_rank, 2, why, note))
        raise
    job = Job(node_rank, machine, loaded, arguments, folder / "logs", variables, note)
    return asyncio.run(lead(job) if node_rank.is_leader else follow(job))


def _options(part: PartOptions | None, experience: Path | None) -> list[str]:
    """The options of `dagrl run` for a part."""
    if part is None:
        return []
    options = ["--only", ",".join(part.only)]
    if part.share.of > 1:
        options += ["--explorer", f"{part.share.number}/{part.share.of}"]
    return options + (["--experience", str(experience)] if experience is not None else [])


def fetch_models(pipeline: Pipeline) -> None:
    """Fetch the weights of published models, once on each machine. Raises LaunchError on failure."""
    try:
        download(pipeline)
    except HubError as error:
        raise LaunchError(str(error), code=2) from error


def offered(node_rank: NodeRank, pipeline: Pipeline, gpus: int, cpus: int) -> Machine:
    """The slots that groups may use on this machine, which has `gpus` and `cpus`. LaunchError if it has too few."""
    name, slots = socket.gethostname(), node_rank.slots
    if slots is not None and gpus and slots > gpus:
        raise LaunchError(
            f"PET_NPROC_PER_NODE is {slots} and {name} (rank {node_rank.rank}) has {gpus} GPUs to use; "
            f"set it to {gpus} or less",
            code=2,
        )
    # As on a single machine, groups may ask for more CPU slots than there are cores; that works, slowly.
    asked = sum(group.cpus_per_node for group in pipeline.groups.values())
    if gpus or slots is None:
        return Machine(name, gpus if slots is None else slots, max(cpus, asked))
    return Machine(name, 0, slots)


def visible_gpus() -> int:
    """The GPUs that Ray uses on this machine, within CUDA_VISIBLE_DEVICES."""
    from ray._private.accelerators import NvidiaGPUAcceleratorManager as Nvidia

    present, visible = Nvidia.get_current_node_num_accelerators(), Nvidia.get_current_process_visible_accelerator_ids()
    return present if visible is None else min(present, len(visible))
