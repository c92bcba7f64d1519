"""The pages lead somewhere, and what they show is true of the schema."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dagrl.cli import main
from dagrl.config.loading.loader import load_pipeline
from dagrl.graph.drawing.draw import draw_svg
from dagrl.graph.inference import build_graph

REPOSITORY = Path(__file__).parents[1]
PAGES = [page for folder in (".", "docs", "benchmarks") for page in sorted((REPOSITORY / folder).glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def blocks(page: str) -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", (REPOSITORY / "docs" / page).read_text(), re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_pages_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_the_first_page_names_every_other() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    assert [page.name for page in (REPOSITORY / "docs").glob("*.md") if f"docs/{page.name}" not in readme] == []


def test_the_picture_of_the_demo_is_what_is_drawn() -> None:
    loaded = load_pipeline(REPOSITORY / "dag_templates" / "tiny_grpo.yaml")
    drawn = draw_svg(build_graph(loaded.pipeline, loaded.folder, loaded.positions))
    told = "run: dagrl graph dag_templates/tiny_grpo.yaml -o docs/tiny_grpo.svg"
    assert (REPOSITORY / "docs" / "tiny_grpo.svg").read_text() == drawn, told


def test_methods_in_the_way_of_a_step_and_of_a_loss_exist() -> None:
    page = (REPOSITORY / "docs/schedule.md").read_text()
    named = dict.fromkeys(re.findall(r"`([A-Z]\w+)\.(\w+)`", page))
    sources = [path.read_text() for path in (REPOSITORY / "dagrl").rglob("*.py")]
    for owner, method in named:
        (source,) = [text for text in sources if re.search(rf"^class {owner}\b", text, re.MULTILINE)]
        assert re.search(rf"^    (async )?def {method}\(", source, re.MULTILINE), f"{owner}.{method}"
    assert len(named) > 10


def test_keys_that_others_are_translated_into_exist() -> None:
    known = set(re.findall(r"^\| `(\w+)` \|", (REPOSITORY / "docs" / "pipeline.md").read_text(), re.MULTILINE))
    rows = re.findall(r"^\| .*? \| (.*) \|$", (REPOSITORY / "docs" / "migration.md").read_text(), re.MULTILINE)
    keys = {key for row in rows for key in re.findall(r"`((?:data|run|schedule|nodes|engines|groups)\.[\w.]+)", row)}
    # The last part of `transformer`, `optimizer` and `server` is Megatron's, or SGLang's.
    theirs = re.compile(r"engines\.\w+\.(optimizer|server)\.\w+|nodes\.\w+")
    assert len(keys) > 40
    assert {key for key in keys if key.split(".")[-1] not in known and not theirs.fullmatch(key)} == set()


WHOLE = [
    *blocks("migration.md"),
    *blocks("scaling.md"),
    *(text for page in ("sglang.md", "distillation.md") for text in blocks(page) if text.startswith("extends:")),
]


@pytest.mark.parametrize("text", WHOLE, ids=lambda text: text.split()[1])
def test_pipelines_that_pages_show_have_a_graph(text: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "shown.yaml").write_text(text)
    assert main(["graph", str(tmp_path / "shown.yaml")]) == 0, capsys.readouterr().err


def test_the_update_reads_the_mask_that_newcomers_are_shown(tmp_path: Path, capsys) -> None:
    page = (REPOSITORY / "docs" / "migration.md").read_text()
    (code,) = re.findall(r"```python\n# my_masks.py\n(.*?)```", page, re.DOTALL)
    nodes = re.findall(r"`((?:whole|update): \{.*\})`", page.replace("`, `", "`\n`"))
    assert len(nodes) == 2
    (tmp_path / "my_masks.py").write_text(code)
    (tmp_path / "shown.yaml").write_text("\n  ".join(["extends: tiny_grpo\nname: shown\nnodes:", *nodes]))
    assert main(["graph", str(tmp_path / "shown.yaml")]) == 0, capsys.readouterr().err
    assert "whole -> trained_mask" in capsys.readouterr().out
