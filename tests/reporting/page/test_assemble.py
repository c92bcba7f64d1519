"""The page is one file whose scripts are its own, whatever texts it holds."""

from __future__ import annotations

import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from dagrl.reporting.page.assemble import ASSETS, blob, page

HOSTILE = "</script><script>alert(1)</script><!--<script>\"\u2028'`${}"


class Elements(HTMLParser):
    """Scripts as a browser finds them."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "script":
            self.scripts.append((dict(attributes), ""))

    def handle_data(self, data: str) -> None:
        if self.scripts and self.lasttag == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)


def test_texts_of_a_run_cannot_end_their_element() -> None:
    element, size = blob("0/metrics", {"text": HOSTILE})
    text = "".join(page({"live": False, "runs": [{"name": HOSTILE}]}, [element]))
    assert size == len(re.sub("<.*?>", "", element).strip())
    elements = Elements()
    elements.feed(text)
    data = [(attributes, inner) for attributes, inner in elements.scripts if "type" in attributes]
    assert json.loads(data[0][1])["runs"][0]["name"] == HOSTILE
    assert data[1][0]["id"] == "0/metrics" and "<" not in data[1][1]
    own = [inner for attributes, inner in elements.scripts if not attributes]
    policy = re.search('Content-Security-Policy" content="(.*?)"', text)
    assert policy and len(own) == policy[1].split("; style-src")[0].count("'sha256-")
    assert "unsafe" not in policy[1] and "connect-src 'none'" in policy[1]


@pytest.mark.parametrize("name", ["echarts.min.js", "gridjs.umd.js"])
def test_libraries_are_as_they_were_published(name: str) -> None:
    digest = hashlib.sha256((ASSETS / "vendor" / name).read_bytes()).hexdigest()
    row = re.search(rf"^\| `{re.escape(name)}`.*$", (ASSETS / "vendor" / "README.md").read_text(), re.MULTILINE)
    assert row and digest in row[0]


def test_own_scripts_make_no_html_of_texts() -> None:
    sources = {path.name: path.read_text() for path in ASSETS.glob("*.js")}
    assert len(sources) > 10
    unsafe = re.compile(r"(?:inner|outer)HTML\s*=[^=]|insertAdjacentHTML|document\.write|\beval\(|new Function")
    # A comment of trusted.js shows the one that libraries may use.
    found = {name for name, text in sources.items() if unsafe.search(text)}
    assert found <= {"trusted.js"}
