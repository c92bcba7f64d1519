"""Writes runs as one HTML file, which needs no network and no other file."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import batched
from pathlib import Path
from typing import Any

from dagrl.backends.planning.gpus import gpu_named
from dagrl.reporting.page.assemble import blob, page
from dagrl.reporting.run_data.overview import overview
from dagrl.reporting.run_data.run_reader import RunReader, open_run
from dagrl.reporting.run_data.sample_view import sample_steps, sample_view
from dagrl.reporting.run_data.views import metrics_table, plan_view, step_view
from dagrl.tracking.base import naming
from dagrl.version import __version__

_STEPS_OF_CHUNK = 50
_MOST_TIMED_STEPS = 20_000
_MOST_SPANS = 500_000
"""Most bars in a file; more would make it slow to open. Steps with bars are spread evenly."""
_SAMPLES_OF_STEPS, _SAMPLES_BYTES = 60, 24 << 20
"""Steps with samples, and bytes of these in a file: a run of thousands of steps has gigabytes."""


def write_html(
    folders: Sequence[Path], output: Path, *, gpu: str | None = None, evaluation: dict[str, Any] | None = None
) -> str:
    """Write runs to a page and describe it in a line. ValueError if a folder holds no run; OSError.

    `evaluation`: the results of evaluations, each of one of the runs, which the page then shows first.
    """
    if gpu is not None:
        gpu = gpu_named(gpu).name
    runs = [open_run(folder) for folder in folders]
    names = distinct_names(folders)
    manifest: dict[str, Any] = {"version": __version__, "live": False, "written": time.time(), "runs": []}
    if evaluation is not None:
        manifest["evaluation"] = True
    aside = output.with_name(f".{output.name}.new")
    with naming(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            with aside.open("w", encoding="utf-8") as file:
                blobs: list[str] = [] if evaluation is None else [blob("evaluation", evaluation)[0]]
                for place, (run, name) in enumerate(zip(runs, names, strict=True)):
                    entry: dict[str, Any] = {"name": name}
                    blobs += _blobs(run, place, entry, gpu)
                    manifest["runs"].append(entry)
                file.writelines(page(manifest, blobs))
            aside.replace(output)
        finally:
            aside.unlink(missing_ok=True)
    size = output.stat().st_size / 2**20
    return f"{output}: {size:,.1f} MB, to be opened in a browser"


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as distinguish them."""
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            break
    return names if folders else []


def _blobs(run: RunReader, place: int, entry: dict[str, Any], gpu: str | None) -> Iterator[str]:
    """The data of a run, listed in its `entry` of the manifest."""
    yield blob(f"{place}/overview", overview(run))[0]
    yield blob(f"{place}/metrics", metrics_table(run))[0]
    yield blob(f"{place}/plan", plan_view(run, gpu))[0]
    plan = run.plan
    entry["timed"] = []
    share = min(1.0, _MOST_SPANS / max(1, len(run.spans)))
    timed = spread(run.timed_steps, min(_MOST_TIMED_STEPS, round(len(run.timed_steps) * share)))
    for chunk in batched(timed, _STEPS_OF_CHUNK):
        entry["timed"].append(chunk)
        yield blob(f"{place}/steps/{chunk[0]}", {step: step_view(run, step, plan) for step in chunk})[0]
    entry["samples"] = {}
    for kind, steps in sample_steps(run.folder).items():
        entry["samples"][kind] = []
        budget = _SAMPLES_BYTES
        # From the newest samples back to the first.
        for step in reversed(spread(steps, _SAMPLES_OF_STEPS)):
            text, size = blob(f"{place}/samples/{kind}/{step}", sample_view(run.folder, step, validation=kind == "val"))
            budget -= size
            if budget < 0:
                break
            entry["samples"][kind].insert(0, step)
            yield text


def spread(steps: Sequence[int], count: int) -> list[int]:
    """At most `count` of the steps, evenly spaced, including the first and the last."""
    if len(steps) <= count:
        return list(steps)
    last = len(steps) - 1
    return [steps[round(place * last / max(1, count - 1))] for place in range(count)]
