"""Trinity-RFT's ``cluster`` and ``synchronizer``: groups of GPUs, and how far the explorer works ahead."""

from __future__ import annotations

import math

from dagrl.importing.parts import put_groups
from dagrl.importing.table import Translation, joint, under
from dagrl.importing.trinity.common import MODEL, interval_of, uses_critic


def _groups(t: Translation) -> None:
    """Explorer and trainer have GPUs of their own: the engines' first, the rest for the trainer."""
    nodes, gpus = t.number("cluster.node_num", 1), t.number("cluster.gpu_per_node", 8)
    number, tensor = f"{MODEL}.engine_num", f"{MODEL}.tensor_parallel_size"
    each = t.number(tensor, 1) * t.number(f"{MODEL}.data_parallel_size", 1)
    rollout = int(t.number(number, 1) * each)
    total = int(nodes * gpus)
    keys = ("cluster.node_num", "cluster.gpu_per_node", number, tensor)
    if t.get("mode") == "colocate" or rollout >= total:
        put_groups(t, {"gpus": (int(nodes), int(gpus))})
        t.write("groups.gpus.gpus_per_node", int(gpus), *keys[:2])
        t.put("engines.actor.group", "gpus")
        t.put("engines.generator.group", "gpus")
        t.imply("engines fill the group", number)
    else:
        train = total - rollout
        machines = {name: _split(count, int(gpus)) for name, count in (("train", train), ("rollout", rollout))}
        put_groups(t, machines)
        note = f"{rollout} GPUs of {total} for the engines, {train} for the trainer"
        t.write("groups.train.gpus_per_node", machines["train"][1], *keys[:3], note=note)
        t.write("groups.rollout.gpus_per_node", machines["rollout"][1], number, note=note)
        t.put("engines.actor.group", "train")
        t.put("engines.generator.group", "rollout")
    if uses_critic(t):
        t.put("engines.critic.group", t.tree["engines.actor.group"])
    t.put("engines.actor.backend", "megatron")


def _split(count: int, machine: int) -> tuple[int, int]:
    if count <= machine:
        return 1, count
    nodes = next(n for n in range(-(-count // machine), count + 1) if count % n == 0)
    return nodes, count // nodes


def _ahead(t: Translation) -> None:
    offset, style, syncs = "synchronizer.sync_offset", "synchronizer.sync_style", interval_of(t)
    if t.number(offset, 0):
        t.write(
            "schedule.max_staleness",
            math.ceil(t.get(offset) / syncs),
            offset,
            note=f"/ sync_interval {syncs}, rounded up",
        )
    elif "dynamic" in str(t.get(style)) or str(t.get(style)) == "explorer_driven":
        t.write("schedule.max_staleness", 2, style, note="the generator works ahead, but no further")
    else:
        t.imply("trainer and generator wait for each other", offset, style)
    method = t.get("synchronizer.sync_method")
    if method == "checkpoint":
        t.refuse("weights go over NCCL or the object store", "synchronizer.sync_method")
    else:
        t.imply("`weight_sync.route: auto` chooses", "synchronizer.sync_method")


RULES = (
    joint(_groups, "cluster.node_num cluster.gpu_per_node", under(MODEL, "engine_num"), always=True),
    joint(_ahead, "synchronizer.sync_offset synchronizer.sync_style synchronizer.sync_method"),
)
