"""Tests the report in a real browser: complete, in both themes, on a phone, without injection."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser

from aprilsched import Prompt, RolloutScheduler, SamplingParams, SchedulerConfig, SimFleet
from aprilsched.__main__ import main
from aprilsched.agents.chat.tokenizer import load_tokenizer
from aprilsched.agents.sessions import Session, Sessions
from aprilsched.cli.runs.config_file import as_toml
from aprilsched.cli.runs.settings import RunSettings
from aprilsched.config import Retries
from aprilsched.errors import MemberLost
from aprilsched.observe.log.run_folder import RunFolder
from aprilsched.observe.log.writing import EventLog
from aprilsched.observe.report.page import write_report
from aprilsched.simulation.engine import run_virtual
from tests.support.browser import DESKTOP, PHONE, ColorScheme, OpenPage, opened
from tests.support.long_log import write_long_run
from tests.support.reported import with_reports
from tests.support.tiny_tokenizer import bytes_tokenizer

PATIENCE_S = 120.0

SMALL = ["--batch-groups", "4", "--group-size", "4", "--median", "60", "--cap", "600"]
ONE_RUN = 7
"""Number of charts of a run without samples."""
TWO_RUNS = 11
DRAWN = "html[data-drawn]"
EMPTY = """() => [...document.querySelectorAll('.chart')].filter((chart) => {
  const svg = chart.querySelector('svg.main-svg');
  const box = svg && svg.getBoundingClientRect();
  const marks = chart.querySelectorAll('.trace path, .trace .point');
  return !box || box.width < 100 || box.height < 50 || !marks.length;
}).map((chart) => chart.id)"""
NUMBERS = "[...document.querySelectorAll('#batches .xtick text')].map((tick) => tick.textContent)"
"""The ticks of the axis of batches."""
LETTERS = """() => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), lines = new Map();
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    let block = text.parentElement;
    while (getComputedStyle(block).display === 'inline') block = block.parentElement;
    if (block.closest('svg, script, style, noscript')) continue;
    const range = document.createRange();
    range.selectNodeContents(text);
    const rects = [...range.getClientRects()].filter((line) => line.width);
    lines.set(block, [...(lines.get(block) ?? []), ...rects]);
  }
  return [...lines].filter(([block, rects]) =>
    new Set(rects.map((line) => Math.round(line.top))).size > 1 &&
    Math.max(...rects.map((line) => line.width)) < 4 * parseFloat(getComputedStyle(block).fontSize)
  ).map(([block, _]) => block.innerText);
}"""
"""Texts in several lines none of which is 4 em wide: their column has room for a few letters."""
IN_BOTH_THEMES = pytest.mark.parametrize(
    ("viewport", "scheme"),
    [(DESKTOP, "light"), (PHONE, "dark")],
    ids=["light desktop", "dark phone"],
)
HOSTILE = "<img src=x onerror=window.hit=1></script><script>window.hit=1</script>"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Runs of two engines: a synchronous one, and one that carries and evicts stale rollouts."""
    root = tmp_path_factory.mktemp("runs") / "simulated"
    policies = "sync,april:max_staleness=1:max_staleness.rule=evict"
    engines = ["--sim.engines", "2", "--sim.stream-interval", "8", "--sim.refit-seconds", "1"]
    arguments = ["--policy", policies, "--batches", "8", "--quiet", "--out", str(root)]
    # Without an event loop: the browser's own runs in this thread.
    assert main(["simulate", *SMALL, *engines, *arguments]) == 0
    waits, carries = sorted(path for path in root.iterdir() if path.is_dir())[::-1]
    return waits, carries


@contextmanager
def drawn(
    browser: Browser,
    path: Path,
    viewport: tuple[int, int] = DESKTOP,
    scheme: ColorScheme = "light",
) -> Generator[OpenPage]:
    """Return the page after all of its charts are drawn."""
    with opened(browser, path, viewport=viewport, color_scheme=scheme) as page:
        page.page.wait_for_selector(DRAWN, state="attached")
        yield page


def charts(page: OpenPage) -> int:
    return int(page.evaluate("document.querySelectorAll('.chart').length"))


def ink(page: OpenPage) -> str:
    """Return the colour of the page's text, and of a chart's axis."""
    both = """[document.body, document.querySelector('#utilization .xtitle')]
      .map((each) => getComputedStyle(each)).map((style, i) => i ? style.fill : style.color)"""
    return str(page.evaluate(both))


@IN_BOTH_THEMES
def test_a_report_is_drawn_whole(
    browser: Browser,
    folders: tuple[Path, Path],
    tmp_path: Path,
    viewport: tuple[int, int],
    scheme: ColorScheme,
):
    path, _ = write_report(folders[1], out=tmp_path / "report.html")
    with drawn(browser, path, viewport, scheme) as page:
        assert page.errors == []
        assert charts(page) == ONE_RUN
        assert page.evaluate(EMPTY) == []
        assert page.evaluate("document.querySelectorAll('.cards > div').length") == 6
        assert page.evaluate(NUMBERS) == [str(batch) for batch in range(1, 9)]
        # plotly hides a text by its style if it does not fit, and by the attribute for the rest.
        assert page.evaluate("document.querySelectorAll('.bartext[display=none]').length") == 0
        assert page.overflow() == 0


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_two_runs_side_by_side(
    browser: Browser, folders: tuple[Path, Path], tmp_path: Path, viewport: tuple[int, int]
):
    path, _ = write_report(*folders, out=tmp_path / "report.html")
    with drawn(browser, path, viewport) as page:
        assert page.errors == []
        assert charts(page) == TWO_RUNS
        assert page.evaluate(EMPTY) == []
        assert page.overflow() == 0
        verdicts = "[...document.querySelectorAll('.compare td:last-child')].map(e => e.className)"
        assert {"better", "worse", "same"} <= set(page.evaluate(verdicts))


@pytest.mark.parametrize("width", [360, 1400])
def test_no_column_of_two_runs_is_too_narrow_for_words(
    browser: Browser, folders: tuple[Path, Path], tmp_path: Path, width: int
):
    failing = hostile(folders[1], tmp_path / "failing")
    for number, runs in enumerate(((folders[0], failing), (failing, None))):
        path, _ = write_report(*runs, out=tmp_path / f"{number}.html")
        with drawn(browser, path, (width, 800)) as page:
            assert page.evaluate(LETTERS) == []
            assert page.overflow() == 0


def test_the_trainer_s_logprobs_are_drawn(
    browser: Browser, folders: tuple[Path, Path], tmp_path: Path
):
    engines = {"sim-0": 0.01, HOSTILE: 0.2}
    folder = with_reports(folders[1], tmp_path / "reported", engines=engines)
    path, _ = write_report(folder, out=tmp_path / "report.html")
    with drawn(browser, path, PHONE) as page:
        assert page.errors == []
        assert charts(page) == ONE_RUN + 3
        assert page.evaluate(EMPTY) == []
        assert page.overflow() == 0
        assert page.evaluate("window.hit === undefined")
        assert f"{HOSTILE} differs by" in page.page.inner_text("body")


async def _agents(folder: Path) -> None:
    """A run of sessions, one of which vanishes."""
    tokenizer = load_tokenizer(bytes_tokenizer(folder.parent / "tokenizer", parses=True))

    async def harness(session: Session, prompt: Prompt) -> None:
        messages: list[Any] = [{"role": "user", "content": "go"}]
        for _ in range(2):
            reply = await session.chat(messages)
            await asyncio.sleep(5.0)
            if not prompt.metadata["gone"]:
                prompt.metadata["gone"].append(session.id)
                raise MemberLost("its container is gone")
            messages += [dict(reply.message), {"role": "user", "content": "and?"}]

    async def judge(session: Session, prompt: Prompt) -> float:
        await asyncio.sleep(8.0)
        return 1.0

    sampling = SamplingParams(max_new_tokens=50, ignore_eos=True)
    config = SchedulerConfig(
        batch_groups=2, group_size=2, retries=Retries(member="again"), sampling=sampling
    )
    log = EventLog(folder / "events.jsonl", patient=True)
    RunFolder(folder).create(as_toml(RunSettings(batches=1, prompts="tasks", scheduler=config)))
    log.start()
    async with (
        Sessions(harness, tokenizer=tokenizer, reward=judge) as sessions,
        RolloutScheduler(
            SimFleet(1, vocab_size=132),
            [Prompt(input_ids=np.array([1]), metadata={"gone": []}) for _ in range(2)],
            episode=sessions,
            config=config,
            listeners=[log],
        ) as rollouts,
    ):
        await rollouts.next_batch()
    log.close()


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agents") / "run"
    with ThreadPoolExecutor(1) as pool:  # The browser's event loop is in this thread.
        pool.submit(lambda: run_virtual(_agents(folder))).result()
    return folder


@IN_BOTH_THEMES
def test_what_episodes_did_is_drawn_and_can_be_read(
    browser: Browser,
    agents: Path,
    tmp_path: Path,
    viewport: tuple[int, int],
    scheme: ColorScheme,
):
    path, _ = write_report(agents, out=tmp_path / "report.html")
    with drawn(browser, path, viewport, scheme) as page:
        assert page.errors == []
        assert charts(page) == ONE_RUN + 2
        assert {"rollout-time", "rewards"}.isdisjoint(page.evaluate(EMPTY))
        assert page.evaluate(LETTERS) == []
        assert page.overflow() == 0
        section = page.page.inner_text("section:has(#rollout-time)")
        assert "and is at its tools for" in section
        assert "lost, their group continues" in section
        inks = "[...document.querySelectorAll('#rollout-time .bartext')].map(e => e.style.fill)"
        assert set(page.evaluate(inks)) == {"rgb(0, 0, 0)", "rgb(255, 255, 255)"}


@pytest.mark.long
def test_the_theme_is_switched_in_page_and_charts(
    browser: Browser, folders: tuple[Path, Path], tmp_path: Path
):
    path, _ = write_report(folders[0], out=tmp_path / "report.html")
    with drawn(browser, path) as page:
        light = ink(page)
        page.page.click("#theme")
        dark = ink(page)
        assert dark != light
        page.page.click("#theme")
        assert ink(page) == light
        page.page.emulate_media(color_scheme="dark")
        assert ink(page) == light  # the reader's choice stays
    with drawn(browser, path) as page:
        page.page.emulate_media(color_scheme="dark")
        # The page gets an event of its own, and only then redraws its charts.
        ends = time.monotonic() + PATIENCE_S
        while ink(page) != dark and time.monotonic() < ends:
            page.page.wait_for_timeout(20)
        assert ink(page) == dark
        assert page.evaluate(EMPTY) == []
        assert page.errors == []


def test_the_figures_are_in_the_page(
    browser: Browser, folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
):
    assert main(["report", str(folders[0]), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    with drawn(browser, folders[0] / "report.html") as page:
        inside = page.evaluate("JSON.parse(document.getElementById('figures').textContent)")
    assert inside == printed
    assert printed["time"]["utilization"] > 0


def hostile(folder: Path, into: Path) -> Path:
    """A copy of the run in which names and causes contain markup."""
    into.mkdir()
    mark = json.dumps(HOSTILE)[1:-1]
    log = (folder / "events.jsonl").read_text().replace("sim-0", mark)
    log = log.replace('"cause":""', f'"cause":"{mark}"')
    log += json.dumps({"t": 1e6, "fact": "ControlCallFailed", "engine": HOSTILE, "call": "pause",
                       "cause": HOSTILE}) + "\n"  # fmt: skip
    log += json.dumps({"t": 1e6, "fact": "EngineLost", "engine": HOSTILE, "cause": HOSTILE,
                       "last": False}) + "\n"  # fmt: skip
    (into / "events.jsonl").write_text(log)
    config = (folder / "config.toml").read_text()
    config = re.sub(r"(?s)engine = \[.*?\]", f"engine = ['{HOSTILE}']", config, count=1)
    (into / "config.toml").write_text(f"prompts = '{HOSTILE}'\n{config}")
    summary = json.loads((folder / "summary.json").read_text())
    summary["error"] = HOSTILE
    (into / "summary.json").write_text(json.dumps(summary))
    return into


def test_markup_in_a_run_folder_is_inert(
    browser: Browser, folders: tuple[Path, Path], tmp_path: Path
):
    path, _ = write_report(hostile(folders[1], tmp_path / "<b>run<script>"))
    with drawn(browser, path) as page:
        assert page.errors == []
        assert page.evaluate("window.hit === undefined")
        assert page.evaluate("document.querySelectorAll('img').length") == 0
        assert page.evaluate("document.querySelectorAll('script').length") == 4
        assert HOSTILE in page.page.inner_text(".faults")
        assert "&lt;img src=x onerror" in page.page.inner_html("#engines .annotation-text")
        assert page.evaluate(EMPTY) == []


def test_a_foreign_script_would_not_run(
    browser: Browser, folders: tuple[Path, Path], tmp_path: Path
):
    path, _ = write_report(folders[0], out=tmp_path / "report.html")
    written = path.read_text(encoding="utf-8")
    path.write_text(
        written.replace("</main>", f"{HOSTILE}<img src='http://127.0.0.1:9/'></main>"),
        encoding="utf-8",
    )
    with drawn(browser, path) as page:
        assert page.evaluate("window.hit === undefined")
        assert any("Content Security Policy" in error for error in page.errors)


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_long_run_opens(browser: Browser, long_run: Path, viewport: tuple[int, int]):
    with drawn(browser, long_run, viewport) as page:
        assert page.errors == []
        assert page.evaluate(EMPTY) == []
        assert page.overflow() == 0
        print(f"opened in {page.evaluate('document.documentElement.dataset.drawn')} ms")


@pytest.fixture(scope="module", params=[30_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def long_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the report of a run whose log was cut after a number of lines."""
    folder = tmp_path_factory.mktemp("long")
    assert write_long_run(folder, request.param) >= request.param
    path, _ = write_report(folder)
    assert path.stat().st_size < 8_000_000
    return path
