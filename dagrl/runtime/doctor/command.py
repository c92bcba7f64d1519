"""The command: looks at everything, and says what this machine can run."""

from __future__ import annotations

from dagrl.runtime.doctor.edges import Edges
from dagrl.runtime.doctor.findings import report
from dagrl.runtime.doctor.hardware import hardware
from dagrl.runtime.doctor.network import network
from dagrl.runtime.doctor.software import software


def examine(edges: Edges) -> tuple[str, int]:
    """What the doctor says of a machine, and the exit code: 1 where something is missing that runs need."""
    gpus = edges.gpus()
    return report(
        [
            ("machine", hardware(edges, gpus)),
            ("software", software(edges, on_gpus=bool(gpus))),
            ("network", network(edges, on_gpus=bool(gpus))),
        ]
    )
