"""Stand-in for megatron-energon: any name in it, or in a module below it, is an empty class.

megatron.bridge.training.config imports it for multimodal data sets. A run on texts uses none of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__path__: list[str] = []


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"__class_getitem__": classmethod(lambda cls, item: cls)})


class _Modules(MetaPathFinder, Loader):
    """Gives an empty module for each import below this package."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(f"{__name__}.") else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = __getattr__


sys.meta_path.append(_Modules())
