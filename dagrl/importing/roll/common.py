"""Roles that several tables of ROLL read."""

from __future__ import annotations

import math
import re

from dagrl.importing.engines import PARALLEL
from dagrl.importing.table import Translation

TRAIN, INFER, REFERENCE, CRITIC = "actor_train", "actor_infer", "reference", "critic"


STRATEGY = "strategy_args.strategy_config"


def devices(value: object) -> list[int] | None:
    """The GPUs of a ``device_mapping``: a list, or a text such as ``list(range(0,8)) + [12]``, not evaluated."""
    if isinstance(value, list):
        return [int(option) for option in value] if all(isinstance(option, int) for option in value) else None
    gpus: list[int] = []
    for part in str(value).split("+"):
        ranged = re.fullmatch(r"\s*list\(range\((\d{1,6}),?\s*(\d{1,6})?(?:,\s*(\d{1,6}))?\)\)\s*", part)
        listed = re.fullmatch(r"\s*\[([\d,\s]*)\]\s*", part)
        if ranged:
            first, last, step = ranged[1], ranged[2], ranged[3]
            gpus += range(int(first), int(last), int(step or 1)) if last else range(int(first))
        elif listed:
            gpus += [int(option) for option in listed[1].split(",") if option.strip()]
        else:
            return None
    return gpus


def devices_of(t: Translation, role: str) -> set[int]:
    return set(devices(t.get(f"{role}.device_mapping")) or ())


def data_parallel_ranks(t: Translation) -> int:
    sizes = [t.number(f"{TRAIN}.{STRATEGY}.{name}", 1) for name in (PARALLEL[0], PARALLEL[1], PARALLEL[3])]
    return max(1, len(devices_of(t, TRAIN))) // math.prod(sizes) or 1


def uses_critic(t: Translation) -> bool:
    return t.get("adv_estimator") == "gae" and not is_pure_opd(t)


def is_pure_opd(t: Translation) -> bool:
    """Return whether a teacher is the only source of learning; ROLL's launcher sets it, so its YAML may not."""
    has_teacher = any(setting.key.startswith("teacher.") for setting in t.settings)
    return t.flag("is_pure_opd") or (has_teacher and not t.flag("use_opd"))
