"""Tests sessions on a real server: each token of an agent is proven under the weights of its
version."""

# pyright: basic
# The client's types want messages as typed mappings.
from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI

from aprilsched import (
    Batch,
    DiskPublisher,
    Prompt,
    RolloutScheduler,
    SamplingParams,
    SchedulerConfig,
    SGLangFleet,
)
from aprilsched.agents.chat.tokenizer import load_tokenizer
from aprilsched.agents.sessions import Session, Sessions
from aprilsched.testing.contract import until
from aprilsched.types import NO_VERSION, Rollout
from tests.sglang.conftest import INTERVAL
from tests.sglang.helpers import batch_through_updates, reset
from tests.sglang.recorded import TOLERANCE, sequence_scores, try_until
from tests.sglang.server import CpuServer
from tests.support.harnesses import HARNESSES
from tests.support.tiny_tokenizer import (
    TEMPLATE_TOOLS_FIRST,
    WORDS,
    bytes_tokenizer,
    calling_tokenizer,
)

pytestmark = pytest.mark.long
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


@pytest.mark.shows("sessions and agents", engine="SGLang")
async def test_an_agent_s_tokens_are_those_of_their_versions(
    clean_server: CpuServer, models: tuple[Path, Path], tmp_path: Path
):
    folder = bytes_tokenizer(tmp_path / "tokenizer", parses=True)
    config = SchedulerConfig(
        batch_groups=2,
        group_size=2,
        over_provision=1.0,
        pace="asynchronous",
        sampling=SamplingParams(max_new_tokens=TOKENS, ignore_eos=True),
    )
    ids = np.array([5, 6], dtype=np.int32)
    prompts = [Prompt(input_ids=ids, metadata={"task": f"task {i}"}) for i in range(2)]

    async def once(number: int) -> Batch:
        await reset(clean_server.url, models[0])
        turns = iter((1, 0, 1))

        def save(to: Path) -> None:
            shutil.copytree(models[next(turns)], to, dirs_exist_ok=True)

        fleet = SGLangFleet([clean_server.url], stream_interval=INTERVAL)
        async with (
            Sessions(agent, tokenizer=folder, branches="all") as sessions,
            RolloutScheduler(fleet, prompts, episode=sessions, config=config) as rollouts,
        ):
            publisher = DiskPublisher(tmp_path / f"weights-{number}", save=save)
            batch = await batch_through_updates(rollouts, publisher)
            counters = rollouts.state.in_flight.counters
            assert counters.tokens_generated == counters.tokens_delivered == 4 * 6 * TOKENS
            return batch

    def sequences_of(batch: Batch) -> list[Rollout]:
        return [each for rollout in batch.rollouts for each in (rollout, *rollout.branches)]

    def of_three_versions(batch: Batch) -> bool:
        versions = {v for each in sequences_of(batch) for v in each.versions.tolist()}
        return len(versions - {NO_VERSION}) >= 3

    batch = await try_until(once, of_three_versions, "no three versions sampled tokens")
    sequences = sequences_of(batch)
    assert len(sequences) == 8
    assert {rollout.reward for rollout in batch.rollouts} == {6.0 * TOKENS}
    assert {int(each.loss_mask.sum()) for each in sequences} == {3 * TOKENS}
    proven_versions(sequences, models, tmp_path)


def proven_versions(
    sequences: Sequence[Rollout], models: tuple[Path, Path], folder: Path
) -> set[int]:
    """The versions of some sequences, whose tokens have the logprobs of the weights of these."""
    received = [(each.prompt_ids, each.token_ids) for each in sequences]
    found = sequence_scores(models, received, folder)
    versions: set[int] = set()
    for index, each in enumerate(sequences):
        sampled = np.flatnonzero(each.versions != NO_VERSION)
        assert each.versions_exact
        own = each.versions[sampled] % 2
        both = np.stack([scores[index][sampled] for scores in found])
        columns = np.arange(len(sampled))
        assert np.abs(both[own, columns] - each.logprobs[sampled]).max() < TOLERANCE
        assert np.median(np.abs(both[1 - own, columns] - each.logprobs[sampled])) > 0.5
        versions |= set(each.versions[sampled].tolist())
    return versions


@pytest.mark.shows("sessions and agents", engine="SGLang")
async def test_frameworks_call_the_tools_of_a_random_policy(
    clean_server: CpuServer, models: tuple[Path, Path], tmp_path: Path
):
    folder = calling_tokenizer(tmp_path / "tokenizer", every=2, chat_template=TEMPLATE_TOOLS_FIRST)
    tokenizer = load_tokenizer(folder)
    refitted = asyncio.Event()
    looking: set[str] = set()
    ended: set[str] = set()

    async def harness(session: Session, prompt: Prompt) -> None:
        async def look(where: str, days: int) -> str:
            """Look at the weather."""
            assert (where, days % 2) == ("Zürich", 0)
            looking.add(session.id)
            await refitted.wait()
            return "rain"

        run = HARNESSES[session.index]
        # Padding has no embedding: after a prompt of nothing else the first token has the same
        # probability under any weights, which a rollout of one token cannot tell apart.
        go, stream = "go <bos>", prompt.metadata["stream"]
        await run(session, go, [look], stream=stream, requests=4)
        ended.add(session.id)

    config = SchedulerConfig(
        batch_groups=2,
        group_size=len(HARNESSES),
        over_provision=1.0,
        pace="asynchronous",
        # Every second token is a call. Anthropic's runner obeys no answer that is cut short.
        sampling=SamplingParams(max_new_tokens=200, stop_token_ids=tuple(range(5, WORDS, 50))),
    )
    ids = np.array([5, 6], dtype=np.int32)
    prompts = [Prompt(input_ids=ids, metadata={"stream": each}) for each in (False, True)]

    def save(to: Path) -> None:
        shutil.copytree(models[1], to, dirs_exist_ok=True)

    async with (
        Sessions(harness, tokenizer=tokenizer) as sessions,
        RolloutScheduler(
            SGLangFleet([clean_server.url], stream_interval=INTERVAL),
            prompts,
            episode=sessions,
            config=config,
        ) as rollouts,
    ):
        waiting = asyncio.ensure_future(rollouts.next_batch())
        publisher = DiskPublisher(tmp_path / "weights", save=save)
        await until(lambda: len(looking | ended) == 4)
        await rollouts.update_weights(publisher)
        refitted.set()
        batch = await waiting
        assert rollouts.state.in_flight.ledger.total == 0
    assert proven_versions(list(batch.rollouts), models, tmp_path) == {0, 1}
    assert looking
    straight = [r for r in batch.rollouts if r.info["session"]["branches"] == 1]
    assert straight, "pydantic-ai asks again after an empty answer, which starts a branch"
    for rollout in straight:
        sampled = rollout.versions != NO_VERSION
        assert rollout.loss_mask.tolist() == sampled.tolist()
        first, *others = np.split(rollout.token_ids, np.flatnonzero(np.diff(sampled)) + 1)
        assert (rollout.versions[sampled] == 0).sum() == len(first)
        answers = [first, *others[1::2]]
        assert len(answers) == rollout.turns
        # Between two answers is one result for each call of a tool.
        for answer, between in zip(answers, others[0::2], strict=False):
            calls = int(((answer >= 5) & (answer % 2 == 0)).sum())
            results = "<|im_start|>tool\nrain<|im_end|>\n" * calls
            by_hand = f"<|im_end|>\n{results}<|im_start|>assistant\n"
            assert between.tolist() == tokenizer.encode(by_hand, special=False)
