"""Model types that the installed megatron-bridge knows.

They are read from its source as text, because importing it would import torch.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from dagrl.model_files.library_classes import auto_classes

_REGISTERED = re.compile(r"register_bridge\(\s*source=\"?(\w+)\"?,[^()]*?target=(\w+)[^()]*\)\s*class (\w+)")
_CLASS_NAME = re.compile(r"^(\w+) = \"(\w+)\"", re.MULTILINE)


class Bridge(NamedTuple):
    """A class of megatron-bridge that builds and converts one model."""

    name: str
    target: str
    """The class of the Megatron model."""
    file: Path


def is_installed() -> bool:
    """Whether megatron-bridge is installed; its own dependencies are not checked."""
    return _folder() is not None


@cache
def bridge_models() -> frozenset[str]:
    """Return the types of language models that it builds as Megatron's GPTModel; empty if it is not installed."""
    classes = {name for name, bridge in bridges().items() if bridge.target == "GPTModel"}
    types = auto_classes("MODEL_FOR_CAUSAL_LM")
    return frozenset(model_type for model_type, name in types.items() if name in classes)


@cache
def bridges() -> dict[str, Bridge]:
    """Hugging Face's class of a model -> its bridge; empty if megatron-bridge is not installed."""
    root = _folder()
    return dict(_bridges(root)) if root else {}


def _folder() -> Path | None:
    # Not find_spec("megatron.bridge"), which would import the package around it.
    package = importlib.util.find_spec("megatron")
    locations = package.submodule_search_locations if package else None
    folders = (Path(location) / "bridge" for location in locations or ())
    return next((folder for folder in folders if (folder / "__init__.py").is_file()), None)


def _bridges(root: Path) -> Iterator[tuple[str, Bridge]]:
    for path in sorted((root / "models").rglob("*_bridge.py")):
        text = path.read_text(encoding="utf-8")
        names = dict(_CLASS_NAME.findall(text))
        for source, target, name in _REGISTERED.findall(text):
            yield names.get(source, source), Bridge(name, target, path)
