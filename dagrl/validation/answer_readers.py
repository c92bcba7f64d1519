"""Nodes that read the reference answers of the data set, and which of them need one in every row."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dagrl.config.reward_names import BUILT_IN_REWARDS
from dagrl.config.schema import JudgeNode, RewardNode, RolloutNode
from dagrl.graph.dag import PROMPTS_NODE, SAMPLES_NODE, Graph, GraphNode
from dagrl.graph.plugins.custom import parameters_at
from dagrl.graph.plugins.isolation import ask
from dagrl.graph.plugins.judging import fields_in, is_function

_COLUMN = "answer"
_END_RUNS = ("code", "math")
"""Rewards that raise an error for an empty reference answer."""


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """A node that reads reference answers; it is given a null as an empty text."""

    name: str
    needs_all: bool = False
    """Whether it cannot judge a response without one. A function of the user's own may know what to do."""
    refuses_blanks: bool = False
    """Whether an empty answer ends the run."""


def answer_readers(graph: Graph, folder: Path) -> list[AnswerReader]:
    """The nodes that read the data set's answers; `folder` holds the user's own modules."""
    readers = []
    for name, node in graph.nodes.items():
        wire = node.inputs.get(_COLUMN)
        if name == SAMPLES_NODE or wire is None or (wire.node, wire.column) != (PROMPTS_NODE, _COLUMN):
            continue
        if not _asks(node, folder):
            continue
        match node.spec:
            case RewardNode(fn=fn, on_error=on_error) if fn in BUILT_IN_REWARDS:
                stops = fn in _END_RUNS and on_error == "stop"
                readers.append(AnswerReader(name, needs_all=stops or fn not in _END_RUNS, refuses_blanks=stops))
            case _:
                readers.append(AnswerReader(name))
    return readers


def _asks(node: GraphNode, folder: Path) -> bool:
    """Whether a node looks at the answers, where all nodes of its kind are given them."""
    match node.spec:
        case RewardNode(fn=fn):
            return _names_answer(BUILT_IN_REWARDS.get(fn, fn), "", folder)
        case RolloutNode(environment=str(environment)):
            return _names_answer(environment, "reset", folder)
        case JudgeNode(prompt=prompt, parser=parser):
            parses = is_function(parser) and _names_answer(parser, "", folder)
            return parses or _COLUMN in fields_in(prompt)
    return True


def _names_answer(place: str, method: str, folder: Path) -> bool:
    try:
        return _COLUMN in ask(place, parameters_at, place, method, folder=folder)
    except ValueError:
        return False  # Other checks say what is wrong with it.
