"""Tests sessions without their address: messages become turns of a rollout, and its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched import (
    Prompt,
    RolloutScheduler,
    SamplingParams,
    SchedulerConfig,
    SimFleet,
    SimPublisher,
    SqliteStore,
    Turn,
)
from aprilsched.agents.chat.tokenizer import ModelTokenizer, load_tokenizer
from aprilsched.agents.serving.refusals import Unavailable
from aprilsched.agents.sessions import Limits, Session, Sessions
from aprilsched.config import Health, Retries
from aprilsched.errors import ConfigError, EpisodeError, RunGivenUp, TurnRefused
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.core.state.saved import Snapshot
from aprilsched.testing.contract import until
from aprilsched.types import NO_VERSION, Batch, Score
from tests.campaign.agents import left_behind
from tests.support.checking import Checking
from tests.support.tiny_tokenizer import bytes_tokenizer

pytestmark = pytest.mark.virtual_time

_OPTIONS = ("branches", "limits", "remote_images", "reward", "secret")

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


def by(role: str, content: str) -> Any:
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
    changes: dict[str, Any] = {"straggler": "abort", "group_size": 2, **more.pop("config", {})}
    config = SchedulerConfig(
        batch_groups=count,
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


@asynccontextmanager
async def running(
    tokenizer: ModelTokenizer, harness: Drive | None = None, **more: Any
) -> AsyncGenerator[tuple[Sessions, RolloutScheduler]]:
    """Sessions and their scheduler, with the options of both."""
    options = {name: more.pop(name) for name in _OPTIONS if name in more}
    async with (
        Sessions(harness, tokenizer=tokenizer, **options) as sessions,
        opened(sessions, **more) as rollouts,
    ):
        yield sessions, rollouts


async def batch_of(
    harness: Drive, tokenizer: ModelTokenizer, *, refits: int = 0, **more: Any
) -> Batch:
    async with running(tokenizer, harness, **more) as (_, rollouts):
        for _ in range(refits):
            await asyncio.sleep(0.05)
            await rollouts.update_weights(SimPublisher())
        return await rollouts.next_batch()


async def three_turns(session: Session, prompt: Prompt) -> float:
    """A user asks three times; tools take their time."""
    messages = [by("system", "be brief"), by("user", prompt.metadata["task"])]
    for turn in range(3):
        reply = await session.chat(messages)
        messages += [reply.message, by("user", f"and {turn}?")]
        await asyncio.sleep(0.03)
    return 1.0


def as_coroutine(tokenizer: ModelTokenizer) -> Callable[[Turn, Prompt], Awaitable[float]]:
    """The same as `three_turns`, written by hand with tokens."""

    def text(*messages: tuple[str, str]) -> str:
        return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)

    start = "<|im_start|>assistant\n"

    async def episode(turn: Turn, prompt: Prompt) -> float:
        first = text(("system", "be brief"), ("user", prompt.metadata["task"])) + start
        context = tokenizer.encode(first, special=False)
        for number in range(3):
            output = await turn.generate(context)
            tail = "\n" if output.token_ids[-1] in (0, END) else "<|im_end|>\n"
            more = tail + text(("user", f"and {number}?")) + start
            context = [*context, *output.token_ids.tolist(), *tokenizer.encode(more, special=False)]
            await asyncio.sleep(0.03)
        return 1.0

    return episode


def tokens_of(batch: Batch) -> list[tuple[list[int], list[int]]]:
    return sorted((r.prompt_ids.tolist(), r.token_ids.tolist()) for r in batch.rollouts)


@pytest.mark.parametrize("ends", [False, True], ids=["cut at the limit", "with an end"])
async def test_a_session_has_the_tokens_of_an_equal_coroutine(
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
async def test_a_refit_inside_an_answer_shows_only_in_its_versions(
    tokenizer: ModelTokenizer, straggler: str
):
    async def harness(session: Session, prompt: Prompt) -> float:
        reply = await session.chat([by("user", "go on")])
        assert len(reply.output.token_ids) == 400
        return float(len(set(reply.output.versions.tolist())))

    config = {"straggler": straggler}
    batch = await batch_of(harness, tokenizer, refits=5, tokens=400, config=config)
    for rollout in batch.rollouts:
        assert (rollout.reward or 0.0) >= 3
        assert rollout.versions_exact


async def two_agents(session: Session, prompt: Prompt) -> None:
    """A main agent calls a second one, compacts its history, and continues with it."""
    main = [by("system", "main"), by("user", "begin")]
    for _ in range(2):
        main.append((await session.chat(main, max_tokens=20)).message)
        main.append(by("user", "on"))
        await session.chat([by("system", "helper"), by("user", "help")], max_tokens=50)
    short = [*main[:3], by("user", "in short")]
    await session.chat(short, max_tokens=5)


@pytest.mark.parametrize(
    ("rule", "sampled", "others", "delivery"),
    [
        ("last", 25, 120, "groups"),
        ("longest", 50, 95, "groups"),
        ("all", 145, 0, "groups"),
        ("all", 145, 0, "samples"),
    ],
)
async def test_branches_of_a_session_are_kept_by_the_rule(
    tokenizer: ModelTokenizer, rule: Any, sampled: int, others: int, delivery: str
):
    more: Any = {"branches": rule, "count": 1, "tokens": 100, "config": {"delivery": delivery}}
    async with running(tokenizer, two_agents, **more) as (_, rollouts):
        batch = await rollouts.next_batch()
        ledger = rollouts.state.in_flight.ledger
    for rollout in batch.rollouts:
        kept = (rollout, *rollout.branches)
        assert sum(int(each.loss_mask.sum()) for each in kept) == sampled
        assert rollout.info["session"]["branches"] == 4
        if rule == "all":
            main, *_ = kept
            assert [int(each.loss_mask.sum()) for each in kept] == [40, 50, 50, 5]
            assert main.shared == 0
            assert kept[3].shared >= 20
            assert kept[3].token_ids[:20].tolist() == main.token_ids[:20].tolist()
    assert ledger.tokens[Reason.OTHER_BRANCH] == 2 * others


# --- how they end --------------------------------------------------------------------------------


async def launched(
    act: Callable[[Session, int], Awaitable[None]],
    tokenizer: ModelTokenizer,
    *,
    limits: Limits | None = None,
    **more: Any,
) -> tuple[Batch, RolloutScheduler]:
    """Return a batch whose sessions a launcher takes and passes to `act`."""
    async with running(tokenizer, limits=limits, count=1, **more) as (sessions, rollouts):

        async def launcher() -> None:
            for number in range(100):
                session = await sessions.next()
                acting.add(asyncio.ensure_future(act(session, number)))

        acting: set[asyncio.Future[None]] = set()
        acting.add(asyncio.ensure_future(launcher()))
        try:
            return await rollouts.next_batch(), rollouts
        finally:
            for task in acting:
                task.cancel()


async def asks_once(session: Session) -> None:
    await session.chat([by("user", "go")], max_tokens=5)


@pytest.mark.parametrize(
    ("end", "delivery"),
    [
        ("lost", "groups"),
        ("vanishes", "groups"),
        ("too slow", "groups"),
        ("no score", "groups"),
        ("vanishes", "samples"),
    ],
)
async def test_a_harness_that_is_gone_costs_one_member(
    tokenizer: ModelTokenizer, end: str, delivery: str
):
    torn: list[int] = []

    async def act(session: Session, number: int) -> None:
        session.on_end(lambda: torn.append(number))
        await asks_once(session)
        if number:
            session.done(Score(reward=float(number)))
        elif end == "lost":
            session.lost("its container is gone")
        elif end == "too slow":
            while not session.over:
                await asks_once(session)
                await asyncio.sleep(5)
        elif end == "no score":
            session.done(later=True)

    limits = Limits(idle_s=20, time_s=60, score_s=30)
    config = {"delivery": delivery}
    batch, rollouts = await launched(act, tokenizer, limits=limits, config=config)
    assert sorted(r.reward or 0.0 for r in batch.rollouts) == [1.0, 2.0]
    ledger = rollouts.state.in_flight.ledger
    assert ledger.rollouts == {Reason.MEMBER_LOST: 1}
    (entry,) = ledger.entries
    reports = {"lost": "container", "vanishes": "asked for nothing", "too slow": "not ended"}
    assert reports.get(end, "score has not come") in entry.cause
    assert sorted(torn) == [0, 1, 2]


async def test_a_harness_that_fails_drops_its_group(tokenizer: ModelTokenizer):
    config = {"retries": Retries(failed_groups=10)}
    async with running(tokenizer, count=2, config=config) as (sessions, rollouts):
        taken = [await sessions.next() for _ in range(4)]
        for session in taken:
            await asks_once(session)
        taken[0].failed("it has a bug")
        await asyncio.sleep(0)
        with pytest.raises(EpisodeError, match="has ended"):
            await asks_once(taken[0])
        for session in taken:
            session.done(1.0)
        batch = await rollouts.next_batch()
    assert len(batch.groups) == 1
    reasons = {e.reason for e in rollouts.state.in_flight.ledger.entries}
    assert reasons == {Reason.EPISODE_FAILED, Reason.SIBLING_FAILED}


async def test_a_score_may_come_an_hour_later(tokenizer: ModelTokenizer):
    async def act(session: Session, number: int) -> None:
        await asks_once(session)
        session.done(later=True)
        with pytest.raises(EpisodeError, match="has ended"):
            await asks_once(session)
        await asyncio.sleep(3600)
        session.score(Score(reward=0.25, parts={"judge": 0.5}))
        session.score(9.0)

    batch, _ = await launched(act, tokenizer)
    for rollout in batch.rollouts:
        assert (rollout.reward, dict(rollout.reward_parts)) == (0.25, {"judge": 0.5})


async def test_a_judge_sees_the_messages(tokenizer: ModelTokenizer):
    seen: list[list[str]] = []

    async def harness(session: Session, prompt: Prompt) -> None:
        await three_turns(session, prompt)

    async def judge(session: Session, prompt: Prompt) -> float:
        seen.append([message["role"] for message in session.messages])
        assert session.messages[1]["content"] == prompt.metadata["task"]
        assert (session.turns, session.tokens) == (3, 180)
        return 0.75

    batch = await batch_of(harness, tokenizer, reward=judge)
    assert seen == [["system", "user", *["assistant", "user"] * 2, "assistant"]] * 4
    assert {rollout.reward for rollout in batch.rollouts} == {0.75}


async def test_what_a_session_may_take_is_bounded(tokenizer: ModelTokenizer):
    async def harness(session: Session, prompt: Prompt) -> float:
        said_so: set[str] = set()
        for number in range(1000):
            try:
                await session.chat([by("user", f"another {number}")], max_tokens=1)
            except ConfigError as error:
                said_so.add(str(error))
        assert session.turns == 8
        (sentence,) = said_so
        assert "8 branches" in sentence
        messages = session.messages
        await session.chat([*messages, by("user", "on")], max_tokens=1)
        # The last answer is cut short and uses up the token limit.
        reply = await session.chat([*session.messages, by("user", "on")], max_tokens=50)
        assert len(reply.output.token_ids) == 3
        with pytest.raises(ConfigError, match="has had its"):
            await session.chat([*session.messages, by("user", "on")])
        return 1.0

    limits = Limits(branches=8, turns=10, tokens=12)
    batch = await batch_of(harness, tokenizer, limits=limits, count=1)
    assert all(rollout.reward == 1.0 for rollout in batch.rollouts)


async def test_requests_of_a_session_are_answered_in_their_order(tokenizer: ModelTokenizer):
    async def harness(session: Session, prompt: Prompt) -> float:
        answered: list[int] = []

        async def ask(number: int) -> None:
            await session.chat([by("user", f"number {number}")], max_tokens=30)
            answered.append(number)

        async with asyncio.TaskGroup() as tasks:
            for number in range(5):
                tasks.create_task(ask(number))
        assert answered == [0, 1, 2, 3, 4]
        # A client that leaves before or during generation takes no tokens from others.
        leaving = asyncio.ensure_future(ask(5))
        staying = asyncio.ensure_future(ask(6))
        await asyncio.sleep(0.05)
        leaving.cancel()
        await staying
        assert answered[-1] == 6
        return 1.0

    batch = await batch_of(harness, tokenizer, branches="all", count=1)
    for rollout in batch.rollouts:
        assert sum(int(e.loss_mask.sum()) for e in (rollout, *rollout.branches)) == 6 * 30


# --- durability ----------------------------------------------------------------------------------


async def main_and_helper(session: Session, prompt: Prompt) -> float:
    """Two alternating branches."""
    main, helper = [by("user", prompt.metadata["task"])], [by("system", "help")]
    for number in range(3):
        for messages in (main, helper):
            reply = await session.chat(messages)
            messages += [reply.message, by("user", f"and {number}?")]
            await asyncio.sleep(0.02)
    return 1.0


@pytest.mark.parametrize("harness", [three_turns, main_and_helper])
async def test_a_killed_coroutine_resumes_where_it_stopped(
    tokenizer: ModelTokenizer, tmp_path: Path, harness: Drive
):
    expected = tokens_of(await batch_of(harness, tokenizer, branches="all"))
    store = SqliteStore(tmp_path / "store", inline=True)
    copies: list[SqliteStore] = []
    async with running(
        tokenizer, harness, branches="all", store=store, config={"save_interval_s": 0.05}
    ) as (_, rollouts):
        waiting = asyncio.ensure_future(rollouts.next_batch())
        while not waiting.done():
            await asyncio.sleep(0.21)
            copies.append(left_behind(store, tmp_path / f"at-{len(copies)}"))
        assert tokens_of(waiting.result()) == expected
    assert len(copies) >= 3
    replayed = 0
    for killed in copies[:-1]:
        async with running(tokenizer, harness, branches="all", store=killed) as (_, rollouts):
            before = rollouts.state.in_flight.counters.tokens_generated
            batch = await rollouts.next_batch()
            counters = rollouts.state.in_flight.counters
            replayed += before
            assert not rollouts.state.in_flight.ledger.tokens
            sampled = sum(
                int((e.versions[e.shared :] != NO_VERSION).sum())
                for r in batch.rollouts
                for e in (r, *r.branches)
            )
            assert counters.tokens_generated == sampled, "nothing known was generated again"
        assert tokens_of(batch) == expected
    assert replayed > 0


class Outside:
    """An external harness: it keeps its messages, and retries on the same session."""

    def __init__(self, task: str) -> None:
        # A few-shot example, which no model sampled.
        self.messages = [
            by("user", "1 + 1?"),
            by("assistant", "2"),
            by("user", task),
        ]
        self.answers = 0

    async def step(self, session: Session, most: int | None = None) -> None:
        reply = await session.chat(self.messages, max_tokens=most)
        self.messages += [dict(reply.message), by("user", f"and {self.answers}?")]
        self.answers += 1


async def test_a_returning_harness_continues_and_a_lost_one_is_counted(
    tokenizer: ModelTokenizer, tmp_path: Path
):
    shared: Any = {"count": 1, "secret": tmp_path / "secret", "config": {"save_interval_s": 0.05}}
    store = SqliteStore(tmp_path / "store", inline=True)
    outside: dict[str, Outside] = {}
    keys: dict[str, str] = {}
    async with running(tokenizer, store=store, **shared) as (sessions, _):
        for _ in range(2):
            session = await sessions.next()
            keys[session.id] = session.key
            harness = outside[session.id] = Outside(session.prompt.metadata["task"])
            await harness.step(session)
            await harness.step(session)
        await asyncio.sleep(1)
        killed = left_behind(store, tmp_path / "killed")
    back, gone = outside
    shared["limits"] = Limits(idle_s=30)
    async with running(tokenizer, store=killed, **shared) as (sessions, rollouts):
        await asyncio.sleep(0.1)
        session, other = sessions.get(back), sessions.get(gone)
        assert session is not None
        assert other is not None
        assert (session.key, other.key) == (keys[back], keys[gone])
        before = rollouts.state.in_flight.counters.tokens_generated
        assert before == 4 * 60
        known = rollouts.state.in_flight.rollouts[int(back)].log.token_ids.tolist()
        await outside[back].step(session)
        assert session.turns == 3
        assert rollouts.state.in_flight.counters.tokens_generated == before + 60
        session.done(1.0)
        # A new session replaces the lost one, for a launcher.
        instead = await sessions.next()
        assert instead.id not in keys
        await Outside("anew").step(instead)
        instead.done(2.0)
        batch = await rollouts.next_batch()
        assert rollouts.state.in_flight.ledger.rollouts == {Reason.MEMBER_LOST: 1}
    first, second = sorted(batch.rollouts, key=lambda rollout: rollout.reward or 0.0)
    assert (first.turns, second.turns) == (3, 1)
    assert first.token_ids.tolist()[: len(known)] == known
    assert int(first.loss_mask.sum()) == 3 * 60


async def test_a_partly_saved_answer_is_text_after_a_restart(
    tokenizer: ModelTokenizer, tmp_path: Path
):
    config = {"group_size": 1, "save_interval_s": 0.01}
    shared: Any = {"count": 1, "secret": tmp_path / "secret", "config": config}
    store = SqliteStore(tmp_path / "store", inline=True)
    harness = Outside("task")
    async with running(tokenizer, store=store, **shared) as (sessions, rollouts):
        session = await sessions.next()
        await harness.step(session, 30)
        step = asyncio.ensure_future(harness.step(session, 30))
        while rollouts.state.in_flight.rollouts[int(session.id)].log.size < 60:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        killed = left_behind(store, tmp_path / "killed")
        await step
    async with running(tokenizer, store=killed, **shared) as (sessions, rollouts):
        await asyncio.sleep(0.1)
        session = sessions.get(session.id)
        assert session is not None
        before = rollouts.state.in_flight.counters.tokens_generated
        assert 30 < before < 60
        await harness.step(session, 30)
        session.done(1.0)
        batch = await rollouts.next_batch()
        assert rollouts.state.in_flight.counters.tokens_generated == before + 30
        assert rollouts.state.in_flight.ledger.tokens == {Reason.RESTARTED: before - 30}
    (rollout,) = batch.rollouts
    assert rollout.turns == 2
    assert int(rollout.loss_mask.sum()) == 60
    assert rollout.info["session"]["branches"] == 1


async def test_a_harness_reporting_after_a_kill_keeps_its_answers(
    tokenizer: ModelTokenizer, tmp_path: Path
):
    config = {"group_size": 1, "save_interval_s": 0.01}
    shared: Any = {"count": 1, "secret": tmp_path / "secret", "config": config, "branches": "all"}
    store = SqliteStore(tmp_path / "store", inline=True)
    async with running(tokenizer, store=store, **shared) as (sessions, rollouts):
        session = await sessions.next()
        for harness in (Outside("task"), Outside("another"), Outside("task")):
            await harness.step(session)
        await asyncio.sleep(0.1)
        killed = left_behind(store, tmp_path / "killed")
    async with running(tokenizer, store=killed, **shared) as (sessions, rollouts):
        await asyncio.sleep(0.1)
        session = sessions.get(session.id)
        assert session is not None
        session.done(1.0)
        batch = await rollouts.next_batch()
        assert not rollouts.state.in_flight.ledger.total
    (rollout,) = batch.rollouts
    assert rollout.turns == 3
    assert len(rollout.branches) == 2
    sequences = (rollout, *rollout.branches)
    assert sum([int(each.loss_mask.sum()) for each in sequences]) == 3 * 60


async def test_many_slow_sessions_survive_refits_and_dead_engines(
    tokenizer: ModelTokenizer,
):
    """No sampled token is lost, and every session has the tokens of its answers."""
    answered: dict[str, list[list[int]]] = {}

    async def harness(session: Session, prompt: Prompt) -> float:
        drawn = np.random.default_rng(int(session.id))
        kept = answered[session.id] = []
        contexts = [[by("user", prompt.metadata["task"])], [by("system", "help")]]
        for _ in range(int(drawn.integers(2, 20))):
            messages = contexts[int(drawn.random() < 0.2)]
            reply = await session.chat(messages, max_tokens=int(drawn.integers(1, 120)))
            kept.append(reply.output.token_ids.tolist())
            messages += [reply.message, by("user", "and?")]
            await asyncio.sleep(float(min(30, drawn.lognormal(-1, 1.5))))
        return float(session.tokens)

    fleet = SimFleet(3, stream_interval=4, vocab_size=ASCII)
    config = {"health": Health(stall_s=60), "max_staleness": None}
    more: Any = {"tokens": 200, "temperature": 1.0, "config": config}
    async with running(tokenizer, harness, branches="all", count=12, fleet=fleet, **more) as (
        _,
        rollouts,
    ):
        waiting = asyncio.ensure_future(rollouts.next_batch())
        for step in range(10):
            await asyncio.sleep(0.4)
            if step in (3, 6):
                fleet.engines[step % 2].crash()
            await rollouts.update_weights(SimPublisher())
        batch = await waiting
        in_flight = rollouts.state.in_flight
        assert in_flight.counters.retries > 0
        assert in_flight.counters.tokens_generated == in_flight.counters.tokens_delivered
        assert in_flight.ledger.total == 0
    several = 0
    for rollout in batch.rollouts:
        sequences = (rollout, *rollout.branches)
        several += len(set(np.concatenate([e.versions for e in sequences]).tolist())) > 2
        sampled = [each.token_ids[each.loss_mask].tolist() for each in sequences]
        assert sum(map(len, sampled)) == rollout.reward
        outputs = answered[str(rollout.rollout_id)]
        assert sorted(i for ids in sampled for i in ids) == sorted(i for o in outputs for i in o)
        assert rollout.versions_exact
    assert several > 8


@pytest.mark.parametrize("answers", [0, 1, 2])
async def test_what_a_launcher_has_seen_survives_a_kill(
    tokenizer: ModelTokenizer, tmp_path: Path, answers: int
):
    config = {"group_size": 1, "save_interval_s": 3600.0}
    shared: Any = {"count": 1, "secret": tmp_path / "secret", "config": config}
    store = SqliteStore(tmp_path / "store", inline=True)
    async with running(tokenizer, store=store, **shared) as (sessions, rollouts):
        session = await sessions.next()
        harness = Outside("task")
        for _ in range(answers):
            await harness.step(session)
        killed = left_behind(store, tmp_path / "killed")
        session.done(1.0)
        await session.recorded()
        reported = left_behind(store, tmp_path / "reported")
    async with running(tokenizer, store=killed, **shared) as (sessions, rollouts):
        if answers:
            await until(lambda: sessions.get(session.id) is not None)
            again = sessions.get(session.id)
        else:
            again = await sessions.next()
        assert again is not None
        assert (again.id, again.prompt.metadata) == (session.id, session.prompt.metadata)
        before = rollouts.state.in_flight.counters.tokens_generated
        assert before == 60 * answers
        await harness.step(again)
        again.done(1.0)
        (rollout,) = (await rollouts.next_batch()).rollouts
    assert (rollout.turns, int(rollout.loss_mask.sum())) == (answers + 1, 60 * (answers + 1))
    if answers:
        async with running(tokenizer, store=reported, **shared) as (_, rollouts):
            (rollout,) = (await rollouts.next_batch()).rollouts
        assert (rollout.turns, rollout.reward) == (answers, 1.0)


async def test_answers_that_wait_for_the_store_share_its_saves(
    tokenizer: ModelTokenizer, tmp_path: Path
):
    store = SlowStore(tmp_path / "store")
    more: Any = {"store": store, "config": {"save_interval_s": 3600.0}}
    async with running(tokenizer, count=8, **more) as (sessions, rollouts):
        taken = await asyncio.gather(*(sessions.next() for _ in range(16)))
        before = store.saves
        await asyncio.gather(*(asks_once(session) for session in taken))
        assert store.saves - before < 8
        # The answer is lost with a client that leaves during its save, and is not repeated to the
        # next one.
        store.let.clear()
        leaving = asyncio.ensure_future(asks_once(taken[0]))
        in_flight = rollouts.state.in_flight
        await until(lambda: len(in_flight.rollouts[int(taken[0].id)].answered) == 2)
        leaving.cancel()
        await asyncio.sleep(0.1)
        store.let.set()
        await asks_once(taken[0])
        for session in taken:
            session.done(1.0)
        await rollouts.next_batch()
    assert [session.turns for session in taken] == [2] + [1] * 15
    assert in_flight.ledger.tokens[Reason.WITHDRAWN] == 5


class SlowStore(SqliteStore):
    """Writes in a thread, and only while `let` is set."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.saves = 0
        self.let = threading.Event()
        self.let.set()

    def save(self, snapshot: Snapshot, *, durable: bool) -> None:
        assert self.let.wait(60)
        self.saves += 1
        super().save(snapshot, durable=durable)


# --- what is refused -----------------------------------------------------------------------------


def small() -> SimFleet:
    """Engines that refuse a context of more than 500 tokens."""
    return SimFleet(2, kv_tokens=500, vocab_size=ASCII, eos_token_id=END)


async def test_a_refused_request_costs_one_answer(tokenizer: ModelTokenizer):
    causes: list[str] = []

    async def harness(session: Session, prompt: Prompt) -> float:
        messages = [by("user", "go")]
        reply = await session.chat(messages)
        messages.append(dict(reply.message))
        if session.index == 1:
            with pytest.raises(TurnRefused, match="need 7") as refused:
                await session.chat([*messages, by("user", "x" * 600)])
            causes.append(str(refused.value))
        await session.chat([*messages, by("user", "on")])
        return float(session.index)

    async with running(tokenizer, harness, fleet=small()) as (_, rollouts):
        batch = await rollouts.next_batch()
        evaluated = await rollouts.evaluate(prompts(1), group_size=2)
        counters = rollouts.state.in_flight.counters
        assert counters.turns_refused == len(causes) == 3
        assert not rollouts.state.in_flight.ledger.total
    for rollout in (*batch.rollouts, *evaluated.rollouts):
        assert (rollout.turns, int(rollout.loss_mask.sum())) == (2, 120)
    assert len(set(causes)) == 1, "causes of one kind are counted together"


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("catches", [True, False])
async def test_a_member_that_a_refusal_ends_costs_no_group(
    tokenizer: ModelTokenizer, first: bool, catches: bool
):
    async def harness(session: Session, prompt: Prompt) -> float:
        if session.index or not first:
            await session.chat([by("user", "go")])
        if not session.index:
            try:
                await session.chat([by("user", "x" * 600)])
            except TurnRefused as error:
                if not catches:
                    raise RuntimeError("the agent gives up") from error
        return 1.0

    config = {"group_size": 3, "retries": Retries(member="shrink")}
    async with running(tokenizer, harness, fleet=small(), config=config) as (_, rollouts):
        batch = await rollouts.next_batch()
        ledger = rollouts.state.in_flight.ledger
    kept = catches and not first
    assert [len(group.rollouts) for group in batch.groups] == [3 if kept else 2] * 2
    assert ledger.rollouts == ({} if kept else {Reason.MEMBER_LOST: 2})


async def test_a_fleet_that_refuses_everything_ends_the_run(tokenizer: ModelTokenizer):
    async def harness(session: Session, prompt: Prompt) -> float:
        with pytest.raises(TurnRefused):
            await session.chat([by("user", "x" * 600)])
        return 0.0

    config = {"retries": Retries(failed_groups=2)}
    async with running(tokenizer, harness, count=4, fleet=small(), config=config) as (_, rollouts):
        with pytest.raises(RunGivenUp, match=r"the engine refuses this request.*need 679"):
            await rollouts.next_batch()


@pytest.mark.parametrize("remote", [False, True])
async def test_engines_fetch_images_only_if_they_may(tokenizer: ModelTokenizer, remote: bool):
    heard: set[str] = set()

    async def harness(session: Session, prompt: Prompt) -> float:
        for url in ("http://169.254.169.254/latest", "data:image/png;base64,AA==", "/etc/passwd"):
            picture = {"type": "image_url", "image_url": {"url": url}}
            try:
                await session.chat([{"role": "user", "content": [picture]}], max_tokens=5)
            except ConfigError as error:
                heard.add(str(error)[:62])
        await asks_once(session)
        return 1.0

    await batch_of(harness, tokenizer, remote_images=remote)
    no_url = "an image is not a URL that starts with data:, http: or https:;"
    no_data = "the URL of an image must start with data:, got 'http://169.254"
    assert heard == ({no_url} if remote else {no_url, no_data})


async def test_more_requests_than_may_wait_are_refused(tokenizer: ModelTokenizer):
    async def harness(session: Session, prompt: Prompt) -> float:
        asking = [session.chat([by("user", f"{n}")], max_tokens=2) for n in range(10)]
        answers = await asyncio.gather(*asking, return_exceptions=True)
        refused = [each for each in answers if isinstance(each, Unavailable)]
        assert "one after the other" in str(refused[0])
        return float(len(refused))

    batch = await batch_of(harness, tokenizer, limits=Limits(waiting=4), count=1)
    assert {rollout.reward for rollout in batch.rollouts} == {6.0}


def test_settings_that_cannot_be_used_are_refused(tokenizer: ModelTokenizer, tmp_path: Path):
    secret = tmp_path / "secret"
    first = Sessions(tokenizer=tokenizer, secret=secret)
    assert secret.stat().st_mode & 0o777 == 0o600
    assert Sessions(tokenizer=tokenizer, secret=secret).launcher_key == first.launcher_key
    assert Sessions(tokenizer=tokenizer).launcher_key != first.launcher_key
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"secret": b"short"}, "16 or more"),
        ({"secret": tmp_path / "nowhere" / "secret"}, "cannot be kept"),
        ({"branches": "most"}, "last, longest or all"),
        ({"port": 70_000}, "port"),
        ({"tokenizer": tmp_path}, "tokenizer.json"),
    ]
    for changes, part in wrong:
        given: dict[str, Any] = {"tokenizer": tokenizer, **changes}
        with pytest.raises(ConfigError, match=part):
            Sessions(**given)
    with pytest.raises(ConfigError, match="turns is 0"):
        Limits(turns=0)


async def test_sessions_that_are_not_open_say_so(tokenizer: ModelTokenizer):
    async with opened(Sessions(tokenizer=tokenizer), 1) as rollouts:
        with pytest.raises(RunGivenUp, match="async with sessions"):
            await rollouts.next_batch()
