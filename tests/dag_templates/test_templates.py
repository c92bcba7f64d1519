"""Every template, checked and planned as a user does it who has followed its comments."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dagrl.backends.families.registry import model_shape
from dagrl.cli import main
from dagrl.config.loading.extends import read_with_parents
from dagrl.config.loading.yaml_source import read_document
from dagrl.config.residency import Residency
from dagrl.planner.cost.costs import PipelineCosts
from dagrl.scheduler.commands import Commit, Restart, Run, Save, Sleep, Sync, Wake
from dagrl.scheduler.placement import make_plan
from dagrl.scheduler.plan import HOST
from dagrl.validation import check_file

REPOSITORY = Path(__file__).parents[2]


def _file(name: str) -> Path:
    return REPOSITORY / "dag_templates" / f"{name}.yaml"


NAMES = sorted(path.stem for path in (REPOSITORY / "dag_templates").glob("*.yaml"))
SETUPS = ("tiny",)
"""Templates that are laid over another and make no pipeline alone."""
GPUS = {"grpo_moe": "H200", "qwen3_30b_a3b_8gpu": "H200"}
"""Templates that ask for more than 80 GiB of each GPU, and say so."""
needs_vllm = pytest.mark.skipif(not Path(f"{sys.prefix}-vllm").exists(), reason="`make vllm` builds its environment")
every_template = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[needs_vllm] * ("vllm" in name)) for name in NAMES if name not in SETUPS]
)


@pytest.fixture
def called(machine, monkeypatch, capsys):
    """Call `dagrl` in the folder of the machine's user; its exit code, stdout and stderr."""
    monkeypatch.chdir(machine.folder)
    monkeypatch.setenv("HOME", str(machine.home))

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        return code, *capsys.readouterr()

    return call


@every_template
def test_it_validates_without_a_warning(called, name: str) -> None:
    code, out, err = called("validate", f"dag_templates/{name}.yaml")
    assert (code, err) == (0, "")
    assert "warnings" not in out, out[out.index("warnings") :]


@every_template
def test_it_fits_the_machines_that_it_is_written_for(called, name: str) -> None:
    gpu = ("--gpu", GPUS[name]) if name in GPUS else ()
    code, _, err = called("plan", f"dag_templates/{name}.yaml", *gpu)
    assert (code, err) == (0, "")


@every_template
def test_every_command_has_a_cost(machine, monkeypatch, name: str) -> None:
    monkeypatch.setenv("HOME", str(machine.home))
    checked = check_file(machine.folder / "dag_templates" / f"{name}.yaml")
    pipeline = checked.loaded.pipeline
    costs = PipelineCosts(pipeline, make_plan(pipeline, checked.graph), model_shape(pipeline.model))
    every = tuple(range(costs.plan.shards))
    for task in costs.plan.tasks:
        for shards in (every, every[:1]):
            run = Run(1, task.name, shards)
            offsets = costs.shard_offsets(run)
            assert offsets[0] > 0 and list(offsets) == sorted(offsets)
            assert len(offsets) == len(shards) and offsets[-1] == costs.seconds(run)
    for executor in costs.plan.executors.values():
        if executor.name == HOST:
            continue
        moves = [Sleep(1, executor.name, Residency.ASLEEP), Wake(1, executor.name, Residency.AWAKE)]
        moves += [Restart(1, executor.name)]
        moves += [Sync(1, executor.name, executor.weights_from, 1)] if executor.weights_from else []
        moves += [Save(1, executor.name)] if executor.trained else []
        assert all(costs.seconds(command) >= 0 for command in (*moves, Commit(1, save=False)))


@pytest.mark.parametrize("name", [name for name in NAMES if read_document(_file(name)).tree.get("extends")])
def test_it_holds_differences_only(name: str, tmp_path: Path) -> None:
    own = read_document(_file(name)).tree
    parents = own.pop("extends")
    child = tmp_path / "child.yaml"
    named = [str(_file(parent)) for parent in ([parents] if isinstance(parents, str) else parents)]
    child.write_text(f"extends: {named}\n")
    inherited = read_with_parents(child).tree
    repeated = [place for place, value in _leaves(own) if _at(inherited, place) == value]
    assert repeated == []


@pytest.mark.parametrize("name", NAMES)
def test_it_explains_its_use_and_is_in_the_list(name: str) -> None:
    text = _file(name).read_text()
    assert text.startswith("# ")
    assert "data_preprocess/" not in "".join(re.findall(r"^# {5}.*$", text, re.MULTILINE)), "write `dagrl data NAME`"
    pages = re.findall(r"docs/\w+\.md", text)
    assert [page for page in pages if not (REPOSITORY / page).is_file()] == []
    assert f"`{name}`" in (REPOSITORY / "docs" / "templates.md").read_text()


def _leaves(tree: dict[str, Any], place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*place, key))
        else:
            yield (*place, key), value


def _at(tree: Any, place: tuple[str, ...]) -> Any:
    """The value at a place; something that no file holds where there is none."""
    for key in place:
        if not isinstance(tree, dict) or key not in tree:
            return NAMES
        tree = tree[key]
    return tree
