"""Headless Chromium, the package `chromium` of the system, for tests of what people look at."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Browser, Page, sync_playwright

from dagrl.reporting.server import Runs, application, listen

_NAMES = ("chromium", "chromium-browser", "google-chrome")


@dataclass
class Opened:
    """A page, and what went wrong on it."""

    page: Page
    errors: list[str] = field(default_factory=list)
    """Exceptions, and what the console calls an error: refused scripts and styles too."""
    requests: list[str] = field(default_factory=list)

    def show(self, view: str) -> None:
        """Go to a view of a report, `samples?step=3`, and wait until it is drawn."""
        self.page.evaluate("(view) => { delete document.body.dataset.drawn; location.hash = view; }", view)
        self.page.wait_for_selector(f"body[data-drawn={view.partition('?')[0]}]")

    def wait_for(self, selector: str, text: str) -> None:
        """Wait until an element has a text."""
        self.page.locator(selector, has_text=text).first.wait_for()

    def text(self, selector: str = "main") -> str:
        return self.page.locator(selector).first.inner_text()


@contextmanager
def browsing() -> Iterator[Browser]:
    """Chromium. Skips the test where none is installed, but not in CI, which installs it.

    Keep it open within one module: while it is, no event loop can be run in this thread.
    """
    name = next((path for each in _NAMES if (path := shutil.which(each))), None)
    if name is None:
        assert not os.environ.get("CI"), "CI installs chromium before the tests: see .ci/run"
        pytest.skip("Chromium is not installed (the system's package `chromium`)")
    with sync_playwright() as playwright:
        # As root, as in containers, Chromium runs without its sandbox alone.
        browser = playwright.chromium.launch(executable_path=name, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, address: str | Path | None, **options: Any) -> Iterator[Opened]:
    """A report's file or address, once it is drawn; None for a blank page."""
    page = browser.new_page(viewport={"width": 1400, "height": 900}, **options)
    page.set_default_timeout(60_000)
    found = Opened(page)
    page.on("pageerror", lambda error: found.errors.append(str(error)))
    page.on("console", lambda said: found.errors.append(said.text) if said.type == "error" else None)
    page.on("request", lambda request: found.requests.append(request.url))
    if address is not None:
        page.goto(address.resolve().as_uri() if isinstance(address, Path) else address)
        page.wait_for_selector("body[data-ready]")
    yield found
    page.close()


@contextmanager
def served(runs: Runs) -> Iterator[int]:
    """The port of a server, in a thread, that shows runs as `dagrl ui` does."""
    with listen(0) as listener:
        server = uvicorn.Server(uvicorn.Config(application(runs), log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join(30)
