"""ROLL's run: steps, checkpoints and trackers."""

from __future__ import annotations

import math

from dagrl.importing.parts import keep, named, tracked
from dagrl.importing.table import Translation, joint, to


def _ahead(t: Translation) -> None:
    ratio = t.number("async_generation_ratio", 0)
    if ratio:
        t.write("schedule.max_staleness", math.ceil(ratio), "async_generation_ratio", note="whole steps")
        t.put("engines.generator.weight_sync.pause", "in_place")
    else:
        t.imply("steps do not overlap, as by default", "async_generation_ratio")


RULES = (
    named("exp_name"),
    joint(_ahead, "async_generation_ratio"),
    to("seed", "run.seed"),
    to("max_steps", "run.steps", write_default=True),
    to("save_steps", "run.save_every", write_default=True),
    joint(lambda t: keep(t, "max_ckpt_to_keep"), "max_ckpt_to_keep", always=True),
    tracked(
        "track_with",
        project="tracker_kwargs.project",
        name="tracker_kwargs.name",
        entity="tracker_kwargs.workspace",
    ),
    to("rpc_timeout", "run.node_timeout_s", convert=float),
)
