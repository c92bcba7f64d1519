"""The preprocessing scripts, which are no package, as modules."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest

SCRIPTS = Path(__file__).parents[2] / "data_preprocess"

Rows = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="session", autouse=True)
def scripts_on_the_path() -> Iterator[None]:
    """What running a script does: its folder is where imports begin."""
    sys.path.append(str(SCRIPTS))
    yield
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="session")
def load_script(scripts_on_the_path: None) -> Callable[[str], ModuleType]:
    """Import ``data_preprocess/NAME.py``."""
    return importlib.import_module


@pytest.fixture
def originals(tmp_path: Path) -> Callable[..., Path]:
    """Write files of originals: lines of JSON, a JSON list (``.json``), or parquet, by their ending."""
    folder = tmp_path / "originals"
    folder.mkdir()

    def write(**files: Any) -> Path:
        for name, rows in files.items():
            path = folder / name.replace("__", "/").replace("_DOT_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, rows)
        return folder

    return write


def _write(path: Path, rows: Any) -> None:
    if path.suffix == ".parquet":
        import pyarrow as pa

        pq.write_table(rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def prepared(load_script: Callable[[str], ModuleType], tmp_path: Path) -> Callable[..., Rows]:
    """Run a script over a folder of originals and return the rows of each file it wrote."""

    def run(name: str, source: Path, *options: str) -> Rows:
        out = tmp_path / "out"
        load_script(name).main(["--local_dir", str(out), "--source", str(source), *options])
        assert json.loads((out / "report.json").read_text())["data_set"] == name
        return {path.stem: pq.read_table(path).to_pylist() for path in out.glob("*.parquet")}

    return run
