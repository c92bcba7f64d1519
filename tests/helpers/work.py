"""Work of any kind with as few arguments as a test needs."""

from __future__ import annotations

from typing import Any

from dagrl.workers.messages import TaskWork


def work_of[Work: TaskWork](kind: type[Work], task: str, **fields: Any) -> Work:
    """Work of step 2, for the node with the task's name."""
    common = {"step": 2, "op": "any", "node": task, "validation": False, "committed": 0, "shards": 2, "outputs": {}}
    return kind(task=task, **{**common, "sampled_by": None, "metric_prefix": "", **fields})
