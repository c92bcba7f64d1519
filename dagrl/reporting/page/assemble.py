"""Assembles the page of a report: one self-contained HTML file.

A Content-Security-Policy allows the scripts and styles of the page by their hashes and nothing else, and Trusted Types
refuse any text that a script would parse as HTML. Samples, which may contain anything, thus stay text.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parent / "assets"
_STYLES = ("page.css",)
_SCRIPTS = (
    "trusted.js",
    "vendor/echarts.min.js",
    "vendor/gridjs.umd.js",
    "dom.js",
    "source.js",
    "charts.js",
    "tables.js",
    "overview.js",
    "metrics.js",
    "steps.js",
    "graph.js",
    "conversation.js",
    "samples.js",
    "validation.js",
    "evaluation.js",
    "plan.js",
    "app.js",
)
"""Scripts in the order of execution; the last one starts the page."""


def page(manifest: Mapping[str, object], blobs: Iterable[str] = ()) -> Iterable[str]:
    """The parts of the page's text. `manifest` lists ``runs`` and says if it is ``live``; `blobs` are by `blob`."""
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    yield f'<meta http-equiv="Content-Security-Policy" content="{content_security_policy(live=manifest["live"])}">\n'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>dagrl</title>\n'
    yield '<link rel="icon" href="data:,">\n'
    for style in _STYLES:
        yield f"<style>{_asset(style)}</style>\n"
    yield "</head>\n<body>\n"
    # No text in it ends the script element.
    text = json.dumps(manifest, allow_nan=False).replace("<", "\\u003c")
    yield f'<script type="application/json" id="manifest">{text}</script>\n'
    yield from blobs
    for script in _SCRIPTS:
        yield f"<script>{_asset(script)}</script>\n"
    yield "</body>\n</html>\n"


def blob(name: str, value: Any) -> tuple[str, int]:
    """An element of the page with a value as compressed JSON, and its length in bytes."""
    packed = base64.b64encode(gzip.compress(to_json(value), 6, mtime=0)).decode()
    return f'<script type="application/gzip" id="{name}">{packed}</script>\n', len(packed)


def to_json(value: Any) -> bytes:
    """JSON without NaN, for which it raises ValueError."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


@cache
def content_security_policy(*, live: bool) -> str:
    """The policy of the page, for its meta element and for a server's header. A `live` page requests data from its
    server.
    """
    connect = "'self'" if live else "'none'"
    scripts = " ".join(f"'{_hash(name)}'" for name in _SCRIPTS)
    styles = " ".join(f"'{_hash(name)}'" for name in _STYLES)
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; img-src data: blob:; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types default"
    )


@cache
def _asset(name: str) -> str:
    text = (ASSETS / name).read_text(encoding="utf-8")
    assert "</script" not in text and "<!--" not in text, f"{name} would end its element"
    return text


def _hash(name: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(_asset(name).encode()).digest()).decode()}"
