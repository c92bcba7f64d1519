"""The user's own ops and rewards: how they are declared, found, imported and called, and how their failures read.

A pipeline names them as ``module:function``; the module is looked for beside the pipeline file, on the Python path, and
beside dagrl's own templates.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from dagrl.spec.errors import suggest
from dagrl.spec.ops import OpContract, Scope
from dagrl.spec.reading.extends import OWN_TEMPLATES

Function = TypeVar("Function", bound=Callable[..., Any])

FIELDS = ("prompt", "response", "answer", "data_source", "extra_info", "turns", "turn_rewards")
"""Keyword arguments that a reward function may ask for."""

_SHOWN_CHARACTERS = 500
"""Of what a user's function says when it fails."""


@dataclass(frozen=True, slots=True)
class RewardTraits:
    """How a reward function wants to be called."""

    batched: bool = False
    concurrency: int = 1
    """Calls at once, each in a thread of its own."""


def node(
    *, reads: tuple[str, ...] | list[str], writes: tuple[str, ...] | list[str], scope: str = "row"
) -> Callable[[Function], Function]:
    """Declare a function as an op: ``function(batch, **args) -> {column: values}``.

    `scope` is ``row`` (may start on finished shards), ``group`` (needs all responses to a prompt) or ``batch``.
    Raises ValueError for an unknown scope.
    """
    if scope not in (known := [each.value for each in Scope]):
        raise ValueError(f"a node's scope cannot be {scope!r}; {suggest(scope, known)}")
    if isinstance(reads, str) or isinstance(writes, str):
        raise ValueError("a node's columns are a list, not one text; write `reads=['reward'], writes=['bonus']`")
    contract = OpContract(tuple(reads), tuple(writes), Scope(scope))

    def mark(function: Function) -> Function:
        function.dagrl_contract = contract  # type: ignore[attr-defined]
        return function

    return mark


def reward(*, batched: bool = False, concurrency: int = 1) -> Callable[[Function], Function]:
    """Declare how a reward function is called: once a sample, or once a shard with lists (`batched`).

    One that waits for others, a server or a process, may be called for `concurrency` samples at once, each in a thread
    of its own. ValueError for a concurrency below 1, or together with `batched`.
    """
    if concurrency < 1 or (batched and concurrency > 1):
        raise ValueError(f"a reward's concurrency is 1 or more, and 1 where it is batched; it cannot be {concurrency}")

    def mark(function: Function) -> Function:
        function.dagrl_reward = RewardTraits(batched, concurrency)  # type: ignore[attr-defined]
        return function

    return mark


def reward_traits(function: Callable[..., Any]) -> RewardTraits:
    """Traits of a reward function; an undecorated one is called once a sample."""
    return getattr(function, "dagrl_reward", RewardTraits())


def contract_of_function(function: Callable[..., Any], place: str) -> OpContract:
    """The contract that `node` put on a function; ValueError where it is missing."""
    contract = getattr(function, "dagrl_contract", None)
    if contract is None:
        raise ValueError(f"`{place}` does not say its columns; decorate it with @dagrl.node(reads=[...], writes=[...])")
    return contract


@contextmanager
def importable_from(folder: Path | None) -> Iterator[None]:
    """Let modules beside the pipeline file, and those of dagrl's own templates, be imported within the context."""
    if folder is None:
        yield
        return
    first, last = str(folder.resolve()), str(OWN_TEMPLATES)
    ends = [last] if last not in sys.path else []
    sys.path[:] = [first, *sys.path, *ends]
    importlib.invalidate_caches()  # The file may be younger than what Python remembers of its folder.
    try:
        yield
    finally:
        for entry in (first, *ends):
            sys.path.remove(entry)


def load_function(place: str, folder: Path | None = None) -> Callable[..., Any]:
    """Import ``module:function``. ValueError with one sentence where it is not there, or the module itself fails."""
    module_name, colon, function_name = place.partition(":")
    if not (colon and module_name and function_name):
        raise ValueError(f"{place!r} is not `module:function`; write the module's name, a colon, the function's name")
    try:
        with importable_from(folder):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            where = f"beside the pipeline file ({folder}) or on PYTHONPATH" if folder else "on PYTHONPATH"
            raise ValueError(f"there is no module {error.name!r}; put {module_name}.py {where}") from error
        raise ValueError(_import_failure(module_name, error)) from error
    except (Exception, SystemExit) as error:
        raise ValueError(_import_failure(module_name, error)) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(
            f"module {module_name!r} has no function {function_name!r}; {_functions_of(module, function_name)}"
        )
    return function


def fields_of(function: Callable[..., Any], args: Mapping[str, Any]) -> tuple[str, ...]:
    """Which of `FIELDS` a reward function takes, by its parameters' names; all of them where it has ``**kwargs``.

    Raises ValueError where `args` do not fit the function, or it asks for what nobody gives.
    """
    name = name_of(function)
    given = [field for field in FIELDS if field in args]
    if given:
        raise ValueError(f"args of the reward {name} may not set {given[0]!r}, which is the sample's")
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ValueError(f"the reward {name} takes {parameter.name!r} by position; arguments are given by name")
        if parameter.name in named and parameter.default is parameter.empty and parameter.name not in (*FIELDS, *args):
            raise ValueError(
                f"the reward {name} wants {parameter.name!r}, which is none of {', '.join(FIELDS)}; "
                "give it in the node's args"
            )
    unknown = [key for key in args if key not in named and not takes_any]
    if unknown:
        raise ValueError(f"the reward {name} has no parameter {unknown[0]!r}; remove it from the node's args")
    return FIELDS if takes_any else tuple(field for field in FIELDS if field in named)


def check_arguments(function: Callable[..., Any], place: str, args: Mapping[str, Any]) -> None:
    """ValueError where an op, a ``function(batch, **args)``, cannot be called with these arguments."""
    try:
        inspect.signature(function).bind(None, **args)
    except TypeError as error:
        raise ValueError(f"`{place}` is called with the batch and the node's args: {error}; mend `args`") from error


def raised_by(function: Callable[..., Any], error: BaseException) -> str:
    """What a user's function raised, and where: the innermost line in its own file, not in the library below it."""
    frames = traceback.extract_tb(error.__traceback__)
    own_file = inspect.unwrap(function).__code__.co_filename if inspect.isfunction(inspect.unwrap(function)) else None
    frame = next((each for each in reversed(frames) if each.filename == own_file), frames[-1])
    what = str(error)
    if len(what) > _SHOWN_CHARACTERS:
        what = f"{what[:_SHOWN_CHARACTERS]} ..."
    return f"raised {type(error).__name__}: {what} ({frame.filename}:{frame.lineno})"


def name_of(function: Callable[..., Any]) -> str:
    """A function as ``module:function``."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return f"{module}:{name}" if module and name else repr(function)


def located(function: Callable[..., Any], place: str | None = None) -> str:
    """A function and where it stands, ``module:function (FILE:LINE)``: a wrong result has no line of its own."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    name = place or name_of(function)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name


def _import_failure(module_name: str, error: BaseException) -> str:
    """What a user's module raised when it was imported, and in which line of theirs."""
    if isinstance(error, SyntaxError) and error.filename:
        where = f"{error.filename}:{error.lineno}"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
        where = f"{own[-1].filename}:{own[-1].lineno}" if own else f"module {module_name}"
    what = error.msg if isinstance(error, SyntaxError) else str(error)
    sentence = " ".join(what.split())
    return f"importing {module_name!r} fails at {where}: {type(error).__name__}: {sentence}; mend the module"


def _functions_of(module: ModuleType, wanted: str) -> str:
    return suggest(wanted, [name for name, value in vars(module).items() if isinstance(value, FunctionType)])
