"""Advantage estimators and policy losses of the user: the columns that they read, and their signatures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dagrl.config.errors import listed, suggest
from dagrl.config.schema import AdvantageNode, NodeBase, UpdateNode
from dagrl.graph.columns import CORE_COLUMNS, Shape
from dagrl.graph.op_contracts import Formula, Scope
from dagrl.graph.plugins.custom import Function, check_call, column_names, load_plain_function

_MARK = "dagrl_formula"
_TOKENS = ("logprob", "entropy")
"""Inputs of every loss."""


@dataclass(frozen=True, slots=True)
class _Marked:
    kind: str
    formula: Formula


def estimator(
    *, reads: tuple[str, ...] | list[str] = ("reward", "group_id"), scope: str = "group"
) -> Callable[[Function], Function]:
    """Declare a function as an advantage estimator: ``function(batch, **args) -> advantages``.

    `batch` is a dict of the columns that it `reads`, and of ``reward`` and ``response_mask``, as a node of your own
    sees them; penalties on length and divergence are taken off ``reward`` already. It returns one number for each
    response, or for each an array with one for each of its tokens. `scope` is ``row`` (may start on finished shards),
    ``group`` (needs all responses to a prompt) or ``batch``. Raises ValueError for an unknown scope.
    """
    if scope not in (known := [each.value for each in Scope]):
        raise ValueError(f"an estimator's scope cannot be {scope!r}; {suggest(str(scope), known)}")
    return _mark("estimator", reads, Scope(scope))


def loss(*, reads: tuple[str, ...] | list[str] = ("old_logprob", "advantage")) -> Callable[[Function], Function]:
    """Declare a function as a policy loss: ``function(tokens, **args) -> loss of each token``.

    `tokens` has the response tokens of a micro-batch, by name: ``tokens["logprob"]`` and ``tokens["entropy"]`` with
    gradient, and each column that it `reads`; ``tokens.rows`` has sums and means over responses. It returns a tensor of
    the same shape, to be minimised; weights, masks, divergence and entropy bonus are dagrl's. See
    `dagrl.algorithms.own_loss.LossTokens`.
    """
    return _mark("loss", reads, Scope.BATCH)


def formula_of(node: NodeBase, folder: Path | None) -> Formula | None:
    """The columns and scope of the user's formula in a node; None if the node has none. ValueError if it is invalid."""
    loaded = load_formula(node, folder)
    return loaded[1] if loaded else None


def load_formula(node: NodeBase, folder: Path | None) -> tuple[Callable[..., Any], Formula] | None:
    """The user's formula in a node, and what it reads; None if there is none. ValueError if it is invalid."""
    place = own_formula(node)
    if place is None:
        return None
    kind = "estimator" if isinstance(node, AdvantageNode) else "loss"
    function = load_plain_function(place, folder)
    marked = getattr(function, _MARK, None)
    if marked is None:
        raise ValueError(f"`{place}` does not declare what it reads; decorate it with @dagrl.{kind}(reads=[...])")
    if marked.kind != kind:
        raise ValueError(f"`{place}` is decorated with @dagrl.{marked.kind}; decorate it with @dagrl.{kind}")
    if kind == "loss":
        _check_readable(place, marked.formula)
    return function, marked.formula


def own_formula(node: NodeBase) -> str | None:
    """The ``module:function`` that a node names; None if it uses a built-in formula."""
    match node:
        case AdvantageNode():
            name: str = node.estimator
        case UpdateNode():
            name = node.loss.policy
        case _:
            return None
    return name if ":" in name else None


def place_of_formula(node: NodeBase) -> tuple[str, ...]:
    """The place of the formula's name within a node."""
    return ("loss", "policy") if isinstance(node, UpdateNode) else ("estimator",)


def check_formula_at(node: NodeBase, folder: Path | None) -> None:
    """ValueError if the user's own formula in a node cannot be called with the node's arguments."""
    loaded, place = load_formula(node, folder), own_formula(node)
    assert loaded is not None and place is not None, "the node uses a built-in formula"
    args = node.loss.args if isinstance(node, UpdateNode) else node.args if isinstance(node, AdvantageNode) else {}
    given = "tokens" if isinstance(node, UpdateNode) else "batch"
    check_call(loaded[0], place, f"it gets the {given} and the node's args, so fix `args`", None, **args)


def _mark(kind: str, reads: tuple[str, ...] | list[str], scope: Scope) -> Callable[[Function], Function]:
    columns = column_names(kind, "reads", reads)

    def mark(function: Function) -> Function:
        setattr(function, _MARK, _Marked(kind, Formula(columns, scope)))
        return function

    return mark


def _check_readable(place: str, formula: Formula) -> None:
    """ValueError if a loss reads a column without values for response tokens."""
    given = [name for name in formula.reads if name in _TOKENS]
    if given:
        raise ValueError(f"`{place}` reads {listed(given)}, which every loss gets; remove it from `reads`")
    others = [
        name
        for name in formula.reads
        if name in CORE_COLUMNS and CORE_COLUMNS[name].shape not in (Shape.SAMPLE, Shape.RESPONSE)
    ]
    if others:
        shape = CORE_COLUMNS[others[0]].shape.value
        raise ValueError(
            f"`{place}` reads `{others[0]}`, which is {shape}, not per response or response token; read another column"
        )
