"""Names of metrics of further policies and rewards.

Metrics of an update or rollout beside the first begin with its node's name: ``update_verifier/loss/policy``. A reward
written under its own name is ``reward/NAME``. In validation, ``val/`` precedes all of these.
"""

from __future__ import annotations

from collections.abc import Iterable

_REWARD = "reward/mean"
_PARTS_OF_REWARD = frozenset(
    ("mean", "std", "cosine", "length", "overlong", "failed_fraction", "cut_fraction", "cut_mean")
)
"""Names after ``reward/`` that belong to the first reward."""


def same_of_others(name: str, metrics: Iterable[str]) -> list[tuple[str, str]]:
    """The metric `name` of other policies in `metrics`: full name, and its node or reward."""
    where = "val/" if name.startswith("val/") else ""
    plain = name.removeprefix(where)
    others = []
    for metric in metrics:
        if not metric.startswith(where):
            continue
        rest = metric.removeprefix(where)
        if plain == _REWARD:
            first, _, other = rest.partition("/")
            is_other = first == "reward" and other not in _PARTS_OF_REWARD
        else:
            other = rest.removesuffix(f"/{plain}")
            is_other = other != rest and other != "val"
        if is_other and "/" not in other:
            others.append((metric, other))
    return others
