"""A wheel of dagrl, installed away from the repository: what a user has after `pip install dagrl`."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

REPOSITORY = Path(__file__).parents[1]
BUILD = "uv", "build", "--quiet", "--offline", "--no-build-isolation", "--python", sys.executable

pytestmark = pytest.mark.skipif(shutil.which("uv", path=str(Path(sys.executable).parent)) is None, reason="needs uv")


def called(
    command: Sequence[str | Path], cwd: Path, *, code: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command without the repository on its path."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # In the child: `uv` and `python` of this environment come first.
    own["PATH"] = f"{Path(sys.executable).parent}:{own['PATH']}"
    done = subprocess.run(command, cwd=cwd, env=own | variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel."""

    python: Path
    packages: Path
    wheel: Path

    def dagrl(self, *arguments: str | Path, cwd: Path, code: int = 0) -> str:
        return called([self.python.with_name("dagrl"), *arguments], cwd, code=code).stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel in an environment for itself, which finds all other packages in this one."""
    folder = tmp_path_factory.mktemp("wheel")
    called([*BUILD, "--out-dir", folder, REPOSITORY], folder)
    (wheel,) = folder.glob("*.whl")
    called(["uv", "venv", "--quiet", "--python", sys.executable, folder / "venv"], folder)
    python = folder / "venv" / "bin" / "python"
    called(["uv", "pip", "install", "--quiet", "--offline", "--no-deps", "--python", python, wheel], folder)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return Installed(python, packages, wheel)


def test_it_has_the_tracked_files_of_three_folders_and_the_pages(installed: Installed) -> None:
    folders = ("dagrl", "dag_templates", "data_preprocess", "docs/*.md")
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    tracked = called(listing, REPOSITORY).stdout.splitlines()
    names = {re.sub("^(dag_templates|data_preprocess|docs)/", r"dagrl/_resources/\1/", name) for name in tracked}
    with zipfile.ZipFile(installed.wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == names


def test_its_page_on_an_index_has_no_link_into_the_repository(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    page = str(metadata.get_payload())
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert page.startswith("# dagrl\n") and "docs/scaling.md" not in page
    assert re.findall(r"\]\((?!https?://)[^)]*\)", page) == []
    assert "from a laptop to 64 GPUs, templates, a published model that learns, data" in page, "the text of links stays"


def test_a_user_begins_in_an_empty_folder(installed: Installed, tmp_path: Path) -> None:
    before = {path for path in installed.packages.rglob("*") if path.suffix != ".pyc" and path.name != "__pycache__"}
    templates = json.loads(installed.dagrl("templates", "--json", cwd=tmp_path))
    assert [each["name"] for each in templates if Path(each["path"]).is_relative_to(installed.packages)] == [
        path.stem for path in sorted((REPOSITORY / "dag_templates").glob("*.yaml"))
    ]
    installed.dagrl("init", "--template", "tiny_grpo", cwd=tmp_path)
    (page,) = re.findall(r"\S+\.md\b", (tmp_path / "pipeline.yaml").read_text())
    assert Path(page).is_relative_to(installed.packages) and Path(page).is_file()
    assert " is valid\n" in installed.dagrl("validate", "pipeline.yaml", cwd=tmp_path)
    assert "nothing was started or written" in installed.dagrl("run", "pipeline.yaml", "--dry-run", cwd=tmp_path)
    assert not (tmp_path / "runs").exists()
    (tmp_path / "two.yaml").write_text("extends: multi_agent\nname: two\n")
    found = json.loads(installed.dagrl("validate", "two.yaml", "--json", cwd=tmp_path))
    assert found["valid"] is True, "the template's modules and data are found"
    after = {path for path in installed.packages.rglob("*") if path.suffix != ".pyc" and path.name != "__pycache__"}
    assert after == before


def test_the_data_of_a_template_is_that_of_the_project(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: tiny_gsm8k\nname: mine\n")
    for pipeline in ("mine.yaml", "tiny_gsm8k"):
        done = called([installed.python, "-m", "dagrl", "validate", pipeline], tmp_path, code=2)
        folder = tmp_path / "data" / "gsm8k"
        assert f"{folder}/train.parquet does not exist; " in done.stderr
        assert f"`dagrl data gsm8k --local_dir {folder}`" in done.stderr
    (tmp_path / "originals").mkdir()
    row = json.dumps({"question": "How many are 2 and 2?", "answer": "#### 4"}) + "\n"
    for split in ("train", "test"):
        (tmp_path / "originals" / f"{split}.jsonl").write_text(row)
    installed.dagrl("data", "gsm8k", "--local_dir", "data/gsm8k", "--source", "originals", cwd=tmp_path)
    for pipeline in ("mine.yaml", "tiny_gsm8k"):
        assert " is valid\n" in installed.dagrl("validate", pipeline, cwd=tmp_path)


def test_a_script_for_data_of_ones_own_runs_in_any_folder(installed: Installed, tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "data.md").read_text()
    (tmp_path / "riddles.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    (tmp_path / "train.jsonl").write_text(json.dumps({"q": "What?", "a": "it"}) + "\n")
    called([installed.python, "riddles.py", "--local_dir", "out", "--source", "."], tmp_path)
    assert (tmp_path / "out" / "train.parquet").is_file()


def test_the_notebook_trains_in_an_empty_folder(installed: Installed, tmp_path: Path, monkeypatch) -> None:
    kernel = tmp_path / "jupyter" / "kernels" / "wheel"
    kernel.mkdir(parents=True)
    command = [str(installed.python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "wheel", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    notebook = nbformat.read(REPOSITORY / "docs" / "demo.ipynb", as_version=4)
    (steps,) = (cell for cell in notebook.cells if "STEPS = 100" in cell.source)
    steps.source = steps.source.replace("STEPS = 100", "STEPS = 3") + "\nprint(dagrl.__file__)"
    folder = tmp_path / "empty"
    folder.mkdir()
    resources = {"metadata": {"path": str(folder)}}
    # Over TCP, jupyter_client would choose ports that another process may take before the kernel does.
    with tempfile.TemporaryDirectory(prefix="dj", dir="/tmp") as sockets:
        config = Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}})
        NotebookClient(notebook, kernel_name="wheel", timeout=240, resources=resources, config=config).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    # On a busy machine, what a cell prints comes in several outputs.
    told = ["".join(output.text for output in cell.outputs if output.get("name") == "stdout") for cell in code]
    told = [text for text in told if text]
    assert told[0] == f"{installed.packages / 'dagrl' / '__init__.py'}\n", "the wheel, not the repository"
    assert told[1].endswith("]\nTrue\n") and told[2] == "step 3 of 3 in runs/demo\n"
    drawn = notebook.cells[-1].outputs[0]["data"]["image/png"]
    assert len(drawn) > 5000
    assert [path.name for path in folder.iterdir()] == ["runs"]
    lines = (folder / "runs" / "demo" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3]
