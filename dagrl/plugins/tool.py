"""Tools: functions that a policy may call in its responses, and their description for the policy.

A pipeline names its own as ``module:function``; built-in tools are in `dagrl.tools`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict, get_type_hints

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from dagrl.config.errors import suggest
from dagrl.plugins.calls import within_call
from dagrl.plugins.custom import UserFunction, load_function, name_of

BUILT_IN = {"calculator": "dagrl.tools.calculator:calculator", "python": "dagrl.tools.python:python"}
"""The built-in tools."""
OF_THE_ROW = "extra_info"
"""A parameter of this name after the ``*`` gets the row's value."""


class ToolArgumentError(ValueError):
    """A policy called a tool with invalid arguments."""


class ToolUnavailableError(OSError):
    """A tool cannot work on this machine at all: raised by it, this ends the run."""


def tool[Function: Callable[..., object]](function: Function) -> Function:
    """Declare a function as a tool, described to the policy by its name, docstring and signature.

    The policy sees the parameters before a ``*``, which have type hints. Parameters after it are set by the pipeline's
    ``tool_args`` or keep their defaults, except `OF_THE_ROW`. It reads the returned value, text verbatim and anything
    else as JSON, and errors. Calls come from several threads at once; the function may be async.
    """
    function.dagrl_tool = True  # type: ignore[attr-defined]
    return function


class Tool:
    """A tool of a rollout."""

    def __init__(self, function: UserFunction, args: Mapping[str, object]) -> None:
        """`args` are set by the pipeline. ValueError if function or arguments do not fit."""
        self.function = function
        self.name: str = function.__name__
        self._args = dict(args)
        parameters = inspect.signature(function).parameters
        _check_parameters(function, parameters, args)
        self._takes_row = OF_THE_ROW in parameters
        visible = {name: each for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD}
        try:
            hints = get_type_hints(function, include_extras=True)
            fields = {
                name: hints[name] if each.default is each.empty else NotRequired[hints[name]]
                for name, each in visible.items()
            }
            self._arguments: TypeAdapter[dict[str, Any]] = TypeAdapter(_record(self.name, fields))
            parameters_schema = self._arguments.json_schema()
        except (PydanticUserError, NameError, TypeError) as error:
            reason = str(error).splitlines()[0].partition(". Set ")[0]  # the value is not set by the user
            raise ValueError(
                f"the tool {name_of(function)} has type hints that JSON cannot express: {reason}; change them"
            ) from error
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": inspect.getdoc(function) or "",
                "parameters": _plain(parameters_schema),
            },
        }
        """The description for chat templates, in OpenAI's format."""

    def check(self, arguments: Mapping[str, object]) -> dict[str, Any]:
        """The validated arguments of a call. ToolArgumentError if they do not fit."""
        try:
            return self._arguments.validate_python(dict(arguments))
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(map(str, each['loc']))}: {each['msg'].lower()}" for each in error.errors(include_url=False)
            )
            raise ToolArgumentError(f"{self.name} does not take these arguments: {faults}") from error

    def call(self, arguments: Mapping[str, object], extra_info: Mapping[str, object]) -> Any:
        """Call the function. ToolArgumentError if the arguments do not fit, and any error of the function."""
        row = {OF_THE_ROW: dict(extra_info)} if self._takes_row else {}
        given = self.check(arguments)
        with within_call(self.function):
            result = self.function(**given, **row, **self._args)
            return asyncio.run(result) if inspect.iscoroutine(result) else result


def load_tool(place: str, args: Mapping[str, object], folder: Path | None = None) -> Tool:
    """The tool that a pipeline names: one of `BUILT_IN`, or ``module:function``. ValueError if it does not exist."""
    if ":" not in place:
        if place not in BUILT_IN:
            message = f"there is no tool `{place}` (your own is written `module:function`); {suggest(place, BUILT_IN)}"
            raise ValueError(message)
        return Tool(load_function(BUILT_IN[place]), args)
    return tool_of(load_function(place, folder), place, args)


def tool_of(function: UserFunction, place: str, args: Mapping[str, object]) -> Tool:
    """The user's function at `place` as a tool. ValueError if it is not declared as one, or `args` do not fit."""
    if not getattr(function, "dagrl_tool", False):
        raise ValueError(f"`{place}` is not declared as a tool; decorate it with @dagrl.tool")
    return Tool(function, args)


def check_tool(function: UserFunction, place: str, args: Mapping[str, object]) -> None:
    """ValueError as in `tool_of`."""
    tool_of(function, place, args)


def offered[Item](tools: Mapping[str, Item], extra_info: object) -> dict[str, Item]:
    """The tools of a row: the names in its ``extra_info.tools``, or all tools."""
    # A file may hold text in this field, or anything else.
    named = extra_info.get("tools") if isinstance(extra_info, Mapping) else None
    return {name: item for name, item in tools.items() if not isinstance(named, list) or name in named}


def tool_name(place: str) -> str:
    """The name of a tool for the policy."""
    return place.rpartition(":")[2]


def _record(name: str, fields: dict[str, Any]) -> Any:
    """A dictionary type with exactly these fields."""
    record = TypedDict(name, fields)  # type: ignore[misc]  # of fields that are known only now
    record.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]
    return record


def _check_parameters(
    function: UserFunction, parameters: Mapping[str, inspect.Parameter], args: Mapping[str, object]
) -> None:
    name = name_of(function)
    if not inspect.getdoc(function):
        raise ValueError(f"the tool {name} has no docstring; write one, which describes the tool to the policy")
    for parameter in parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            if parameter.default is parameter.empty and parameter.name not in (*args, OF_THE_ROW):
                raise ValueError(f"the tool {name} wants {parameter.name!r}, behind its `*`; set it in `tool_args`")
        elif parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise ValueError(f"the tool {name} takes {parameter.name!r} not by name; a policy passes arguments by name")
        elif parameter.annotation is parameter.empty:
            raise ValueError(f"the tool {name} does not say what {parameter.name!r} is; give it a type hint")
    settable = [
        parameter.name
        for parameter in parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name != OF_THE_ROW
    ]
    for key in args:
        if key not in settable:
            what = f"{key!r} cannot be set by `tool_args` of the tool {name}"
            raise ValueError(f"{what}, which sets parameters after a `*`; {suggest(key, settable)}")


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without titles that repeat names, and without keys that chat templates do not use."""
    properties = {
        name: {key: value for key, value in each.items() if key != "title"}
        for name, each in schema.get("properties", {}).items()
    }
    plain = {"type": "object", "properties": properties, "required": schema.get("required", [])}
    return plain | ({"$defs": schema["$defs"]} if "$defs" in schema else {})
