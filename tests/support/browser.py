"""Opens pages in a real headless browser, with a given screen size and color scheme.

The browser is the one that `make .browser` fetches, with its own fonts, or the one that
:data:`ENVIRONMENT` names. Errors of a page are in its `errors`.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import Browser, ConsoleMessage, Error, Page, Request, sync_playwright

__all__ = ["DESKTOP", "PHONE", "OpenPage", "browser_program", "launched", "opened"]

ENVIRONMENT = "APRILSCHED_BROWSER"
FOLDER = Path(__file__).parents[2] / ".browser"
DESKTOP = (1280, 800)
PHONE = (390, 844)
# Containers run as root and without user namespaces, where the sandbox cannot start; the pages are
# our own files.
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
ColorScheme = Literal["light", "dark"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenPage:
    """A loaded page, and its messages and errors so far."""

    page: Page  #: playwright's page, for everything else (clicks, locators)
    console: list[str] = field(default_factory=list[str])  #: every message, as "type: text"
    errors: list[str] = field(default_factory=list[str])  #: in the console, uncaught, of requests

    def evaluate(self, expression: str, argument: object = None) -> Any:
        """The value of a JavaScript expression or of a function of `argument`."""
        return self.page.evaluate(expression, argument)

    def screenshot(self, path: Path, *, full_page: bool = False) -> Path:
        """Write a picture of the page as a PNG file."""
        self.page.screenshot(path=path, full_page=full_page)
        return path

    def overflow(self) -> int:
        """Number of pixels by which the page is wider than the screen; 0 if it fits."""
        root = "document.documentElement"
        return int(self.evaluate(f"Math.max(0, {root}.scrollWidth - {root}.clientWidth)"))


def browser_program() -> Path:
    """The browser's program.

    Raises:
        RuntimeError: if it does not exist, because a test must not pass without a browser.
    """
    program = Path(os.environ.get(ENVIRONMENT) or FOLDER / "chromium")
    if not program.is_file():
        raise RuntimeError(
            f"There is no browser at {program}; run `make .browser`, which fetches one, or set "
            f"{ENVIRONMENT} to the program of a Chromium or Chrome."
        )
    return program


@contextmanager
def launched() -> Generator[Browser]:
    """A browser without a window, for any number of pages."""
    program = browser_program()
    environment = dict[str, str | float | bool](os.environ)
    if program.parent == FOLDER:
        environment |= {
            "LD_LIBRARY_PATH": str(FOLDER / "al2023" / "lib"),
            "FONTCONFIG_FILE": str(FOLDER / "fonts.conf"),
            "XDG_CACHE_HOME": str(FOLDER / "cache"),
        }
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=ARGUMENTS, env=environment
        )
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(
    browser: Browser,
    target: Path | str,
    *,
    viewport: tuple[int, int] = DESKTOP,
    color_scheme: ColorScheme = "light",
    network: bool = False,
) -> Generator[OpenPage]:
    """Load the page of a file or an address.

    Without `network`, every request except the page's own file is refused and counted as an error,
    which tests that the page is self-contained. With a phone's viewport the browser behaves as a
    phone: it has touch, and two device pixels for each CSS pixel.
    """
    address = target if isinstance(target, str) else target.resolve().as_uri()
    phone = viewport[0] < 600
    context = browser.new_context(
        viewport={"width": viewport[0], "height": viewport[1]},
        color_scheme=color_scheme,
        device_scale_factor=2 if phone else 1,
        has_touch=phone,
        is_mobile=phone,
    )
    try:
        page = context.new_page()
        open_page = OpenPage(page=page)

        def on_console(message: ConsoleMessage) -> None:
            line = f"{message.type}: {message.text}"
            open_page.console.append(line)
            if message.type == "error":
                open_page.errors.append(line)

        def on_page_error(error: Error) -> None:
            open_page.errors.append(f"uncaught: {error.message}")

        def on_failed(request: Request) -> None:
            open_page.errors.append(f"request failed: {request.url}: {request.failure}")

        page.on("console", on_console)
        page.on("pageerror", on_page_error)
        page.on("requestfailed", on_failed)
        if not network:
            page.route(
                lambda url: url != address and not url.startswith(("data:", "blob:")),
                lambda route: route.abort(),
            )
        page.goto(address)
        yield open_page
    finally:
        context.close()
