"""Model types that the installed megatron-bridge knows.

They are read from its source as text, because importing it would import torch.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from dagrl.model_files.library_classes import auto_classes

_REGISTERED = re.compile(r"register_bridge\(\s*source=\"?(\w+)\"?,[^()]*?target=(\w+)")
_CLASS_NAME = re.compile(r"^(\w+) = \"(\w+)\"", re.MULTILINE)


def is_installed() -> bool:
    """Whether megatron-bridge is installed; its own dependencies are not checked."""
    return _folder() is not None


@cache
def bridge_models() -> frozenset[str]:
    """Return the types of language models that it builds as Megatron's GPTModel; empty if it is not installed."""
    folder = _folder()
    if folder is None:
        return frozenset()
    classes = set(_classes(folder))
    types = auto_classes("MODEL_FOR_CAUSAL_LM")
    return frozenset(model_type for model_type, name in types.items() if name in classes)


def _folder() -> Path | None:
    # Not find_spec("megatron.bridge"), which would import the package around it.
    package = importlib.util.find_spec("megatron")
    locations = package.submodule_search_locations if package else None
    folders = (Path(location) / "bridge" for location in locations or ())
    return next((folder for folder in folders if (folder / "__init__.py").is_file()), None)


def _classes(folder: Path) -> Iterator[str]:
    """Yield the names of Hugging Face's classes."""
    for path in sorted((folder / "models").rglob("*_bridge.py")):
        text = path.read_text(encoding="utf-8")
        names = dict(_CLASS_NAME.findall(text))
        for source, target in _REGISTERED.findall(text):
            if target == "GPTModel":
                yield names.get(source, source)
