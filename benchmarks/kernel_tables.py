"""Where a step of a rank goes: a table of its kernels, and a trace that Perfetto opens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


def write_kernels(name: str, step: Callable[[], object], folder: Path) -> None:
    """Run `step` once, and write NAME.txt and NAME.trace.json.gz into `folder` on the first rank."""
    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])) as profiled:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    if torch.distributed.get_rank() > 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    table = profiled.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=90)
    name = name.replace(" ", "_")
    (folder / f"{name}.txt").write_text(table)
    profiled.export_chrome_trace(str(folder / f"{name}.trace.json.gz"))
