"""Tests what one sees of sessions: in the live view, in the figures, and on the report's page."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from aprilsched import Prompt, RolloutScheduler, SamplingParams, SchedulerConfig, SimFleet
from aprilsched.agents.chat.tokenizer import load_tokenizer
from aprilsched.agents.sessions import Session, Sessions
from aprilsched.cli.runs.config_file import as_toml
from aprilsched.cli.runs.settings import RunSettings
from aprilsched.config import Retries
from aprilsched.errors import MemberLost
from aprilsched.observe.figures.figures import Figures
from aprilsched.observe.figures.live_figures import LiveFigures
from aprilsched.observe.figures.summary import Summary
from aprilsched.observe.figures.table import FIGURES, Moment, values_at
from aprilsched.observe.live import figure_texts, phases
from aprilsched.observe.log.run import read_run
from aprilsched.observe.log.run_folder import RunFolder
from aprilsched.observe.log.writing import EventLog
from aprilsched.observe.report.gather import run_report
from aprilsched.observe.report.page import page
from aprilsched.observe.report.time_charts import rollout_time
from tests.support.tiny_tokenizer import bytes_tokenizer

pytestmark = pytest.mark.virtual_time

TOOLS_S, JUDGE_S, TURNS, MEMBERS = 5.0, 20.0, 3, 4


async def harness(session: Session, prompt: Prompt) -> None:
    """Three turns with a tool after each of them. The first session vanishes."""
    messages = [{"role": "user", "content": "go"}]
    for _ in range(TURNS):
        reply = await session.chat(messages)
        await asyncio.sleep(TOOLS_S)
        messages += [dict(reply.message), {"role": "user", "content": "and?"}]
        if prompt.metadata["gone"].setdefault("first", session.id) == session.id:
            raise MemberLost("its container is gone")


async def judge(session: Session, prompt: Prompt) -> float:
    await asyncio.sleep(JUDGE_S)
    return 1.0


async def test_the_time_of_sessions_has_a_cause_everywhere(tmp_path: Path):
    tokenizer = load_tokenizer(bytes_tokenizer(tmp_path / "tokenizer", parses=True))
    folder = tmp_path / "run"
    log, summary = EventLog(folder / "events.jsonl", patient=True), Summary()
    figures = LiveFigures(meter=summary.meter, batch_units=1, clock=None)
    config = SchedulerConfig(
        batch_groups=1,
        group_size=MEMBERS,
        over_provision=1.0,
        retries=Retries(member="again"),
        sampling=SamplingParams(max_new_tokens=50, ignore_eos=True),
    )
    # As a folder of the command line, which runs no episodes itself.
    settings = RunSettings(batches=1, prompts=str(tmp_path / "tasks"), scheduler=config)
    RunFolder(folder).create(as_toml(settings))
    log.start()
    async with (
        Sessions(harness, tokenizer=tokenizer, reward=judge) as sessions,
        RolloutScheduler(
            SimFleet(1, vocab_size=132),
            [Prompt(input_ids=np.array([1]), metadata={"gone": {}})],
            episode=sessions,
            config=config,
            listeners=[log, summary, figures],
        ) as rollouts,
    ):
        waiting = asyncio.create_task(rollouts.next_batch())
        seen: set[str] = set()
        while not waiting.done():
            await asyncio.sleep(0.1)
            found = phases(figures)
            assert sum(found.values()) <= MEMBERS
            seen |= found.keys()
        assert {"decoding", "using tools", "scoring"} <= seen
        batch = await waiting
    log.close()

    (measured,) = summary.batches
    assert list(measured.turns) == [TURNS] * MEMBERS
    received = [each.info["session"] for each in batch.rollouts]
    assert measured.sessions == [(each["drift"], each["branches"]) for each in received]
    assert [each["turns"] for each in received] == [TURNS] * MEMBERS
    parts = measured.rollout_seconds
    assert parts["tools"] == pytest.approx(MEMBERS * TURNS * TOOLS_S)
    assert parts["score"] == pytest.approx(MEMBERS * JUDGE_S)
    # Three were launched at first, and one more to replace the lost member; it is not delivered.
    assert measured.seconds == pytest.approx(TOOLS_S + sum(parts.values()) / MEMBERS, rel=0.2)
    assert figures.recent[-1].figures.turns_mean == TURNS
    assert figures.recent[-1].figures.tool_share == parts["tools"] / sum(parts.values())
    received = {
        part for (part,) in values_at(FIGURES["batch/rollout_seconds"], Moment(figures=figures))
    }
    assert received == parts.keys()
    assert "turns 3.00" in figure_texts(Figures.over(figures.recent))

    assert read_run(folder).summary.rollout_seconds == pytest.approx(
        {part: spent / MEMBERS for part, spent in parts.items()}, abs=1e-4
    )
    report = run_report(folder)
    shares = [np.asarray(series.y) for series in rollout_time([report]).series]
    assert np.sum(shares, axis=0) == pytest.approx(1)
    text = page([report], library="")
    assert "What the episodes did" in text
    assert "lost, their group continues" in text


async def test_a_session_that_no_launcher_has_taken_is_seen(tmp_path: Path):
    tokenizer = load_tokenizer(bytes_tokenizer(tmp_path / "tokenizer"))
    figures = LiveFigures(clock=None)
    config = SchedulerConfig(batch_groups=1, group_size=2, over_provision=1.0)
    async with (
        Sessions(tokenizer=tokenizer) as sessions,
        RolloutScheduler(
            SimFleet(1, vocab_size=132),
            [Prompt(input_ids=np.array([1]))],
            episode=sessions,
            config=config,
            listeners=[figures],
        ) as rollouts,
    ):
        waiting = asyncio.create_task(rollouts.next_batch())
        await asyncio.sleep(1)
        assert phases(figures) == {"waiting for an agent": 2}
        first, second = await sessions.next(), await sessions.next()
        await asyncio.sleep(1)
        assert phases(figures) == {"using tools": 2}
        for session in (first, second):
            await session.complete([7, 8], max_tokens=5)
        first.done(later=True)
        second.done(1.0)
        await asyncio.sleep(1)
        assert phases(figures) == {"scoring": 1, "complete": 1}
        first.score(2.0)
        await waiting
