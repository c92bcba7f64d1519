"""The preprocessing scripts, which are no package, as modules."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "data_preprocess"


@pytest.fixture(scope="session")
def load_script() -> Callable[[str], ModuleType]:
    """Import ``data_preprocess/NAME.py``."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"data_preprocess_{name}", SCRIPTS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
