"""Rendezvous of an engine's ranks, and Megatron's process groups and seeds.

All of it is global to the process: a worker process holds one rank of one engine.
"""

from __future__ import annotations

import datetime
import math
import time

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from dagrl.backends.backend import RankContext
from dagrl.backends.megatron.engine.communicators import reloadable
from dagrl.backends.megatron.section import ParallelSpec

RANK_ORDER = "tp-cp-ep-dp-pp"
"""Order of ranks: tensor parallel fastest, pipeline stages slowest. The planner assumes the same order."""


def start(ranks: RankContext, parallel: ParallelSpec) -> None:
    """Join the other ranks, create the parallel groups, and seed the generators. Collective.

    Raises TimeoutError if the ranks do not meet in time, and OSError if rank 0 cannot listen on its port.
    """
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(ranks.rank % torch.cuda.device_count())
    _rendezvous(ranks, reloadable("nccl" if on_gpu else "gloo"))
    parallel_state.initialize_model_parallel(
        **parallel.model_dump(exclude={"sequence_parallel"}),
        order=RANK_ORDER,
        distributed_timeout_minutes=math.ceil(ranks.timeout_s / 60),
    )
    torch.manual_seed(ranks.seed)
    model_parallel_cuda_manual_seed(ranks.seed, force_reset_rng=True)


def stop() -> None:
    """Destroy the groups. Not collective; does nothing for groups that do not exist."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def _rendezvous(ranks: RankContext, backend: str) -> None:
    timeout = datetime.timedelta(seconds=ranks.timeout_s)
    begun = time.monotonic()
    try:
        store = dist.TCPStore(
            ranks.master_addr,
            ranks.master_port,
            ranks.world_size,
            is_master=ranks.rank == 0,
            timeout=timeout,
            master_listen_fd=ranks.listen_fd,
        )
        dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=timeout)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        place = f"{ranks.master_addr}:{ranks.master_port}"
        if "EADDRINUSE" in str(error):
            raise OSError(f"rank 0 cannot listen on {place}: the port is taken; start again to get another") from error
        waited = time.monotonic() - begun
        whom = f"the other {ranks.world_size - 1} ranks" if ranks.rank == 0 else "rank 0"
        raise TimeoutError(
            f"rank {ranks.rank} of {ranks.world_size} waited {waited:.0f} s for {whom} at {place}: "
            "check why they did not start, and whether the hosts can reach each other"
        ) from error
