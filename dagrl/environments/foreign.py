"""Runs a function of dagrl in a Python that need not have dagrl's packages.

``python -P foreign.py MODULE ARGUMENT...`` calls ``main(ARGUMENT...)`` of a module that imports the standard
library and other such modules only. The package `dagrl` is registered without its ``__init__``, which imports more.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

# Also in processes that a package spawns, which import this file.
if __name__ in ("__main__", "__mp_main__") and "dagrl" not in sys.modules:
    _dagrl = ModuleType("dagrl")
    _dagrl.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["dagrl"] = _dagrl


def command(python: Path | None, module: str, *arguments: object) -> list[str]:
    """The command that calls ``main`` of a module in a Python; None for this one, with dagrl as it is here."""
    if python is None:
        return [sys.executable, "-P", "-m", __name__, module, *map(str, arguments)]
    return [str(python), "-P", str(Path(__file__).resolve()), module, *map(str, arguments)]


def variables(python: Path | None) -> dict[str, str]:
    """The variables of such a process, for another Python as after activating its environment."""
    if python is None:
        return os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)])
    return kept | {"PATH": path, "VIRTUAL_ENV": str(python.parents[1])}


if __name__ == "__main__":
    importlib.import_module(sys.argv[1]).main(*sys.argv[2:])
