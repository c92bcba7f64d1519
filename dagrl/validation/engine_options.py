"""Heads of engines, and the heads that nodes and generators need."""

from __future__ import annotations

from dagrl.config.errors import Place
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import Pipeline

_HEADS = {"lm": "the language model's", "value": "a critic's", "reward": "a reward model's"}
_OWN_HEADS = {"values": "value", "critic": "value", "reward_model": "reward"}
"""What ops need of their engine that do not need a language model."""


def check_engine_options(pipeline: Pipeline, findings: Findings) -> None:
    """Report nodes and generators whose engine has another head than they need."""
    for name, engine in pipeline.engines.items():
        place: Place = ("engines", name)
        if engine.weights_from is not None:
            _check_head_of(pipeline, engine.weights_from, "lm", (*place, "weights_from"), "a generator needs", findings)
    for name, node in pipeline.nodes.items():
        if (engine_name := getattr(node, "engine", None)) is not None:
            op = str(node.op)
            needed = _OWN_HEADS.get(op, "lm")
            _check_head_of(pipeline, engine_name, needed, ("nodes", name, "engine"), f"op {op} needs", findings)


def _check_head_of(pipeline: Pipeline, name: str, needed: str, place: Place, who: str, findings: Findings) -> None:
    """Report an engine that has another head than is needed."""
    engine = pipeline.engines.get(name)
    if engine is not None and engine.frozen_copy_of is not None:
        engine = pipeline.engines.get(engine.frozen_copy_of)
    if engine is None or (head := engine.head) == needed:
        return
    has = "the language model's head" if head == "lm" else f"a {head} head"
    message = f"`{name}` has {has}, and {who} {_HEADS[needed]}; name an engine with `head: {needed}`"
    findings.error(place, message, depends_on=[place, ("engines", name, "head")])
