"""Flattens a YAML configuration into settings with their lines, and resolves interpolations as OmegaConf does.

``${a.b}`` is absolute, ``${.b}`` relative to its section. ``${oc.select:KEY,DEFAULT}`` and ``${oc.env:NAME,DEFAULT}``
are known; from the environment, only variables that the caller sets.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from dagrl.importing.files import read_file
from dagrl.importing.settings import ImportProblem, Setting, Unresolved, normalized, parse_scalar

_MOST_DEPTH = 40
"""Most levels of nested interpolations; deeper ones are circular."""
_MOST_VALUES, _MOST_LENGTH = 20_000, 20_000
"""Most values of a file with anchors expanded, and most characters of an interpolated value."""
_INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")


class _Loader(yaml.SafeLoader):
    """Merges what ``<<`` names, keeping one value of each key, so that a mapping merged many times does not grow."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        node.value = list({str(name.value): (name, value) for name, value in node.value}.values())


def read_yaml(path: Path) -> list[Setting]:
    """Return all leaves of a file by dotted key, unresolved. ImportProblem if it is not a YAML mapping.

    A list of scalars is one value; other lists have their indices in the keys.
    """
    try:
        root = yaml.compose(read_file(path), Loader=_Loader)
        leaves = _leaves(root, "", str(path)) if isinstance(root, yaml.MappingNode) else iter(())
        settings = list(itertools.islice(leaves, _MOST_VALUES))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ImportProblem(f"{place}: is not YAML: {problem}") from error
    if next(leaves, None):
        raise ImportProblem(f"{path}: has more than {_MOST_VALUES} values; give a smaller file")
    if not settings:
        raise ImportProblem(f"{path}: is not a mapping of settings")
    return settings


def _leaves(node: yaml.Node, key: str, file: str) -> Iterator[Setting]:
    if isinstance(node, yaml.MappingNode) and node.value:
        _Loader("").flatten_mapping(node)
        for name_node, value_node in node.value:
            yield from _leaves(value_node, f"{key}.{name_node.value}" if key else str(name_node.value), file)
    elif isinstance(node, yaml.SequenceNode) and any(not isinstance(item, yaml.ScalarNode) for item in node.value):
        for index, item in enumerate(node.value):
            yield from _leaves(item, f"{key}.{index}", file)
    else:
        line = node.start_mark.line + 1
        try:
            yield Setting(key, normalized(_plain(node)), file, line)
        except (ValueError, LookupError, ArithmeticError, AttributeError) as error:
            tag = node.tag.rpartition(":")[2]
            raise ImportProblem(f"{file}:{line}: the value of {key} is not of YAML's type `{tag}`") from error


def _plain(node: yaml.Node) -> object:
    if isinstance(node, yaml.ScalarNode):
        return _Loader("").construct_object(node)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item) for item in node.value]
    return {}


def resolved(settings: list[Setting], variables: Mapping[str, str]) -> list[Setting]:
    """Return the settings with their interpolations replaced; an unknown one makes its value `Unresolved`."""
    by_key = {setting.key: setting.value for setting in settings}
    resolver = _Resolver(by_key, variables, settings[0].file if settings else "")
    return [
        Setting(setting.key, resolver.value(setting.key, setting.value), setting.file, setting.line)
        for setting in settings
    ]


class _Resolver:
    def __init__(self, by_key: Mapping[str, object], variables: Mapping[str, str], file: str) -> None:
        self.by_key, self.variables, self.file = by_key, variables, file

    def value(self, key: str, value: object, depth: int = 0) -> object:
        if isinstance(value, list):
            return self._of_several([self.value(key, item, depth) for item in value])
        if not isinstance(value, str) or "${" not in value or depth > _MOST_DEPTH:
            return value
        whole = _INTERPOLATION.fullmatch(value)
        if whole:
            return self._lookup(key, whole[1], depth + 1)
        missing: list[str] = []

        def replaced(match: re.Match[str]) -> str:
            inner = self._lookup(key, match[1], depth + 1)
            if isinstance(inner, Unresolved):
                missing.extend(inner.missing)
                return inner.text.replace("${", "$(")
            return str(inner)

        text = _INTERPOLATION.sub(replaced, value)
        if len(text) > _MOST_LENGTH:
            raise ImportProblem(f"{self.file}: the value of {key} has more than {_MOST_LENGTH} characters; shorten it")
        if missing:
            return Unresolved(text.replace("$(", "${"), tuple(missing))
        # An inner interpolation may have completed an outer one.
        return self.value(key, text if "${" in text else parse_scalar(text), depth + 1)

    def _lookup(self, key: str, expression: str, depth: int) -> object:
        name, _, rest = expression.partition(":")
        if name == "oc.env":
            variable, comma, otherwise = rest.partition(",")
            if variable.strip() in self.variables:
                return parse_scalar(self.variables[variable.strip()])
            return parse_scalar(otherwise) if comma else Unresolved(f"${variable.strip()}", (f"${variable.strip()}",))
        default: object = Unresolved(f"${{{expression}}}", (f"${{{expression}}}",))
        if name == "oc.select":
            expression, comma, text = rest.partition(",")
            default = parse_scalar(text) if comma else None
        target = self._absolute(key, expression.strip())
        if target in self.by_key:
            return self.value(target, self.by_key[target], depth)
        section = {
            name.removeprefix(f"{target}."): self.value(name, value, depth)
            for name, value in self.by_key.items()
            if name.startswith(f"{target}.")
        }
        return self._of_several(section) or default

    @staticmethod
    def _of_several(values: list[object] | dict[str, object]) -> object:
        """A list or mapping; unknown as a whole if one of its values is."""
        parts = values.values() if isinstance(values, dict) else values
        missing = [name for value in parts if isinstance(value, Unresolved) for name in value.missing]
        if not missing:
            return values
        return Unresolved(f"[{', '.join(str(value) for value in parts)}]", tuple(dict.fromkeys(missing)))

    @staticmethod
    def _absolute(key: str, expression: str) -> str:
        if not expression.startswith("."):
            return expression
        ups = len(expression) - len(expression.lstrip("."))
        parents = key.split(".")[:-ups]
        return ".".join([*parents, expression.lstrip(".")])
