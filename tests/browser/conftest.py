"""Starts one headless browser for each file of tests that open pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.support.browser import browser_program, launched


# For no longer than a file: playwright's synchronous interface leaves its event loop running in
# this thread, and while it does, no asynchronous test can start its own.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A real Chromium without a window; `tests.support.browser.opened` opens a page in it."""
    try:
        browser_program()
    except RuntimeError as error:
        pytest.fail(str(error), pytrace=False)
    with launched() as running:
        yield running
