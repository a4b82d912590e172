"""Tests sessions on a real server: each token of an agent is proven under the weights of its
version."""

# pyright: basic
# The client's types want messages as typed mappings.
from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from openai import AsyncOpenAI

from aprilsched import (
    DiskPublisher,
    Prompt,
    RolloutScheduler,
    SamplingParams,
    SchedulerConfig,
    SGLangFleet,
)
from aprilsched.sessions import Session, Sessions
from aprilsched.testing.contract import until
from aprilsched.types import NO_VERSION
from tests.sglang.conftest import INTERVAL
from tests.sglang.recorded import TOLERANCE, sequence_scores
from tests.sglang.server import CpuServer
from tests.support.tiny_tokenizer import bytes_tokenizer

TOKENS = 150


async def agent(session: Session, prompt: Prompt) -> float:
    """Two agents take turns by OpenAI's client, one of them by streams."""
    contexts: list[Any] = [
        [{"role": "user", "content": prompt.metadata["task"]}],
        [{"role": "system", "content": "help"}],
    ]
    async with AsyncOpenAI(base_url=session.url, api_key=session.key, max_retries=0) as client:
        for _ in range(3):
            for number, messages in enumerate(contexts):
                asked: dict[str, Any] = {"model": "any", "messages": messages}
                if number:
                    stream = await client.chat.completions.create(**asked, stream=True)
                    parts = [event.choices[0].delta.content or "" async for event in stream]
                    text = "".join(parts)
                else:
                    answer = await client.chat.completions.create(**asked)
                    text = answer.choices[0].message.content or ""
                messages += [
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": "and now?"},
                ]
    return float(session.tokens)


async def test_an_agent_s_tokens_are_those_of_their_versions(
    clean_server: CpuServer, models: tuple[Path, Path], tmp_path: Path
):
    folder = bytes_tokenizer(tmp_path / "tokenizer", parses=True)
    fleet = SGLangFleet([clean_server.url], stream_interval=INTERVAL)
    config = SchedulerConfig(
        batch_groups=2,
        group_size=2,
        over_provision=1.0,
        pace="asynchronous",
        sampling=SamplingParams(max_new_tokens=TOKENS, ignore_eos=True),
    )
    ids = np.array([5, 6], dtype=np.int32)
    prompts = [Prompt(input_ids=ids, metadata={"task": f"task {i}"}) for i in range(2)]
    turns = iter((1, 0, 1))

    def save(to: Path) -> None:
        shutil.copytree(models[next(turns)], to, dirs_exist_ok=True)

    async with (
        Sessions(agent, tokenizer=folder, branches="all") as sessions,
        RolloutScheduler(fleet, prompts, episode=sessions, config=config) as rollouts,
    ):
        waiting = asyncio.ensure_future(rollouts.next_batch())
        counters = rollouts.state.in_flight.counters
        for _ in range(3):
            before = counters.tokens_generated
            await until(lambda before=before: counters.tokens_generated > before + 400, seconds=120)
            await rollouts.update_weights(DiskPublisher(tmp_path / "weights", save=save))
        batch = await waiting
        assert rollouts.state.in_flight.ledger.total == 0
        assert counters.tokens_generated == counters.tokens_delivered == 4 * 6 * TOKENS
    sequences = [each for r in batch.rollouts for each in (r, *r.branches)]
    assert len(sequences) == 8
    assert {rollout.reward for rollout in batch.rollouts} == {6.0 * TOKENS}
    told = [(each.prompt_ids, each.token_ids) for each in sequences]
    found = sequence_scores(models, told, tmp_path)
    versions: set[int] = set()
    for index, each in enumerate(sequences):
        sampled = np.flatnonzero(each.versions != NO_VERSION)
        assert len(sampled) == 3 * TOKENS
        assert each.versions_exact
        own = each.versions[sampled] % 2
        both = np.stack([scores[index][sampled] for scores in found])
        wrong = np.abs(both[own, np.arange(len(sampled))] - each.logprobs[sampled])
        assert wrong.max() < TOLERANCE
        assert (
            np.median(np.abs(both[1 - own, np.arange(len(sampled))] - each.logprobs[sampled])) > 0.5
        )
        versions |= set(each.versions[sampled].tolist())
    assert len(versions) >= 3
