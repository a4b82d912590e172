"""Tests sessions without their address: messages become turns of a rollout, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched import (
    Prompt,
    Rollout,
    RolloutScheduler,
    SamplingParams,
    SchedulerConfig,
    SimFleet,
    SimPublisher,
    Turn,
)
from aprilsched.chat.tokenizer import ModelTokenizer, load_tokenizer
from aprilsched.config import Retries
from aprilsched.core.state.ledger import Reason
from aprilsched.errors import ConfigError, EpisodeError, MemberLost
from aprilsched.sessions import Limits, Session, Sessions
from aprilsched.types import NO_VERSION, Batch, Score
from tests.support.checking import Checking
from tests.support.tiny_tokenizer import bytes_tokenizer

pytestmark = pytest.mark.virtual_time

ASCII = 132
"""Tokens of the special ones and of bytes below 127, so that every text comes back as it was."""
END = 4
Drive = Callable[[Session, Prompt], Awaitable[Any]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    folder = bytes_tokenizer(tmp_path_factory.mktemp("bytes"), parses=True)
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [0, {END}]}}')
    return load_tokenizer(folder)


def prompts(count: int) -> list[Prompt]:
    ids = np.array([1, 2], dtype=np.int32)
    return [Prompt(input_ids=ids, metadata={"task": f"task {i}"}) for i in range(count)]


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def opened(
    sessions: Sessions | Callable[[Turn, Prompt], Awaitable[Any]],
    count: int = 2,
    *,
    tokens: int = 60,
    ignore_eos: bool = True,
    temperature: float = 0.0,
    **more: Any,
) -> RolloutScheduler:
    """A scheduler of embedded engines with its invariants checked."""
    checking = Checking()
    changes: dict[str, Any] = {"straggler": "abort", **more.pop("config", {})}
    config = SchedulerConfig(
        batch_groups=count,
        group_size=2,
        pace="asynchronous",
        over_provision=1.0,
        sampling=SamplingParams(
            max_new_tokens=tokens,
            ignore_eos=ignore_eos,
            temperature=temperature,
            stop_token_ids=() if ignore_eos else (0, END),
        ),
        **changes,
    )
    checking.scheduler = RolloutScheduler(
        more.pop("fleet", None)
        or SimFleet(2, stream_interval=4, vocab_size=ASCII, eos_token_id=END),
        prompts(count),
        episode=sessions,
        config=config,
        listeners=[checking],
        **more,
    )
    return checking.scheduler


async def batch_of(
    harness: Drive, tokenizer: ModelTokenizer, *, refits: int = 0, **more: Any
) -> Batch:
    options = {name: more.pop(name) for name in ("branches", "limits", "reward") if name in more}
    async with (
        Sessions(harness, tokenizer=tokenizer, **options) as sessions,
        opened(sessions, **more) as rollouts,
    ):
        for _ in range(refits):
            await asyncio.sleep(0.05)
            await rollouts.update_weights(SimPublisher())
        return await rollouts.next_batch()


async def three_turns(session: Session, prompt: Prompt) -> float:
    """A user asks three times; tools take their time."""
    messages = [said("system", "be brief"), said("user", prompt.metadata["task"])]
    for turn in range(3):
        reply = await session.chat(messages)
        messages += [reply.message, said("user", f"and {turn}?")]
        await asyncio.sleep(0.03)
    return 1.0


def as_coroutine(tokenizer: ModelTokenizer) -> Callable[[Turn, Prompt], Awaitable[float]]:
    """The same as `three_turns`, written by hand with tokens."""

    def text(*messages: tuple[str, str]) -> str:
        return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)

    begin = "<|im_start|>assistant\n"

    async def episode(turn: Turn, prompt: Prompt) -> float:
        first = text(("system", "be brief"), ("user", prompt.metadata["task"])) + begin
        context = tokenizer.encode(first, special=False)
        for number in range(3):
            output = await turn.generate(context)
            tail = "\n" if output.token_ids[-1] in (0, END) else "<|im_end|>\n"
            more = tail + text(("user", f"and {number}?")) + begin
            context = [*context, *output.token_ids.tolist(), *tokenizer.encode(more, special=False)]
            await asyncio.sleep(0.03)
        return 1.0

    return episode


def tokens_of(batch: Batch) -> list[tuple[list[int], list[int]]]:
    return sorted((r.prompt_ids.tolist(), r.token_ids.tolist()) for r in batch.rollouts)


@pytest.mark.parametrize("ends", [False, True], ids=["cut at the limit", "with an end"])
async def test_a_session_has_the_tokens_of_the_same_episode_written_as_a_coroutine(
    tokenizer: ModelTokenizer, ends: bool
):
    more: dict[str, Any] = {"ignore_eos": not ends, "tokens": 400 if ends else 60}
    batch = await batch_of(three_turns, tokenizer, **more)
    async with opened(as_coroutine(tokenizer), **more) as rollouts:
        expected = await rollouts.next_batch()
    assert tokens_of(batch) == tokens_of(expected)
    for rollout in batch.rollouts:
        assert (rollout.turns, rollout.reward) == (3, 1.0)
        assert rollout.branches == ()
        sampled = rollout.versions != NO_VERSION
        assert rollout.loss_mask.tolist() == sampled.tolist()


@pytest.mark.parametrize("straggler", ["retract", "in_place", "abort"])
async def test_a_refit_in_the_middle_of_an_answer_is_seen_in_its_versions_alone(
    tokenizer: ModelTokenizer, straggler: str
):
    async def harness(session: Session, prompt: Prompt) -> float:
        reply = await session.chat([said("user", "go on")])
        assert len(reply.output.token_ids) == 400
        return float(len(set(reply.output.versions.tolist())))

    config = {"straggler": straggler}
    batch = await batch_of(harness, tokenizer, refits=5, tokens=400, config=config)
    for rollout in batch.rollouts:
        assert rollout.reward is not None and rollout.reward >= 3
        assert rollout.versions_exact


async def two_agents(session: Session, prompt: Prompt) -> None:
    """A main agent asks a second one in between, compacts its history, and goes on with it."""
    main = [said("system", "main"), said("user", "begin")]
    for _ in range(2):
        main.append((await session.chat(main, max_tokens=20)).message)
        main.append(said("user", "on"))
        await session.chat([said("system", "helper"), said("user", "help")], max_tokens=50)
    short = [*main[:3], said("user", "in short")]
    await session.chat(short, max_tokens=5)


@pytest.mark.parametrize(
    ("rule", "sampled", "others"), [("last", 25, 120), ("longest", 50, 95), ("all", 145, 0)]
)
async def test_branches_of_a_session_are_kept_by_the_rule(
    tokenizer: ModelTokenizer, rule: Any, sampled: int, others: int
):
    async with (
        Sessions(two_agents, tokenizer=tokenizer, branches=rule) as sessions,
        opened(sessions, 1, tokens=100) as rollouts,
    ):
        batch = await rollouts.next_batch()
        ledger = rollouts.state.in_flight.ledger
    for rollout in batch.rollouts:
        kept = (rollout, *rollout.branches)
        assert sum(int(each.loss_mask.sum()) for each in kept) == sampled
        assert rollout.info["session"]["branches"] == 4
        if rule == "all":
            main, *_ = kept
            assert [int(each.loss_mask.sum()) for each in kept] == [40, 50, 50, 5]
            assert [each.shared for each in kept][0] == 0
            assert kept[3].shared >= 20
            assert kept[3].token_ids[:20].tolist() == main.token_ids[:20].tolist()
    assert ledger.tokens[Reason.OTHER_BRANCH] == 2 * others
