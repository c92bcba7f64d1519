"""The documentation as a site: every page is in it, no link or anchor leads nowhere, and it needs no other address."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

REPOSITORY = Path(__file__).parents[1]
DEAD = "[page](no_such_page.md) [heading](plan.md#no-such-heading) [right](plan.md#the-nearest-change)"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The built site, with a page whose links are dead, and the builder's warnings."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(REPOSITORY / "docs", folder / "docs")
    (folder / "docs" / "planted.md").write_text(f"# Planted\n\n{DEAD}\n")
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mkdocs")
    logger.addHandler(handler)
    try:
        config = str(REPOSITORY / "docs" / "site" / "mkdocs.yml")
        build(load_config(config, docs_dir=str(folder / "docs"), site_dir=str(folder / "built")))
    finally:
        logger.removeHandler(handler)
    return folder / "built", warnings


def test_dead_links_and_pages_without_a_place_are_found_and_there_are_no_others(site) -> None:
    _, warnings = site
    assert len(warnings) == 3, "\n".join(warnings)
    for words in (("planted.md", "nav"), ("planted.md", "no_such_page.md"), ("planted.md", "#no-such-heading")):
        assert any(all(word in warning for word in words) for warning in warnings), words


def test_every_page_is_built_and_searched(site) -> None:
    built, _ = site
    pages = {page.stem for page in (REPOSITORY / "docs").glob("*.md")} | {"index", "CONTRIBUTING"}
    assert {page.stem for page in built.glob("*.html")} == pages | {"404", "planted"}
    searched = json.loads((built / "search" / "search_index.json").read_text())["docs"]
    assert any(each["location"].startswith("async.html") and "staleness" in each["text"] for each in searched)
    assert {each["location"].partition("#")[0] for each in searched} >= {f"{page}.html" for page in pages}


def test_pages_have_their_pictures_and_templates_and_load_nothing_else(site) -> None:
    built, _ = site
    for page in built.glob("*.html"):
        if page.stem == "planted":
            continue
        text = page.read_text()
        assert re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(?:https?:)?//[^"]*"', text) == [], page.name
        for name in re.findall(r'(?:src|href)="([^":#?]+)(?:[#?][^"]*)?"', text):
            assert (built / name.lstrip("/")).exists(), f"{page.name}: {name}"
    assert 'href="dag_templates/dapo.yaml"' in (built / "algorithms.html").read_text()
    assert 'src="tiny_grpo.svg"' in (built / "index.html").read_text()
