"""Chromium with tabs that remember what went wrong in them, for tests of pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright
from tests.processes.harness import until
from tests.requirements import CHROMIUM, require

WAIT_MS = 60_000


def browsers() -> Iterator[Any]:
    """The body of a fixture."""
    require(CHROMIUM)
    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Tab:
    """A tab, what went wrong in it, and whom it asked for anything."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 860}, **options)
        self.context.set_default_timeout(WAIT_MS)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        self.page.on("request", lambda request: self.asked.append(request.url))

    def row(self, node: str, state: str = "alive") -> Any:
        return self.page.locator(f'.scroller .row[id="row-{node}"][data-state="{state}"]')

    def view(self, name: str) -> None:
        self.page.click(f'#tabs a[data-view="{name.partition("/")[0]}"]')

    def close_notes(self) -> None:
        self.page.locator(".note button").evaluate_all("(all) => all.forEach((button) => button.click())")

    def until(self, script: str) -> None:
        """Asked from outside: what playwright has for this evaluates a text in the page, and the page's policy forbids that."""
        until(lambda: self.page.evaluate(script), script, WAIT_MS / 1000, lambda: f"{self.page.content()}\n{self.complaints}")


def picture(page: Any, folder: Path, name: str) -> None:
    page.screenshot(path=Path(os.environ.get("COVEY_PICTURES") or folder) / f"{name}.png", animations="disabled")
