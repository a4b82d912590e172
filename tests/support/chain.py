"""Checks everything that shows a run on one run folder: usage, trace, report, live view."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from aprilsched.observe.log.rebuild import rebuilt_summary
from aprilsched.observe.log.run import read_run
from aprilsched.observe.log.run_folder import REPORT, TRACE
from aprilsched.observe.log.usage import usage_of
from tests.support.browser import launched, opened
from tests.support.trace_processor import loaded, rows

__all__ = ["check_chain"]

ERRORS = "SELECT name, value FROM stats WHERE severity = 'error' AND value > 0"
TOKENS = """
    SELECT process.name, SUM(EXTRACT_ARG(slice.arg_set_id, 'args.tokens')) FROM slice
    JOIN thread_track ON thread_track.id = slice.track_id
    JOIN thread USING (utid) JOIN process USING (upid)
    WHERE category = 'rollout' GROUP BY 1
"""


def check_chain(folder: Path, engines: Collection[str]) -> None:
    """Check that all views of the run in `folder` work and agree.

    It starts a browser, so it must not be called while an event loop runs.
    """
    summary = read_run(folder).summary
    rebuilt = rebuilt_summary(folder)
    assert rebuilt.rollouts == summary.rollouts
    assert rebuilt.tokens == summary.tokens
    usage = usage_of(folder)
    assert set(usage.engines) == set(engines)
    assert usage.seconds.sum(axis=1) == pytest.approx([usage.wall] * len(engines), rel=0.01)
    assert sum(usage.shares.values()) == pytest.approx(1)
    assert sum(usage.tokens) == summary.tokens.generated
    _check_trace(folder / TRACE, dict(zip(usage.engines, usage.tokens, strict=True)))
    _check_report(folder / REPORT, engines)
    _check_view(folder, engines)


def _check_trace(path: Path, tokens: dict[str, int]) -> None:
    with loaded(path) as processor:
        assert rows(processor, ERRORS) == []
        shown = {name.removeprefix("engine "): count for name, count in rows(processor, TOKENS)}
    assert shown == tokens


def _check_report(path: Path, engines: Collection[str]) -> None:
    with launched() as browser, opened(browser, path) as page:
        page.page.wait_for_selector("html[data-drawn]", state="attached")
        assert page.errors == []
        assert page.overflow() == 0
        text = page.page.inner_text("body")
        figures = json.loads(page.page.inner_text("#figures") or "{}")
    assert figures
    assert all(engine in text for engine in engines)


def _check_view(folder: Path, engines: Collection[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "aprilsched", "watch", str(folder), "--once"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(engine in done.stdout for engine in engines)
