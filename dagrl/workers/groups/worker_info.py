"""``workers.json``: where each worker of a run is, for whoever has to look at one."""

from __future__ import annotations

import json
from pathlib import Path

from dagrl.scheduler.plan import Plan
from dagrl.workers.groups.worker_group import Fleet


def write_workers(fleet: Fleet, plan: Plan, folder: Path) -> None:
    """Write it to the run folder, in one go. OSError where that fails."""
    workers = {
        member.name: {"host": member.at.host, "pid": member.at.pid}
        for name in plan.executors
        for member in fleet.members(name)
    }
    aside = folder / ".workers.json"
    aside.write_text(json.dumps(workers, indent=1))
    aside.replace(folder / "workers.json")
