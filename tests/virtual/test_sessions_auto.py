"""Tests automatic scheduling of sessions with slow tools: what it expects is what comes."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import numpy as np
import pytest

from aprilsched import (
    Prompt,
    RolloutScheduler,
    SamplingParams,
    SchedulerConfig,
    SimFleet,
    SimPublisher,
)
from aprilsched.agents.chat.tokenizer import load_tokenizer
from aprilsched.agents.sessions import Session, Sessions
from aprilsched.observe.figures.summary import Summary
from tests.support.tiny_tokenizer import bytes_tokenizer

TOOLS_S, TURNS = 5.0, 3
BATCHES = 15


@pytest.mark.long
@pytest.mark.virtual_time
async def test_the_forecast_of_sessions_with_slow_tools_is_close(tmp_path: Path):
    """Turns of about 150 tokens take less than the tools between them."""
    tokenizer = load_tokenizer(bytes_tokenizer(tmp_path / "tokenizer"))
    draw = np.random.default_rng(3)

    async def harness(session: Session, prompt: Prompt) -> float:
        text = "go"
        for turn in range(TURNS):
            if turn:
                await asyncio.sleep(TOOLS_S)
            length = int(min(600, draw.lognormal(5.0, 0.8))) + 1
            reply = await session.complete(text, max_tokens=length)
            text += reply.message["content"] + "more"
        return 1.0

    summary = Summary()
    config = SchedulerConfig(
        batch_groups=4,
        group_size=4,
        over_provision="auto",
        sampling=SamplingParams(max_new_tokens=600, ignore_eos=True),
    )
    prompts = (Prompt(input_ids=np.array([1])) for _ in itertools.count())
    async with (
        Sessions(harness, tokenizer=tokenizer) as sessions,
        RolloutScheduler(
            SimFleet(2, vocab_size=132), prompts, episode=sessions, config=config,
            listeners=[summary],
        ) as rollouts,
    ):  # fmt: skip
        for _ in range(BATCHES):
            await rollouts.next_batch()
            await asyncio.sleep(1.0)
            await rollouts.update_weights(SimPublisher())
    # The first ones come from the previous schedule, and a pool that is filling.
    seen = [batch.forecast for batch in summary.batches[BATCHES // 3 :]]
    received = [each for each in seen if each is not None]
    assert len(received) == len(seen)
    mean = sum(each.seconds for each in received) / len(received)
    expected = sum(each.seconds_forecast for each in received) / len(received)
    assert mean == pytest.approx(expected, rel=0.25)
    # More rollouts than a batch are in flight, because most of them are at their tools.
    assert received[-1].schedule.startswith("a pool of")
