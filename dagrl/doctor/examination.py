"""All checks, by section."""

from __future__ import annotations

from collections.abc import Iterator

from dagrl.doctor.findings import Finding
from dagrl.doctor.hardware import hardware, list_gpus
from dagrl.doctor.network import network
from dagrl.doctor.software import software


def examine() -> Iterator[tuple[str, Iterator[Finding]]]:
    """Yield sections: a title and an iterator of findings, which runs the checks, because some take seconds."""
    gpus = list_gpus()
    yield "machine", hardware(gpus)
    yield "software", software(on_gpus=bool(gpus))
    yield "network", network()
