"""One headless browser for all tests that open pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.support.browser import browser_program, launched


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A real Chromium without a window; `tests.support.browser.opened` opens a page in it."""
    try:
        browser_program()
    except RuntimeError as error:
        pytest.fail(str(error), pytrace=False)
    with launched() as running:
        yield running
