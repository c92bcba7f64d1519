"""The command: looks at everything, and says what this machine can run."""

from __future__ import annotations

from collections.abc import Callable

from dagrl.doctor.findings import report
from dagrl.doctor.hardware import hardware
from dagrl.doctor.network import network
from dagrl.doctor.probe import Edges
from dagrl.doctor.software import software


def examine(edges: Edges, say: Callable[[str], None]) -> int:
    """Say what there is to a machine, line by line; the exit code is 1 where something is missing that runs need."""
    gpus = edges.gpus()
    sections = [
        ("machine", hardware(edges, gpus)),
        ("software", software(edges, on_gpus=bool(gpus))),
        ("network", network(edges, on_gpus=bool(gpus))),
    ]
    return report(sections, say)
