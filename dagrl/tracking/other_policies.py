"""Metrics of the policies and rewards beside the first, by the names that a run gives them.

An update, or a rollout, beside the first has its node's name in front: ``update_verifier/loss/policy``. A reward that
is written under a name of its own is ``reward/NAME``. In validation ``val/`` stands before all of these.
"""

from __future__ import annotations

from collections.abc import Iterable

_REWARD = "reward/mean"
_PARTS_OF_REWARD = frozenset(("mean", "std", "cosine", "length", "overlong", "failed_fraction", "cut_fraction"))
"""Names after ``reward/`` in the metrics of the first reward."""


def same_of_others(name: str, metrics: Iterable[str]) -> list[tuple[str, str]]:
    """The metric `name` of other policies, among `metrics`: the whole name, and the node or reward that it is of."""
    where = "val/" if name.startswith("val/") else ""
    plain = name.removeprefix(where)
    found = []
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
            found.append((metric, other))
    return found
