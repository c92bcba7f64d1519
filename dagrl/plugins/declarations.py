"""The decorators of user functions (ops, estimators, losses and rewards), and their declarations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dagrl.config.columns import COLUMN_NAME, CORE_COLUMNS, Shape
from dagrl.config.errors import listed, suggest
from dagrl.config.schema import CustomNode, FilterNode, NodeBase, OpContract, Scope, SelectiveNode, UpdateNode
from dagrl.plugins.custom import UserFunction, check_names, known_parameters, load_function, name_of, signature_of

Function = TypeVar("Function", bound=Callable[..., object])
_Names = tuple[str, ...] | list[str]

FIELDS = (
    *("prompt", "response", "answer", "data_source", "extra_info"),
    *("finish_reason", "turns", "turn_rewards", "agent_reward"),
)
"""Keyword arguments that a reward function may take."""
FIELDS_OF_VERL = {"solution_str": "response", "ground_truth": "answer"}
"""verl's names of some of them."""
BATCHED_FIELDS_OF_VERL = {
    "solution_strs": "response", "ground_truths": "answer", "data_sources": "data_source", "extra_infos": "extra_info"
}  # fmt: skip
"""Further arguments of batched functions."""
_TOKENS = ("logprob", "entropy")
"""Inputs of every loss."""


@dataclass(frozen=True, slots=True)
class RewardTraits:
    """How a reward function is called."""

    batched: bool = False
    concurrency: int = 1
    """Calls at once, each in its own thread."""


def node(*, reads: _Names, writes: _Names, scope: str = "row") -> Callable[[Function], Function]:
    """Declare a function as an op: ``function(batch, **args) -> {column: values}``.

    `scope` is ``row`` (may start on finished shards), ``group`` (needs all responses to a prompt) or ``batch``. Raises
    ValueError for an unknown scope, and for columns that are not a list of names.
    """
    return _declare("node", reads, writes, scope)


def estimator(*, reads: _Names = ("reward", "group_id"), scope: str = "group") -> Callable[[Function], Function]:
    """Declare a function as an advantage estimator: ``function(batch, **args) -> advantages``.

    `batch` is a dict of the columns that it `reads`, and of ``reward`` and ``response_mask``, in the form that a user's
    node gets; penalties on length and divergence are already subtracted from ``reward``. It returns one number for each
    response, or an array with one number for each of its tokens. `scope` is ``row`` (may start on finished shards),
    ``group`` (needs all responses to a prompt) or ``batch``. Raises ValueError for an unknown scope.
    """
    return _declare("estimator", reads, (), scope)


def loss(*, reads: _Names = ("old_logprob", "advantage")) -> Callable[[Function], Function]:
    """Declare a function as a policy loss: ``function(tokens, **args) -> loss of each token``.

    `tokens` has the response tokens of a micro-batch, by name: ``tokens["logprob"]`` and ``tokens["entropy"]`` with
    gradient, and each column that it `reads`; ``tokens.rows`` has sums and means over responses. It returns a tensor of
    the same shape, to be minimised; dagrl applies weights, masks, divergence and entropy bonus. See
    `dagrl.algorithms.own_loss.LossTokens`.
    """
    return _declare("loss", reads, (), "batch")


def reward(*, batched: bool = False, concurrency: int = 1) -> Callable[[Function], Function]:
    """Declare how a reward function is called: once a sample, or once a shard with lists (`batched`).

    A function that waits for a server or a process can run for `concurrency` samples at once, each in its own thread.
    Raises ValueError for a concurrency below 1, or one above 1 together with `batched`.
    """
    if not isinstance(batched, bool):
        raise ValueError(f"a reward's `batched` is True or False; it cannot be {batched!r:.60}")
    if type(concurrency) is not int or concurrency < 1 or (batched and concurrency > 1):
        raise ValueError(
            f"a reward's concurrency is 1 or more, and 1 where it is batched; it cannot be {concurrency!r:.60}"
        )
    return _mark("dagrl_reward", RewardTraits(batched, concurrency))


def _mark(name: str, value: object) -> Callable[[Function], Function]:
    def mark(function: Function) -> Function:
        setattr(function, name, value)
        return function

    return mark


def _declare(kind: str, reads: object, writes: object, scope: str) -> Callable[[Function], Function]:
    if scope not in (known := [each.value for each in Scope]):
        raise ValueError(f"the scope cannot be {scope!r}; {suggest(str(scope), known)}")
    contract = OpContract(_column_names(kind, "reads", reads), _column_names(kind, "writes", writes), Scope(scope))
    return _mark("dagrl_contract", (kind, contract))


def _column_names(kind: str, field: str, given: object) -> tuple[str, ...]:
    """Check the columns of a decorator. ValueError for anything but a list of different names.

    Types cannot be declared: built-in columns have the type in `dagrl.config.columns`, all others are float32.
    """
    example = f"write `{field}=['reward']`"
    if not isinstance(given, list | tuple):
        raise ValueError(f"the columns that the {kind} {field} are a list of names, not {given!r:.60}; {example}")
    for name in given:
        if not isinstance(name, str) or not COLUMN_NAME.fullmatch(name):
            message = f"{name!r:.60} is not the name of a column that the {kind} {field}: lower-case letters, digits, _"
            raise ValueError(f"{message}; {example}")
        if given.count(name) > 1:
            raise ValueError(f"the {kind} {field} `{name}` twice; write each column once")
    return tuple(str.__str__(name) for name in given)


def declared(function: UserFunction, place: str, kind: str) -> OpContract:
    """The declaration by ``@dagrl.KIND`` on a function. ValueError if it has another decorator or no decorator."""
    marked, contract = getattr(function, "dagrl_contract", (None, OpContract(())))
    if marked != kind:
        what = f"is decorated with @dagrl.{marked}" if marked else "does not declare its columns"
        raise ValueError(f"`{place}` {what}; decorate it with @dagrl.{kind}(reads=[...])")
    return contract


def declaration_of(function: UserFunction, node: NodeBase) -> OpContract:
    """The declaration of the user's function in a node. ValueError if it does not fit the node."""
    assert node.user_function is not None, "the node names a function"
    _, place = node.user_function
    match node:
        case FilterNode():
            return OpContract(rule_columns(function, node.args))
        case SelectiveNode():
            return OpContract(rule_columns(function, {}))
        case CustomNode():
            contract = declared(function, place, "node")
            if not contract.reads:
                raise ValueError(f"`{place}` reads no column, so it has no rows to work on; read `sample_id` at least")
            return contract
        case UpdateNode():
            contract = declared(function, place, "loss")
            _check_readable(place, contract.reads)
            return contract
    return declared(function, place, "estimator")


def load_formula(node: NodeBase, folder: Path | None) -> tuple[UserFunction, OpContract] | None:
    """The user's function in a node, and its declaration; None for a node without one. ValueError if it is invalid."""
    if node.user_function is None:
        return None
    function = load_function(node.user_function[1], folder)
    return function, declaration_of(function, node)


def rule_columns(rule: UserFunction, args: Mapping[str, object]) -> tuple[str, ...]:
    """Columns that a function of ``filter`` or ``rows`` takes: its parameters except `args`.

    ValueError if one is not a column.
    """
    name = name_of(rule)
    parameters = signature_of(rule, name).parameters
    for parameter in parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"the rule {name} takes {parameter}; columns are given by name, so name them one by one")
    check_names(name, parameters, args)
    columns = tuple(
        parameter.name
        for parameter in parameters.values()
        if parameter.name not in args and parameter.default is parameter.empty
    )
    if not columns:
        raise ValueError(f"the rule {name} takes no column; name one, as in `def keep(reward): ...`")
    return columns


def reward_traits(function: UserFunction) -> RewardTraits:
    """Traits of a reward function; an undecorated one is called once a sample."""
    return getattr(function, "dagrl_reward", RewardTraits())


def checked_traits(function: UserFunction, place: str) -> RewardTraits:
    """The traits of the reward function at `place`. ValueError if it does not return its result."""
    if inspect.isclass(function):
        raise ValueError(f"`{place}` is a class, and a reward is a function; name one")
    signature_of(function, place)
    return reward_traits(function)


def fields_of(function: UserFunction, args: Mapping[str, object]) -> dict[str, str]:
    """Parameters of a reward function that are fields of a sample -> their names in `FIELDS`.

    ValueError if `args` do not fit the function, or it needs another parameter.
    """
    name = name_of(function)
    for key in args:
        if key in FIELDS:
            raise ValueError(f"args of the reward {name} may not set {key!r}, which is the sample's; remove it")
    others = FIELDS_OF_VERL | (BATCHED_FIELDS_OF_VERL if reward_traits(function).batched else {})
    known = known_parameters(function, name, (*FIELDS, *others), args)
    declared = signature_of(function, name).parameters
    return {each: others.get(each, each) for each in known if each in FIELDS or (each in declared and each not in args)}


def _check_readable(place: str, reads: tuple[str, ...]) -> None:
    """ValueError if a loss reads a column without values for response tokens."""
    given = [name for name in reads if name in _TOKENS]
    if given:
        raise ValueError(f"`{place}` reads {listed(given)}, which every loss gets; remove it from `reads`")
    for name in reads:
        shape = CORE_COLUMNS[name].shape if name in CORE_COLUMNS else Shape.RESPONSE
        if shape not in (Shape.SAMPLE, Shape.RESPONSE):
            kind = f"{shape.value}, not per response or response token"
            raise ValueError(f"`{place}` reads `{name}`, which is {kind}; read another column")
