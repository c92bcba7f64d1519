"""Imports transformers without what a run never uses; every process of a run imports it.

Then it takes 2 s of CPU time after torch's 3 with a model class, 0.8 s and 80 MB with a tokenizer only. To a model
class, torch's compiler and the libraries for other kinds of models would add 5 s, scikit-learn and torchao 4.2 s; the
search of all packages would add a second to both, and the reader of GGUF files, which is torch, 1.9 s and 450 MB to a
tokenizer. All this is without Python's cache of compiled modules, with which it takes about half.

Switching the garbage collector off meanwhile saves half a second of five, which is not worth it.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.machinery import all_suffixes
from types import ModuleType
from typing import Any

UNUSED = ("sklearn",)
"""A package that transformers imports if it is installed, for assisted generation only."""
CODE_IS_NOT_RUN = "it needs Python code of its own folder (auto_map), which is not run"
"""Why a model or a tokenizer cannot be loaded without ``trust_remote_code``."""
_OTHER_KINDS = ("scipy", "torchaudio")
_TRACING = "torch._dynamo._trace_wrapped_higher_order_op"
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
    transformers.utils.auto_docstring = _unchanged


def _unchanged(obj: Any = None, *_: Any, **__: Any) -> Any:
    """A decorator, with arguments or without, that changes nothing."""
    return obj if obj is not None else _unchanged


class _Distributions(dict[str, list[str]]):
    """Module -> distributions, like `importlib.metadata.packages_distributions`, but looked up when needed."""

    def __missing__(self, module: str) -> list[str]:
        try:
            importlib.metadata.version(module)
        except importlib.metadata.PackageNotFoundError:
            if distributions := distributions_of(module):
                return distributions
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

    return [
        distribution.metadata["Name"] for distribution in importlib.metadata.distributions() if has_it(distribution)
    ]


@contextmanager
def models_alone(*, with_images: bool) -> Iterator[None]:
    """Imports of model classes in the context leave out the libraries for models of other kinds.

    All classes import these for losses of object detection and of speech, and torchvision for images. Without a GPU,
    torch's compiler is left out, too, which torchvision needs. Later imports find the packages, but these losses, and
    image processors of torchvision, do not work in the process.
    """
    from transformers import utils

    unused = _OTHER_KINDS if with_images else (*_OTHER_KINDS, "torchvision")
    checks = {name: getattr(utils, name) for name in (f"is_{package}_available" for package in unused)}
    vars(utils).update(dict.fromkeys(checks, lambda: False))
    try:
        if not with_images:
            _import_without_compiler()
        yield
    finally:
        vars(utils).update(checks)


def _import_without_compiler() -> None:
    """Import the modules that all model classes share. They load torch's compiler only to mark functions for it."""
    import torch

    # torchao, which reads quantised weights, imports more of the compiler than marks.
    has_torchao = sys.modules.get("torchao", ...) is not None and importlib.util.find_spec("torchao") is not None
    if torch.cuda.is_available() or has_torchao:
        return
    marks = dict.fromkeys(("allow_in_graph", "assume_constant_result", "disable"), _unchanged)
    tracing = _stand_in(_TRACING, {"TransformGetItemToIndex": _transform_get_item_to_index})
    with tracing, _stand_in("torch._dynamo", marks):
        import transformers.generation.utils
        import transformers.modeling_utils  # noqa: F401


def _transform_get_item_to_index() -> Any:
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


@contextmanager
def tokenizers_alone() -> Iterator[None]:
    """Imports of tokenizers in the context do not import torch, which only reads GGUF files there."""
    import_transformers()
    with _stand_in(_GGUF, {"load_gguf_checkpoint": _load_gguf_checkpoint}, "torch"), without_packages(*UNUSED):
        yield


def _load_gguf_checkpoint(*args: Any, **kwargs: Any) -> Any:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    return load_gguf_checkpoint(*args, **kwargs)


@contextmanager
def _stand_in(name: str, functions: Mapping[str, Callable[..., Any]], unless: str = "") -> Iterator[None]:
    """Imports from a module in the context get these functions, unless it, or `unless`, is imported already."""
    if {name, unless} & sys.modules.keys():
        yield
        return
    sys.modules[name] = module = ModuleType(name)
    vars(module).update(functions)
    try:
        yield
    finally:
        del sys.modules[name]
