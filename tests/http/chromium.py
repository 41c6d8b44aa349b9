"""Chromium for tests of web pages; tabs record errors and requests."""

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
    """Yield a browser; the body of a fixture."""
    require(CHROMIUM)
    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Tab:
    """A browser tab with its console errors and the URLs it requested."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 860}, **options)
        self.context.set_default_timeout(WAIT_MS)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.requested: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("request", lambda request: self.requested.append(request.url))

    def row(self, node: str, state: str = "alive") -> Any:
        return self.page.locator(f'.scroller .row[id="row-{node}"][data-state="{state}"]')

    def view(self, name: str) -> None:
        self.page.click(f'#tabs a[data-view="{name.partition("/")[0]}"]')

    def close_notes(self) -> None:
        self.page.locator(".note button").evaluate_all("(all) => all.forEach((button) => button.click())")

    def until(self, script: str) -> None:
        """Poll the script until it is true. Playwright's wait_for_function would need eval, which the page's policy forbids."""
        until(lambda: self.page.evaluate(script), script, WAIT_MS / 1000, lambda: f"{self.page.content()}\n{self.errors}")


def picture(page: Any, folder: Path, name: str) -> None:
    page.screenshot(path=Path(os.environ.get("COVEY_PICTURES") or folder) / f"{name}.png", animations="disabled")
