"""Tests the browser in which tests open pages: it runs scripts and reports errors of a page."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.support.browser import DESKTOP, ENVIRONMENT, PHONE, browser_program, opened

SCREEN = "[innerWidth, innerHeight, matchMedia('(prefers-color-scheme: dark)').matches]"


def written(folder: Path, body: str) -> Path:
    path = folder / "page.html"
    head = "<!doctype html><meta name=viewport content='width=device-width'>"
    path.write_text(head + body, encoding="utf-8")
    return path


def test_a_page_runs_its_script(browser: Browser, tmp_path: Path):
    path = written(tmp_path, "<p id=sum></p><script>sum.textContent = 40 + 2</script>")
    with opened(browser, path) as page:
        assert page.evaluate("document.querySelector('#sum').textContent") == "42"
        assert page.evaluate("x => x * 2", 21) == 42
        assert page.errors == []


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE])
@pytest.mark.parametrize("dark", [False, True])
def test_a_page_sees_the_screen_and_the_theme(
    browser: Browser, tmp_path: Path, viewport: tuple[int, int], dark: bool
):
    path = written(tmp_path, "")
    scheme = "dark" if dark else "light"
    with opened(browser, path, viewport=viewport, color_scheme=scheme) as page:
        assert page.evaluate(SCREEN) == [*viewport, dark]


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("<script>console.error('a chart is empty')</script>", "error: a chart is empty"),
        ("<script>missing()</script>", "uncaught: missing is not defined"),
        ("<img src='http://127.0.0.1:9/logo.png'>", "request failed: http://127.0.0.1:9/logo.png"),
    ],
)
def test_a_broken_page_is_found_out(browser: Browser, tmp_path: Path, body: str, complaint: str):
    with opened(browser, written(tmp_path, body)) as page:
        assert any(error.startswith(complaint) for error in page.errors), page.errors


def test_a_page_that_is_too_wide_is_found_out(browser: Browser, tmp_path: Path):
    path = written(tmp_path, "<body style='margin: 0'><div style='width: 500px'>wide</div>")
    with opened(browser, path, viewport=PHONE) as page:
        assert page.overflow() > 100
    with opened(browser, path) as page:
        assert page.overflow() == 0


def test_text_is_drawn_in_fonts_that_the_browser_brings(browser: Browser, tmp_path: Path):
    body = (
        "<span id=wide style='font: 40px sans-serif'>mmmm</span><br>"
        "<span id=narrow style='font: 40px sans-serif'>iiii</span><br>"
        "<code id=even style='font: 40px monospace'>iiii</code><br>"
        "<code id=same style='font: 40px monospace'>mmmm</code>"
    )
    width = "id => document.getElementById(id).getBoundingClientRect().width"
    with opened(browser, written(tmp_path, body)) as page:
        assert page.evaluate(width, "wide") > 2 * page.evaluate(width, "narrow") > 0
        assert page.evaluate(width, "even") == page.evaluate(width, "same") > 0
        picture = page.screenshot(tmp_path / "page.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    with opened(browser, written(tmp_path, "")) as page:
        assert page.screenshot(tmp_path / "page.png").read_bytes() != picture


def test_a_missing_browser_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "chrome"))
    with pytest.raises(RuntimeError, match=r"There is no browser at .*; run `make \.browser`"):
        browser_program()
