"""Says that most responses were cut at the limit of tokens, and which key raises it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

_MOST = 0.5
_FRACTION = "response_tokens/cut_fraction"


def cut_notes(steps: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> dict[str, str]:
    """For training and validation a sentence, by the metric, if at least half of the responses of `steps` were cut.

    `steps` are metrics; `config` is the pipeline, as it is written in a file, possibly without anything.
    """
    notes = {}
    for metric, what in ((_FRACTION, "responses"), (f"val/{_FRACTION}", "responses in validation")):
        shares = [step[metric] for step in steps if metric in step]
        if shares and (share := fmean(shares)) >= _MOST:
            notes[metric] = f"{share:.0%} of the {what} were cut at the token limit; raise {_key(config, metric)}"
    return notes


def _key(config: Mapping[str, Any], metric: str) -> str:
    """The key of the limit in the pipeline, with its value; also that of a turn, which may be the limit."""
    nodes = config.get("nodes") or {}
    rollouts = {name: node for name, node in nodes.items() if isinstance(node, Mapping) and node.get("op") == "rollout"}
    name, node = next(iter(rollouts.items()), ("rollout", {}))
    sampling = "val_sampling" if metric.startswith("val/") and node.get("val_sampling") else "sampling"
    limit = (node.get(sampling) or {}).get("max_new_tokens")
    key = f"nodes.{name}.{sampling}.max_new_tokens" + (f" ({limit})" if limit else "")
    turn = node.get("max_turn_tokens")
    return key + (f" or nodes.{name}.max_turn_tokens ({turn})" if turn else "")
