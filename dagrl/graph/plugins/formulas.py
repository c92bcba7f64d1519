"""The user's own formulas: advantage estimators and policy losses, as ``module:function`` in the pipeline file.

`dagrl.graph.plugins.custom` finds and imports them. This module checks the columns they read and their signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dagrl.config.errors import listed, suggest
from dagrl.config.schema import AdvantageNode, NodeBase, UpdateNode
from dagrl.graph.columns import CORE_COLUMNS, Shape
from dagrl.graph.op_contracts import Formula, Scope
from dagrl.graph.plugins.custom import Function, column_names, load_plain_function, signature_of

_MARK = "dagrl_formula"
_TOKENS = ("logprob", "entropy")
"""What a loss is given anyway."""


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
    """What the user's own formula in a node reads; None where the node has none. ValueError where it cannot be used."""
    loaded = load_formula(node, folder)
    return loaded[1] if loaded else None


def load_formula(node: NodeBase, folder: Path | None) -> tuple[Callable[..., Any], Formula] | None:
    """The user's own formula in a node, and what it reads; else as `formula_of`."""
    place = own_formula(node)
    if place is None:
        return None
    kind = "estimator" if isinstance(node, AdvantageNode) else "loss"
    function = load_plain_function(place, folder)
    marked = getattr(function, _MARK, None)
    if marked is None:
        raise ValueError(f"`{place}` does not say what it reads; decorate it with @dagrl.{kind}(reads=[...])")
    if marked.kind != kind:
        raise ValueError(f"`{place}` is decorated with @dagrl.{marked.kind}; decorate it with @dagrl.{kind}")
    if kind == "loss":
        _check_readable(place, marked.formula)
    return function, marked.formula


def own_formula(node: NodeBase) -> str | None:
    """The ``module:function`` that a node computes with, where it names one."""
    match node:
        case AdvantageNode():
            name: str = node.estimator
        case UpdateNode():
            name = node.loss.policy
        case _:
            return None
    return name if ":" in name else None


def place_of_formula(node: NodeBase) -> tuple[str, ...]:
    """Where, within a node, the name of its formula stands."""
    return ("loss", "policy") if isinstance(node, UpdateNode) else ("estimator",)


def check_formula_at(node: NodeBase, folder: Path | None) -> None:
    """ValueError where the user's own formula in a node cannot be called with the node's arguments."""
    loaded, place = load_formula(node, folder), own_formula(node)
    assert loaded is not None
    assert place is not None
    match node:
        case UpdateNode():
            check_formula_arguments(loaded[0], place, node.loss.args, "the tokens")
        case AdvantageNode():
            check_formula_arguments(loaded[0], place, node.args, "the batch")


def check_formula_arguments(function: Callable[..., Any], place: str, args: Mapping[str, Any], given: str) -> None:
    """ValueError where a formula, a ``function(given, **args)``, cannot be called with these arguments."""
    signature = signature_of(function, place)
    try:
        signature.bind(None, **args)
    except TypeError as error:
        raise ValueError(f"`{place}` is called with {given} and the node's args: {error}; mend `args`") from error


def _mark(kind: str, reads: tuple[str, ...] | list[str], scope: Scope) -> Callable[[Function], Function]:
    columns = column_names(kind, "reads", reads)

    def mark(function: Function) -> Function:
        setattr(function, _MARK, _Marked(kind, Formula(columns, scope)))
        return function

    return mark


def _check_readable(place: str, formula: Formula) -> None:
    """A loss sees response tokens: ValueError where it reads a column that has nothing for them."""
    given = [name for name in formula.reads if name in _TOKENS]
    if given:
        raise ValueError(f"`{place}` reads {listed(given)}, which every loss is given; take it out of `reads`")
    others = [
        name
        for name in formula.reads
        if name in CORE_COLUMNS and CORE_COLUMNS[name].shape not in (Shape.SAMPLE, Shape.RESPONSE)
    ]
    if others:
        shape = CORE_COLUMNS[others[0]].shape.value
        raise ValueError(
            f"`{place}` reads `{others[0]}`, which is {shape}, and a loss is of response tokens; read a column with a "
            "value for each response or response token"
        )
