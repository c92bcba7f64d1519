"""User functions, for example ops and rewards: how they are declared, found, imported and called.

A pipeline names them as ``module:function``; the module is looked for beside the pipeline file, on the Python path, and
beside dagrl's own templates.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from dagrl.config.errors import suggest
from dagrl.config.loading.extends import OWN_TEMPLATES
from dagrl.graph.columns import COLUMN_NAME
from dagrl.graph.op_contracts import OpContract, Scope

Function = TypeVar("Function", bound=Callable[..., Any])

FIELDS = ("prompt", "response", "answer", "data_source", "extra_info", "turns", "turn_rewards")
"""Keyword arguments that a reward function may ask for."""

_SHOWN_CHARACTERS = 500
"""Length of the message of a failed function."""
_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class RewardTraits:
    """How a reward function is called."""

    batched: bool = False
    concurrency: int = 1
    """Calls at once, each in its own thread."""


def node(
    *, reads: tuple[str, ...] | list[str], writes: tuple[str, ...] | list[str], scope: str = "row"
) -> Callable[[Function], Function]:
    """Declare a function as an op: ``function(batch, **args) -> {column: values}``.

    `scope` is ``row`` (may start on finished shards), ``group`` (needs all responses to a prompt) or ``batch``.
    Raises ValueError for an unknown scope, and for columns that are no list of names.
    """
    if scope not in (known := [each.value for each in Scope]):
        raise ValueError(f"a node's scope cannot be {scope!r}; {suggest(str(scope), known)}")
    contract = OpContract(column_names("node", "reads", reads), column_names("node", "writes", writes), Scope(scope))

    def mark(function: Function) -> Function:
        function.dagrl_contract = contract  # type: ignore[attr-defined]
        return function

    return mark


def reward(*, batched: bool = False, concurrency: int = 1) -> Callable[[Function], Function]:
    """Declare how a reward function is called: once a sample, or once a shard with lists (`batched`).

    A function that waits for a server or a process can run for `concurrency` samples at once, each in its own thread.
    Raises ValueError for a concurrency below 1, or one above 1 together with `batched`.
    """
    if not isinstance(batched, bool):
        raise ValueError(f"a reward's `batched` is True or False; it cannot be {batched!r:.60}")
    whole = isinstance(concurrency, int) and not isinstance(concurrency, bool)
    if not whole or concurrency < 1 or (batched and concurrency > 1):
        raise ValueError(
            f"a reward's concurrency is 1 or more, and 1 where it is batched; it cannot be {concurrency!r:.60}"
        )

    def mark(function: Function) -> Function:
        function.dagrl_reward = RewardTraits(batched, concurrency)  # type: ignore[attr-defined]
        return function

    return mark


def column_names(kind: str, field: str, given: Any) -> tuple[str, ...]:
    """The columns that a decorator gets. ValueError for anything but a list of different names.

    Types cannot be declared: built-in columns have the type in `dagrl.graph.columns`, all others are float32.
    """
    example = f"write `{field}=['reward']`"
    if not isinstance(given, list | tuple):
        raise ValueError(f"the columns that the {kind} {field} are a list of names, not {given!r:.60}; {example}")
    for name in given:
        if not isinstance(name, str) or not COLUMN_NAME.fullmatch(name):
            message = f"{name!r:.60} is not the name of a column that the {kind} {field}: lower-case letters, digits, _"
            raise ValueError(f"{message}; {example}")
    doubled = next((name for name in given if given.count(name) > 1), None)
    if doubled is not None:
        raise ValueError(f"the {kind} {field} `{doubled}` twice; write each column once")
    return tuple(str.__str__(name) for name in given)


def reward_traits(function: Callable[..., Any]) -> RewardTraits:
    """Traits of a reward function; an undecorated one is called once a sample."""
    return getattr(function, "dagrl_reward", RewardTraits())


def contract_of_function(function: Callable[..., Any], place: str) -> OpContract:
    """The contract that `node` put on a function; ValueError where it is missing."""
    contract = getattr(function, "dagrl_contract", None)
    if contract is None:
        raise ValueError(f"`{place}` does not say its columns; decorate it with @dagrl.node(reads=[...], writes=[...])")
    return contract


def contract_at(place: str, folder: Path | None) -> OpContract:
    """The contract of the op at ``module:function``. ValueError if it has none."""
    return contract_of_function(load_plain_function(place, folder), place)


def reward_traits_at(place: str, folder: Path | None) -> RewardTraits:
    """The traits of the reward function at ``module:function``. ValueError if it is no function."""
    function = load_plain_function(place, folder)
    if inspect.isclass(function):
        raise ValueError(f"`{place}` is a class, and a reward is a function; name one")
    return reward_traits(function)


def reward_fields_at(place: str, args: Mapping[str, Any], folder: Path | None) -> tuple[str, ...]:
    """The fields that the reward function at ``module:function`` takes. ValueError as in `fields_of`."""
    return fields_of(load_function(place, folder), args)


def check_arguments_at(place: str, args: Mapping[str, Any], folder: Path | None) -> None:
    """ValueError if the op at ``module:function`` cannot be called with these arguments."""
    remedy = "it gets the batch and the node's args, so fix `args`"
    check_call(load_function(place, folder), place, remedy, None, **args)


def parameters_at(place: str, method: str, folder: Path | None) -> tuple[str, ...]:
    """Names of the parameters of the function at ``module:function``, or of a `method` of the class there."""
    function = load_function(place, folder)
    return tuple(signature_of(getattr(function, method) if method else function, place).parameters)


def check_vote_at(place: str, folder: Path | None) -> None:
    """ValueError if the function at ``module:function`` cannot be called with a response."""
    check_call(load_plain_function(place, folder), place, "it gets the response alone", "response")


@contextmanager
def importable_from(folder: Path | None) -> Iterator[None]:
    """Make modules beside the pipeline file, and those of dagrl's own templates, importable."""
    if folder is None:
        yield
        return
    first, last = str(folder.resolve()), str(OWN_TEMPLATES)
    ends = [last] if last not in sys.path else []
    sys.path[:] = [first, *sys.path, *ends]
    importlib.invalidate_caches()  # The file may be newer than Python's cache of its folder.
    try:
        yield
    finally:
        for entry in (first, *ends):
            # A module may have changed the path itself.
            with suppress(ValueError):
                sys.path.remove(entry)


def load_function(place: str, folder: Path | None = None) -> Callable[..., Any]:
    """Import ``module:function``. ValueError if it does not exist, or the module fails."""
    module_name, colon, function_name = place.partition(":")
    if not (colon and function_name and all(module_name.split("."))):
        raise ValueError(f"{place!r} is not `module:function`; write the module's name, a colon, the function's name")
    module = _imported(module_name, folder)
    _check_whose(module_name, module, folder)
    try:
        function = getattr(module, function_name, None)
    except Exception as error:
        raise ValueError(import_failure(module_name, error, folder)) from error
    if not callable(function):
        raise ValueError(f"module {module_name!r} {_no_function(module, function_name)}")
    return function


def check_function(place: str, folder: Path | None = None) -> None:
    """ValueError as in `load_plain_function`."""
    load_plain_function(place, folder)


def load_plain_function(place: str, folder: Path | None = None) -> Callable[..., Any]:
    """Import ``module:function``. ValueError also if it is async or a generator."""
    function = load_function(place, folder)
    check_returns(function, place)
    return function


def check_returns(function: Callable[..., Any], place: str) -> None:
    """ValueError for a function that returns a coroutine or a generator."""
    called = inspect.unwrap(function.func if isinstance(function, functools.partial) else function)
    if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
        raise ValueError(f"`{place}` is async, and is called without await; write it with `def`")
    if inspect.isgeneratorfunction(called):
        raise ValueError(f"`{place}` yields, and must return its result; write it with `return`")


def signature_of(function: Callable[..., Any], name: str) -> inspect.Signature:
    """The signature of a user's function. ValueError if Python cannot find it."""
    try:
        return inspect.signature(function)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"`{name}` does not say its parameters ({error}); wrap it in a function of your own, with `def`"
        ) from error


def check_call(function: Callable[..., Any], name: str, remedy: str, *args: Any, **kwargs: Any) -> None:
    """ValueError if a function cannot be called with these arguments."""
    signature = signature_of(function, name)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"`{name}` cannot be called: {error}; {remedy}") from error


def known_parameters(
    function: Callable[..., Any], name: str, known: tuple[str, ...], args: Collection[str] = ()
) -> tuple[str, ...]:
    """Which of `known` a function takes by name; all of them with ``**kwargs``.

    ValueError if it takes one by position, or needs one that is neither `known` nor in `args`.
    """
    parameters = signature_of(function, name).parameters.values()
    for each in parameters:
        required = each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        if each.kind is each.POSITIONAL_ONLY:
            message = f"`{name}` takes {each.name!r} by position, and arguments are given by name"
            raise ValueError(f"{message}; remove the `/`")
        if required and each.name not in (*known, *args):
            raise ValueError(f"`{name}` wants {each.name!r}, which is none of {', '.join(known)}; give it a default")
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    names = {each.name for each in parameters}
    return tuple(each for each in known if takes_any or each in names)


def fields_of(function: Callable[..., Any], args: Mapping[str, Any]) -> tuple[str, ...]:
    """Which of `FIELDS` a reward function takes. ValueError if `args` do not fit it, or it needs another parameter."""
    name = name_of(function)
    for key in args:
        if key in FIELDS:
            raise ValueError(f"args of the reward {name} may not set {key!r}, which is the sample's; remove it")
    fields = known_parameters(function, name, FIELDS, args)
    parameters = signature_of(function, name).parameters.values()
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    unknown = [key for key in args if not takes_any and key not in {each.name for each in parameters}]
    if unknown:
        raise ValueError(f"the reward {name} has no parameter {unknown[0]!r}; remove it from the node's args")
    return fields


def raised_by(function: Callable[..., Any], error: BaseException) -> str:
    """The error of a user's function, with the innermost line in its own file."""
    frames = traceback.extract_tb(error.__traceback__)
    own_file = inspect.unwrap(function).__code__.co_filename if inspect.isfunction(inspect.unwrap(function)) else None
    frame = next((each for each in reversed(frames) if each.filename == own_file), frames[-1])
    return f"raised {type(error).__name__}: {_message_of(error)} ({frame.filename}:{frame.lineno})"


def name_of(function: Callable[..., Any]) -> str:
    """A function as ``module:function``."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return f"{module}:{name}" if module and name else repr(function)


def located(function: Callable[..., Any], place: str | None = None) -> str:
    """A function with its position: ``module:function (FILE:LINE)``."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    name = place or name_of(function)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name


def _imported(module_name: str, folder: Path | None) -> ModuleType:
    try:
        with importable_from(folder):
            return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(_no_module(error.name, module_name, folder)) from error
        raise ValueError(import_failure(module_name, error, folder)) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ValueError(import_failure(module_name, error, folder)) from error


def import_failure(module_name: str, error: BaseException, folder: Path | None = None) -> str:
    """The message for an error in a user's module when it is imported, with the line in that module."""
    what = " ".join((error.msg if isinstance(error, SyntaxError) else _message_of(error)).split())
    told = f"{type(error).__name__}: {what}" if what else type(error).__name__
    where = _line_of(error, folder) or f"module {module_name}"
    remedy = "fix the module"
    if isinstance(error, ModuleNotFoundError) and error.name:
        remedy = f"install {error.name.partition('.')[0]}, or fix the import"
    elif isinstance(error, MemoryError):
        remedy = "load less when the module is imported"
    return f"importing {module_name!r} fails at {where}: {told}; {remedy}"


def _line_of(error: BaseException, folder: Path | None) -> str | None:
    """FILE:LINE of an error: the innermost line in the user's folder, else in any file outside the import system."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}" if error.lineno else error.filename
    frames = [
        (frame.filename, frame.lineno)
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and not Path(frame.filename).is_relative_to(_HERE)
    ]
    own = [frame for frame in frames if folder is not None and Path(frame[0]).is_relative_to(folder.resolve())]
    found = own or frames
    return f"{found[-1][0]}:{found[-1][1]}" if found else None


def _message_of(error: BaseException) -> str:
    """The message of an error, shortened. A user's error class may fail to give one."""
    try:
        what = str(error)
    except Exception:  # noqa: BLE001 - a user's __str__ may raise anything
        return "it has no message"
    return what if len(what) <= _SHOWN_CHARACTERS else f"{what[:_SHOWN_CHARACTERS]} ..."


def _no_module(missing: str, module_name: str, folder: Path | None) -> str:
    where = f"beside the pipeline file ({folder}) or on PYTHONPATH" if folder else "on PYTHONPATH"
    if module_name.endswith(".py"):
        return f"there is no module {module_name!r}; write its name without `.py`"
    file = f"{missing.replace('.', '/')}.py"
    return f"there is no module {missing!r}; put {file} {where}"


def _check_whose(module_name: str, module: ModuleType, folder: Path | None) -> None:
    """ValueError if Python has loaded another module than the file of that name beside the pipeline."""
    own = folder and folder.resolve() / f"{module_name.replace('.', '/')}.py"
    if not own or not own.is_file():
        return
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or Path(file).resolve() != own.resolve():
        whose = "Python's own" if module_name in sys.stdlib_module_names else f"another one ({file})"
        raise ValueError(f"the module {module_name!r} is {whose}, and not {own}; rename that file")


def _no_function(module: ModuleType, wanted: str) -> str:
    """The message for a module that has no function `wanted`."""
    known = getattr(module, "__dict__", {})
    if wanted in known:
        return f"has no function {wanted!r}, but a value of type {type(known[wanted]).__name__}; name a function"
    if getattr(module, "__file__", None) is None and hasattr(module, "__path__"):
        return f"is a folder without __init__.py and has no function {wanted!r}; name a module in it, as in `a.b:f`"
    functions = [name for name, value in known.items() if isinstance(value, FunctionType)]
    return f"has no function {wanted!r}; {suggest(wanted, functions)}"
