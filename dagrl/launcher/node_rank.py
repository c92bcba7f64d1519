"""The rank of this machine in a job, from the variables of torchrun and Kubeflow. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dagrl.launcher.errors import LaunchError

_DEFAULT_PORT = 29500
"""torchrun's default."""
_ALL_SLOTS = ("", "auto", "gpu", "cpu")
"""torchrun's words for all slots of the machine."""


@dataclass(frozen=True, slots=True)
class NodeRank:
    """One machine of a job."""

    rank: int
    nodes: int
    """Most machines of the job."""
    least: int
    """Fewest machines with which it begins."""
    master: str
    """Host name or address of rank 0."""
    port: int
    """Port on which rank 0 listens for the others."""
    slots: int | None
    """GPUs that groups may use here, or CPU slots on a machine without GPU; None for all."""

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @property
    def endpoint(self) -> str:
        """``HOST:PORT`` of the rendezvous, for messages."""
        return f"{self.master}:{self.port}"


def node_rank_from(variables: Mapping[str, str]) -> NodeRank | None:
    """Read the rank of this machine; None for a job of one machine. LaunchError names a wrong variable."""
    least, nodes = _nodes(variables)
    rank = _integer(variables, "PET_NODE_RANK", least=0)
    if nodes is None and rank:
        raise _wrong(f"PET_NODE_RANK is {rank} and PET_NNODES is not set; set it to the number of machines")
    if nodes is None or (nodes == 1 and not rank):
        return None
    if rank is None:
        raise _wrong(f"PET_NNODES is {nodes} and PET_NODE_RANK is not set; number the machines from 0")
    if rank >= nodes:
        raise _wrong(f"PET_NODE_RANK is {rank} of PET_NNODES={nodes} machines; number them 0 to {nodes - 1}")
    master = variables.get("PET_MASTER_ADDR", "").strip() or variables.get("MASTER_ADDR", "").strip()
    if not master:
        raise _wrong(
            f"PET_NNODES is {nodes} and neither PET_MASTER_ADDR nor MASTER_ADDR is set; set it to the address of rank 0"
        )
    port = _integer(variables, "PET_MASTER_PORT", least=1, most=65535)
    port = port or _integer(variables, "MASTER_PORT", least=1, most=65535) or _DEFAULT_PORT
    everything = variables.get("PET_NPROC_PER_NODE", "").strip().lower() in _ALL_SLOTS
    slots = None if everything else _integer(variables, "PET_NPROC_PER_NODE", least=1)
    return NodeRank(rank, nodes, least or nodes, master, port, slots)


def _nodes(variables: Mapping[str, str]) -> tuple[int | None, int | None]:
    """The fewest and the most machines of PET_NNODES, which may be torchrun's ``MIN:MAX``."""
    text = variables.get("PET_NNODES", "").strip()
    first, colon, last = text.partition(":")
    least = _integer({"PET_NNODES": first}, "PET_NNODES", least=1)
    most = _integer({"PET_NNODES": last}, "PET_NNODES", least=1) if colon else least
    if least is not None and most is not None and (most < least or (least < most and least == 1)):
        raise _wrong(f"PET_NNODES is `{text}`; a range of machines is MIN:MAX, with 2 or more as MIN")
    return least, most


def _integer(variables: Mapping[str, str], name: str, *, least: int, most: int | None = None) -> int | None:
    text = variables.get(name, "").strip()
    if not text:
        return None
    # Digits only: int() accepts "1_0" and "+1" too.
    number = int(text) if text.isascii() and text.isdigit() else -1
    if number < least or (most is not None and number > most):
        bounds = f"from {least} to {most}" if most is not None else f"of {least} or more"
        raise _wrong(f"{name} is `{text}`; set it to a whole number {bounds}")
    return number


def _wrong(sentence: str) -> LaunchError:
    return LaunchError(sentence, code=2)
