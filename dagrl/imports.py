"""Imports transformers without what a run never uses; every process of a run imports it.

Then it takes 6.3 s of CPU time and 750 MB with a model class, 0.8 s and 80 MB with a tokenizer only. scikit-learn and
torchao would add 4.2 s and 170 MB to a model class, the search of all packages a second to both, and the reader of GGUF
files, which is torch, 1.9 s and 450 MB to a tokenizer.

Switching the garbage collector off meanwhile saves half a second of five, which is not worth it.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import all_suffixes
from types import ModuleType
from typing import Any

UNUSED = ("sklearn",)
"""A package that transformers imports if it is installed, for assisted generation only."""
CODE_IS_NOT_RUN = "it needs Python code of its own folder (auto_map), which is not run"
"""Why a model or a tokenizer cannot be loaded without ``trust_remote_code``."""
_GGUF = "transformers.modeling_gguf_pytorch_utils"


@contextmanager
def without_packages(*names: str) -> Iterator[None]:
    """Imports in the context behave as if these packages were not installed, unless they are imported already."""
    hidden = set(names) - sys.modules.keys()
    # The import of a name that stands for None fails.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)


def import_transformers() -> None:
    """Import transformers without its search for the files of all installed packages, and without its docstrings.

    They are written when a class is imported: that of a config class imports all code of generation.
    """
    if "transformers" in sys.modules:
        return
    search = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = _Distributions
    try:
        import transformers.utils
    finally:
        importlib.metadata.packages_distributions = search
    transformers.utils.auto_docstring = _undocumented


def _undocumented(obj: Any = None, **_: Any) -> Any:
    """A decorator, with arguments or without, that changes nothing."""
    return obj if obj is not None else _undocumented


class _Distributions(dict[str, list[str]]):
    """Module -> distributions, like `importlib.metadata.packages_distributions`, but looked up when needed."""

    def __missing__(self, module: str) -> list[str]:
        try:
            importlib.metadata.version(module)
        except importlib.metadata.PackageNotFoundError:
            if found := distributions_of(module):
                return found
            raise KeyError(module) from None
        return [module]

    def get(self, module: str, default: Any = None) -> Any:
        return distributions_of(module) or default


@cache
def distributions_of(module: str) -> list[str]:
    """The distributions whose metadata list `module`."""
    suffixes = "|".join(map(re.escape, all_suffixes()))
    listed = re.compile(rf"^{re.escape(module)}(/|({suffixes}),)", re.MULTILINE)

    def has_it(distribution: importlib.metadata.Distribution) -> bool:
        declared = (distribution.read_text("top_level.txt") or "").split()
        return module in declared if declared else bool(listed.search(distribution.read_text("RECORD") or ""))

    return [each.metadata["Name"] for each in importlib.metadata.distributions() if has_it(each)]


@contextmanager
def tokenizers_alone() -> Iterator[None]:
    """Imports of tokenizers in the context do not import torch, which only reads GGUF files there."""
    import_transformers()
    stands_in = _GGUF not in sys.modules and "torch" not in sys.modules
    if stands_in:
        module = ModuleType(_GGUF)
        module.load_gguf_checkpoint = _load_gguf_checkpoint  # type: ignore[attr-defined]
        sys.modules[_GGUF] = module
    try:
        with without_packages(*UNUSED):
            yield
    finally:
        if stands_in:
            del sys.modules[_GGUF]


def _load_gguf_checkpoint(*args: Any, **kwargs: Any) -> Any:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    return load_gguf_checkpoint(*args, **kwargs)
