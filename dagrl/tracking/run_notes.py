"""Notes that a run prints once about its steps: most responses were cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

_MOST = 0.5
_FRACTION = "response_tokens/cut_fraction"


def run_notes(steps: Sequence[Mapping[str, float]], config: Mapping[str, object]) -> dict[str, str]:
    """Sentences, by the metric: if at least half of the responses of `steps` were cut, in training and in validation.

    `steps` are metrics; `config` is the pipeline, as it is written in a file, possibly without anything.
    """
    notes = {}
    own = _limits_of_sources(config)
    usual = [] if own else [(_FRACTION, "responses", _key(config, _FRACTION))]
    validated = f"val/{_FRACTION}", "responses in validation", _key(config, f"val/{_FRACTION}")
    for metric, what, key in (*usual, *own, validated):
        shares = [step[metric] for step in steps if metric in step]
        if shares and (share := fmean(shares)) >= _MOST:
            notes[metric] = f"{share:.0%} of the {what} were cut at the token limit; raise {key}"
    return notes


def _limits_of_sources(config: Mapping[str, object]) -> list[tuple[str, str, str]]:
    """Metric, name and key of each source's limit, if sources have their own."""
    train = section(config, "data", "train")
    if "max_new_tokens" in (limit := section(train, "sampling")):
        return [(_FRACTION, "responses", f"data.train.sampling.max_new_tokens ({limit['max_new_tokens']})")]
    own = {name: limit["max_new_tokens"] for name in train if (limit := section(train, name, "sampling"))}
    keys = {name: f"data.train.{name}.sampling.max_new_tokens ({limit})" for name, limit in own.items()}
    usual = _key(config, _FRACTION)
    prefix = "train/{}/" if len(train) > 1 else ""
    metrics = {name: prefix.format(name) + _FRACTION for name in train}
    return [(metrics[name], f"responses to `{name}`", keys.get(name, usual)) for name in train] if own else []


def _key(config: Mapping[str, object], metric: str) -> str:
    """The key of the limit in the pipeline, with its value; also that of a turn, which may be the limit."""
    nodes = section(config, "nodes")
    name = next((name for name in nodes if section(nodes, name).get("op") == "rollout"), "rollout")
    node = section(nodes, name)
    sampling = "val_sampling" if metric.startswith("val/") and node.get("val_sampling") else "sampling"
    limit = section(node, sampling).get("max_new_tokens")
    key = f"nodes.{name}.{sampling}.max_new_tokens" + (f" ({limit})" if limit else "")
    turn = node.get("max_turn_tokens")
    return key + (f" or nodes.{name}.max_turn_tokens ({turn})" if turn else "")


def section(tree: Mapping[str, object], *keys: str) -> Mapping[str, object]:
    """The mapping at a place of a pipeline file; an empty one if there is none."""
    for key in keys:
        inner = tree.get(key)
        tree = inner if isinstance(inner, Mapping) else {}
    return tree
