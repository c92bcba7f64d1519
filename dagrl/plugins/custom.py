"""Finds, imports and inspects user functions, for example ops and rewards.

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
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from dagrl.config.errors import suggest
from dagrl.resources import OWN_TEMPLATES

type UserFunction = Callable[..., Any]
"""A function or class of the user, with any parameters and results."""

_SHOWN_CHARACTERS = 500
"""Length of the message of a failed function."""
_HERE = Path(__file__).parent


@contextmanager
def importable_from(folder: Path | None) -> Iterator[None]:
    """Make modules beside the pipeline file, and modules of dagrl's templates, importable."""
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


def load_function(place: str, folder: Path | None = None) -> UserFunction:
    """Import ``module:function``. ValueError if it does not exist, or the module fails."""
    module_name, colon, function_name = place.partition(":")
    if not (colon and function_name and all(module_name.split("."))):
        raise ValueError(f"{place!r} is not `module:function`; write the module's name, a colon, the function's name")
    try:
        with importable_from(folder):
            module = importlib.import_module(module_name)
        function = getattr(module, function_name, None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(_no_module(str(error.name), module_name, folder)) from error
        raise ValueError(import_failure(module_name, error, folder)) from error
    _check_file(module_name, module, folder)
    if not callable(function):
        raise ValueError(f"module {module_name!r} {_no_function(module, function_name)}")
    return function


def signature_of(function: UserFunction, name: str) -> inspect.Signature:
    """The signature of a user's function. ValueError if it has none, or returns a coroutine or a generator."""
    called = inspect.unwrap(function.func if isinstance(function, functools.partial) else function)
    if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
        raise ValueError(f"`{name}` is async, and is called without await; write it with `def`")
    if inspect.isgeneratorfunction(called):
        raise ValueError(f"`{name}` yields, and must return its result; write it with `return`")
    try:
        return inspect.signature(function)
    except (ValueError, TypeError) as error:
        remedy = "wrap it in a function with `def`"
        raise ValueError(f"`{name}` does not say its parameters ({error}); {remedy}") from error


def parameters_of(function: UserFunction, name: str, method: str = "") -> tuple[str, ...]:
    """Names of the parameters of a function, or of a `method` of a class. ValueError as in `signature_of`."""
    return tuple(signature_of(getattr(function, method) if method else function, name).parameters)


def check_call(
    function: UserFunction, name: str, remedy: str, given: tuple[object, ...], args: Mapping[str, object]
) -> None:
    """ValueError if a function cannot be called with the values `given` by position and `args` by name."""
    signature = signature_of(function, name)
    try:
        signature.bind(*given, **args)
    except TypeError as error:
        raise ValueError(f"`{name}` cannot be called: {error}; {remedy}") from error


def check_methods(made: UserFunction, place: str, kind: str, needed: str, methods: Mapping[str, int]) -> None:
    """ValueError if it is not a class, or if a method is missing or does not take the given number of arguments,
    including ``self``.
    """
    if not inspect.isclass(made):
        raise ValueError(f"`{place}` is no class; {kind} is one with {needed}")
    for name, count in methods.items():
        method = getattr(made, name, None)
        if not callable(method):
            raise ValueError(f"`{place}` has no method {name}; {kind} has {needed}")
        check_call(method, f"{place}.{name}", f"{kind} has {needed}", (None,) * count, {})


def known_parameters(
    function: UserFunction, name: str, known: tuple[str, ...], args: Collection[str] = ()
) -> tuple[str, ...]:
    """The names among `known` that a function takes; all of them with ``**kwargs``.

    ValueError if it has positional-only parameters, lacks one of `args`, or requires another parameter.
    """
    parameters = signature_of(function, name).parameters
    for parameter in parameters.values():
        required = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if parameter.kind is parameter.POSITIONAL_ONLY:
            message = f"`{name}` takes {parameter.name!r} by position, and arguments are given by name"
            raise ValueError(f"{message}; remove the `/`")
        if required and parameter.name not in (*known, *args):
            raise ValueError(
                f"`{name}` wants {parameter.name!r}, which is none of {', '.join(known)}; give it a default"
            )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return known
    check_names(name, parameters, args)
    return tuple(each for each in known if each in parameters)


def check_names(name: str, parameters: Collection[str], args: Collection[str]) -> None:
    """ValueError if a function lacks a parameter for a name in `args`."""
    unknown = next((key for key in args if key not in parameters), None)
    if unknown is not None:
        raise ValueError(f"`{name}` has no parameter {unknown!r}; remove it from the node's args")


def raised_by(function: UserFunction, error: BaseException) -> str:
    """The error of a user's function, with the innermost line in its own file."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(inspect.unwrap(function), "__code__", None)
    frame = next((each for each in reversed(frames) if code and each.filename == code.co_filename), frames[-1])
    what = _message_of(error)
    return f"raised {type(error).__name__}{f': {what}' if what else ''} ({frame.filename}:{frame.lineno})"


def name_of(function: UserFunction) -> str:
    """A function as ``module:function``."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return f"{module}:{name}" if module and name else repr(function)


def located(function: UserFunction, place: str | None = None) -> str:
    """A function with its position: ``module:function (FILE:LINE)``."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    name = place or name_of(function)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name


def import_failure(module_name: str, error: BaseException, folder: Path | None = None) -> str:
    """The message for an error in a user's module when it is imported, with the line in that module."""
    what = " ".join((error.msg if isinstance(error, SyntaxError) else _message_of(error)).split())
    where = _line_of(error, folder) or f"module {module_name}"
    remedy = "fix the module"
    if isinstance(error, ModuleNotFoundError) and error.name:
        remedy = f"install {error.name.partition('.')[0]}, or fix the import"
    elif isinstance(error, MemoryError):
        remedy = "load less when the module is imported"
    kind = type(error).__name__
    return f"importing {module_name!r} fails at {where}: {f'{kind}: {what}' if what else kind}; {remedy}"


def _line_of(error: BaseException, folder: Path | None) -> str | None:
    """FILE:LINE of an error: the innermost line in the user's folder, else in any file outside the import system."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}" if error.lineno else error.filename
    frames = [
        frame
        for frame in reversed(traceback.extract_tb(error.__traceback__))
        if "importlib" not in frame.filename and not Path(frame.filename).is_relative_to(_HERE)
    ]
    own = [frame for frame in frames if folder is not None and Path(frame.filename).is_relative_to(folder.resolve())]
    return next((f"{frame.filename}:{frame.lineno}" for frame in own or frames), None)


def _message_of(error: BaseException) -> str:
    """The message of an error, shortened. ``__str__`` of a user's error class may fail."""
    try:
        what = str(error)
    except BaseException:  # noqa: BLE001 - a user's __str__ may raise anything
        return "it has no message"
    return what if len(what) <= _SHOWN_CHARACTERS else f"{what[:_SHOWN_CHARACTERS]} ..."


def _check_file(module_name: str, module: ModuleType, folder: Path | None) -> None:
    """ValueError if Python loaded a module other than the file of that name beside the pipeline."""
    own = folder and folder.resolve() / f"{module_name.replace('.', '/')}.py"
    if not own or not own.is_file():
        return
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or Path(file).resolve() != own.resolve():
        other = "Python's own" if module_name in sys.stdlib_module_names else f"another one ({file})"
        raise ValueError(f"the module {module_name!r} is {other}, and not {own}; rename that file")


def _no_module(missing: str, module_name: str, folder: Path | None) -> str:
    if module_name.endswith(".py"):
        return f"there is no module {module_name!r}; write its name without `.py`"
    where = f"beside the pipeline file ({folder}) or on PYTHONPATH" if folder else "on PYTHONPATH"
    return f"there is no module {missing!r}; put {missing.replace('.', '/')}.py {where}"


def _no_function(module: ModuleType, wanted: str) -> str:
    """The message for a module that has no function `wanted`."""
    known = getattr(module, "__dict__", {})
    if wanted in known:
        return f"has no function {wanted!r}, but a value of type {type(known[wanted]).__name__}; name a function"
    if getattr(module, "__file__", None) is None and hasattr(module, "__path__"):
        return f"is a folder without __init__.py and has no function {wanted!r}; name a module in it, as in `a.b:f`"
    functions = [
        name
        for name, value in known.items()
        if isinstance(value, FunctionType) or (isinstance(value, type) and value.__module__ == module.__name__)
    ]
    return f"has no function {wanted!r}; {suggest(wanted, functions)}"
