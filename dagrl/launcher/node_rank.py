"""Where this machine stands among those of a job: what torchrun's and Kubeflow's variables say. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_DEFAULT_PORT = 29500
"""torchrun's."""
_ANY_COUNT = ("auto", "gpu", "cpu")
"""torchrun's words for "what there is"."""


class WrongPlaceError(ValueError):
    """A variable that is missing or cannot be."""


@dataclass(frozen=True, slots=True)
class Place:
    """One machine's place."""

    rank: int
    nodes: int
    master: str
    """Host name or address of rank 0."""
    port: int
    """Where rank 0 listens for the others."""
    slots: int | None
    """What groups may have of this machine: GPUs, or CPU slots where it has no GPU. None for all there is."""

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def meeting(self) -> str:
        """Where all meet, for messages."""
        return f"{self.master}:{self.port}"


def place_from(variables: Mapping[str, str]) -> Place | None:
    """The machine's place among several; None where it is alone. WrongPlaceError says which variable is wrong."""
    nodes = _nodes(variables)
    rank = _whole(variables, "PET_NODE_RANK", least=0)
    if nodes is None and rank:
        raise WrongPlaceError(f"PET_NODE_RANK is {rank} and PET_NNODES is not set; set it to the number of machines")
    if nodes is None or (nodes == 1 and not rank):
        return None
    if rank is None:
        raise WrongPlaceError(f"PET_NNODES is {nodes} and PET_NODE_RANK is not set; number the machines from 0")
    if rank >= nodes:
        raise WrongPlaceError(f"PET_NODE_RANK is {rank} of PET_NNODES={nodes} machines; number them 0 to {nodes - 1}")
    master = _first(variables, "PET_MASTER_ADDR", "MASTER_ADDR")
    if master is None:
        raise WrongPlaceError(
            f"PET_NNODES is {nodes} and neither PET_MASTER_ADDR nor MASTER_ADDR is set; set it to the address of rank 0"
        )
    port_name = "PET_MASTER_PORT" if variables.get("PET_MASTER_PORT", "").strip() else "MASTER_PORT"
    port = _whole(variables, port_name, least=1, most=65535)
    slots_name = "PET_NPROC_PER_NODE"
    any_count = variables.get(slots_name, "").strip().lower() in ("", *_ANY_COUNT)
    slots = None if any_count else _whole(variables, slots_name, least=1)
    return Place(rank, nodes, master, port or _DEFAULT_PORT, slots)


def _nodes(variables: Mapping[str, str]) -> int | None:
    """PET_NNODES, which may be torchrun's ``least:most`` where the two are the same."""
    text = variables.get("PET_NNODES", "").strip()
    least, colon, most = text.partition(":")
    if colon and least != most:
        raise WrongPlaceError(
            f"PET_NNODES is `{text}`, a range, and a job has a fixed number of machines; write that number"
        )
    return _whole({"PET_NNODES": least}, "PET_NNODES", least=1)


def _first(variables: Mapping[str, str], *names: str) -> str | None:
    return next((text for name in names if (text := variables.get(name, "").strip())), None)


def _whole(variables: Mapping[str, str], name: str, *, least: int, most: int | None = None) -> int | None:
    text = variables.get(name, "").strip()
    if not text:
        return None
    # Digits only: int() would take "1_0" and "+1" too.
    number = int(text) if text.isascii() and text.isdigit() else -1
    if number < least or (most is not None and number > most):
        bounds = f"from {least} to {most}" if most is not None else f"of {least} or more"
        raise WrongPlaceError(f"{name} is `{text}`; set it to a whole number {bounds}")
    return number
