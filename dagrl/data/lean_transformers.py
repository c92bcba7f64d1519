"""Importing transformers for a third of the price: it looks, when it is imported, for all that it could ever use.

Each process of a run imports it anew. Whatever is left out here is found when somebody asks for it.
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

from dagrl.imports import lean_imports

SPARED = ("sklearn",)
"""What transformers imports where SGLang has brought it, for a second: it is for assisted generation alone."""
_GGUF = "transformers.modeling_gguf_pytorch_utils"


def import_transformers() -> None:
    """Import transformers itself, without a look into the files of all packages that are installed."""
    if "transformers" in sys.modules:
        return
    look_into_all = importlib.metadata.packages_distributions

    class Distributions(dict[str, list[str]]):
        """As that says, module -> those who bring it; found when asked for. Most modules have their package's name."""

        def __missing__(self, module: str) -> list[str]:
            try:
                importlib.metadata.version(module)
            except importlib.metadata.PackageNotFoundError:
                if found := who_brings(module):
                    return found
                raise KeyError(module) from None
            return [module]

        def get(self, module: str, default: Any = None) -> Any:
            return who_brings(module) or default

    importlib.metadata.packages_distributions = Distributions
    try:
        with lean_imports():
            import transformers  # noqa: F401
    finally:
        importlib.metadata.packages_distributions = look_into_all


@cache
def who_brings(module: str) -> list[str]:
    """The distributions that say that `module` is theirs, as `importlib.metadata.packages_distributions` has it.

    That looks whether each of all their files is there: half a second in every process that imports a model.
    """
    suffixes = "|".join(map(re.escape, all_suffixes()))
    listed = re.compile(rf"^{re.escape(module)}(/|({suffixes}),)", re.MULTILINE)

    def has_it(distribution: importlib.metadata.Distribution) -> bool:
        declared = (distribution.read_text("top_level.txt") or "").split()
        return module in declared if declared else bool(listed.search(distribution.read_text("RECORD") or ""))

    return [each.metadata["Name"] for each in importlib.metadata.distributions() if has_it(each)]


@contextmanager
def tokenizers_alone() -> Iterator[None]:
    """Import tokenizers in this block, without torch where it is not there yet.

    They would import it, for a second and hundreds of MB, to read GGUF files: nobody here has any.
    """
    import_transformers()
    stands_in = _GGUF not in sys.modules and "torch" not in sys.modules
    if stands_in:
        sys.modules[_GGUF] = _imported_when_called("load_gguf_checkpoint")
    try:
        with lean_imports(*SPARED):
            yield
    finally:
        if stands_in:
            del sys.modules[_GGUF]


def _imported_when_called(name: str) -> ModuleType:
    """A module of one function, which imports the real one."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(_GGUF), name)(*args, **kwargs)

    module = ModuleType(_GGUF)
    setattr(module, name, call)
    return module
