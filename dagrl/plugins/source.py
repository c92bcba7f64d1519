"""Reads user functions from their source, so that a pipeline from a foreign file can be checked without importing."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from inspect import Parameter
from pathlib import Path

from dagrl.plugins import declarations
from dagrl.plugins.custom import UserFunction

_DECORATORS = ("node", "estimator", "loss", "reward")
_MOST_BYTES = 4 << 20
_ANY = inspect.Signature([Parameter("args", Parameter.VAR_POSITIONAL), Parameter("kwargs", Parameter.VAR_KEYWORD)])
"""Parameters of a name that the source does not define as a function, such as an imported one."""


def function_in_source(place: str, folder: Path | None) -> UserFunction:
    """A function with the parameters and the dagrl decorators of ``module:function`` and an empty body.

    ValueError if the module or the name in it does not exist.
    """
    module, _, name = place.partition(":")
    file = _file_of(module, folder)
    if file is None:
        raise ValueError(f"there is no module {module!r}; write it beside the pipeline file")
    try:
        with file.open("rb") as source:
            tree = ast.parse(source.read(_MOST_BYTES), str(file))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the module {module!r} cannot be read ({error}); fix it") from error
    bound = [statement for statement in _statements(tree) if name in _names(statement) or "*" in _names(statement)]
    if not bound:
        raise ValueError(f"module {module!r} has no function {name!r}; write it, or name another one")
    return _stand_in(place, bound[-1])


def _file_of(module: str, folder: Path | None) -> Path | None:
    """The source of a module, beside the pipeline file or on Python's path. No package is imported."""
    places: Sequence[str] | None = [*([str(folder)] if folder else []), *sys.path]
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:end]), places)
        if spec is None:
            return None
        places = spec.submodule_search_locations or []
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements that bind names of the module, also those in ``if`` and ``try``."""
    waiting: list[ast.AST] = list(reversed(tree.body))
    while waiting:
        statement = waiting.pop()
        if isinstance(statement, ast.stmt):
            yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            waiting += reversed(list(ast.iter_child_nodes(statement)))


def _names(statement: ast.stmt) -> set[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {each.asname or each.name for each in names}
        case ast.Assign() | ast.AnnAssign():
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
    return set()


def _stand_in(place: str, statement: ast.stmt) -> UserFunction:
    def stand_in(*_args: object, **_kwargs: object) -> None:
        raise NotImplementedError(place)

    module, _, name = place.partition(":")
    stand_in.__module__, stand_in.__qualname__ = module, name
    is_function = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
    stand_in.__signature__ = _signature(statement.args) if is_function else _ANY  # type: ignore[attr-defined]
    if isinstance(statement, ast.AsyncFunctionDef):
        return inspect.markcoroutinefunction(stand_in)
    function: UserFunction = stand_in
    if isinstance(statement, ast.FunctionDef):
        for each in reversed(statement.decorator_list):
            function = _decorated(function, each)
    return function


def _signature(arguments: ast.arguments) -> inspect.Signature:
    """The parameters; values of defaults do not matter."""
    found: list[Parameter] = []
    positional = [*arguments.posonlyargs, *arguments.args]
    for index, each in enumerate(positional):
        kind = Parameter.POSITIONAL_ONLY if index < len(arguments.posonlyargs) else Parameter.POSITIONAL_OR_KEYWORD
        has_default = index >= len(positional) - len(arguments.defaults)
        found.append(Parameter(each.arg, kind, default=None if has_default else Parameter.empty))
    if arguments.vararg:
        found.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(Parameter(each.arg, Parameter.KEYWORD_ONLY, default=None if default else Parameter.empty))
    if arguments.kwarg:
        found.append(Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD))
    return inspect.Signature(found)


def _decorated(function: UserFunction, decorator: ast.expr) -> UserFunction:
    """The function with a decorator of dagrl, whose arguments are literals; others change nothing."""
    if not isinstance(decorator, ast.Call):
        return function
    name = ast.unparse(decorator.func).rpartition(".")[2]
    if name not in _DECORATORS:
        return function
    try:
        arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in decorator.keywords if keyword.arg}
    except (ValueError, TypeError):
        return function
    return getattr(declarations, name)(**arguments)(function)
