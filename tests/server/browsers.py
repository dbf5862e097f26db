"""A browser for tests of the page: the system's own, without a window. It asks nothing but the server of the test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from tests.helpers.patience import PATIENCE_SECONDS

if TYPE_CHECKING:  # the package may be missing
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage")


def why_there_is_none() -> str | None:
    """What is missing; None if a browser can be driven."""
    if find_spec("playwright") is None:
        return "needs the extra [test-web]"
    return None if _executable() else f"needs a browser: {', '.join(NAMES)}"


def _executable() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def browsing() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_executable(), args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """A page that is open in a browser, and what it did behind the scenes."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.requests: list[str] = []
        self.complaints: list[str] = []  # of the browser, about the page; that an answer is an error is none
        page.set_default_timeout(1000 * PATIENCE_SECONDS)
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda said: self.complaints.append(said.text) if "Failed to load" not in said.text else None)

    def shows(self, place: str, text: str) -> None:
        """Waits until a place of the page has a text in it."""
        self.page.locator(place, has_text=text).first.wait_for()

    def text(self, place: str) -> str:
        return self.page.locator(place).text_content() or ""

    def ask(self, prompt: str, tokens: int = 12, temperature: float = 0) -> None:
        for place, value in (("#prompt", prompt), ("#most", str(tokens)), ("#temperature", str(temperature))):
            self.page.fill(place, value)
        self.page.click("#run")


@contextmanager
def visiting(browser: Browser, url: str, width: int = 1180, dark: bool = False) -> Iterator[Visit]:
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme="dark" if dark else "light")
    visit = Visit(page)
    try:
        page.goto(url)
        yield visit
    finally:
        page.close()
