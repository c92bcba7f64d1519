"""Makes a site of the repository's pages: README as its index and source of the navigation, and links between folders.

A link to a file that is no part of the site, such as a test, becomes plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_REPOSITORY = Path(__file__).parents[2]
_INDEX = "index.md"
_OTHERS = {
    "CONTRIBUTING.md": "Working on dagrl",
    "benchmarks/RESULTS.md": "Benchmarks",
    "benchmarks/LEARNING.md": "Learning and exactness",
}
"""Pages outside of docs/, and their titles."""
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_ROW = re.compile(r"^\| ([\w ]+) \| (\[.*\]\(docs/.*) \|$", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the navigation from the table of pages in the README."""
    readme = (_REPOSITORY / "README.md").read_text(encoding="utf-8")
    navigation: list[dict[str, object]] = [{"dagrl": _INDEX}]
    for title, row in _ROW.findall(readme):
        pages = [{name: target.removeprefix("docs/")} for _, name, target in _LINK.findall(row)]
        navigation.append({title[0].upper() + title[1:]: pages})
    config.nav = [*navigation, {"The project": [{title: page} for page, title in _OTHERS.items()]}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README, the other pages, and the templates with their modules and data."""
    templates = sorted(path for path in (_REPOSITORY / "dag_templates").rglob("*") if path.suffix in (".yaml", ".py"))
    sources = {_INDEX: "README.md"} | {page: page for page in _OTHERS}
    sources |= {name: name for name in (path.relative_to(_REPOSITORY).as_posix() for path in templates)}
    for uri, source in sources.items():
        files.append(File.generated(config, uri, abs_src_path=str(_REPOSITORY / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the site's files."""
    here = page.file.src_uri

    def point(found: re.Match[str]) -> str:
        image, text, target = found.groups()
        path, _, anchor = target.partition("#")
        if not path or ":" in path:
            return found[0]
        uri = _uri_of(posixpath.normpath(posixpath.join(posixpath.dirname(_source_of(here)), path)))
        if uri is None:
            return text
        return f"{image}[{text}]({posixpath.relpath(uri, posixpath.dirname(here) or '.')}{'#' * bool(anchor)}{anchor})"

    return _LINK.sub(point, markdown)


def _source_of(uri: str) -> str:
    """The repository's path of a page of the site."""
    if uri == _INDEX:
        return "README.md"
    return uri if uri in _OTHERS else f"docs/{uri}"


def _uri_of(source: str) -> str | None:
    """The site's file of a path in the repository; None for a file that is no part of it."""
    if source == "README.md":
        return _INDEX
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    return source if source in _OTHERS or re.fullmatch(r"dag_templates/.*\.(yaml|py)", source) else None
