"""Tests how the KV of sessions limits which turns start on an engine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest

from aprilsched.config import Dispatch, Prices, SchedulerConfig
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.policies.sessions import LEAST_SHARE, may_start, share_after
from aprilsched.kernel.core.state.session_kv import SessionPool
from aprilsched.types import Score
from tests.support.driver import Driver, Key

PROMPT, TURN, POOL = 20, 1, 95
"""Tokens of a prompt, of a turn, and of the engine's pool."""
EXPENSIVE = Prices(step_seconds=0.0, prefill_tokens_per_s=1e-6)
"""No turn starts without room, and KV is kept however long a tool takes."""


@dataclass
class Agents(Driver):
    """A driver whose rollouts are sessions on one engine that caches contexts."""

    def ask(self, rollout_id: int, prompt: int = PROMPT) -> None:
        """Request the next turn of a session, whose tool adds no tokens."""
        rollout = self.state.in_flight.rollouts[rollout_id]
        first = np.arange(prompt, dtype=np.int32)
        ids = rollout.context() if rollout.turns else first
        self.feed(ev.TurnRequested(rollout_id=rollout_id, input_ids=ids))

    def running(self) -> list[int]:
        return sorted(send.rollout_id for send in self.sends.values())

    def key(self, rollout_id: int) -> Key:
        (key,) = [key for key, send in self.sends.items() if send.rollout_id == rollout_id]
        return key

    def end_turn(self, rollout_id: int) -> None:
        self.finish(self.key(rollout_id), count=TURN)

    def end_session(self, rollout_id: int) -> None:
        self.end_turn(rollout_id)
        self.feed(ev.EpisodeFinished(rollout_id=rollout_id, score=Score(reward=0.0)))

    def report(self, used: int, *, queued: int = 0, preemptions: int | None = None) -> None:
        self.feed(ev.LoadSeen(engine="a", used=used, queued=queued, preemptions=preemptions))

    @property
    def pool(self) -> SessionPool:
        return self.state.fleet.session_kv.of("a")


def agents(
    sessions: int,
    *,
    kv_tokens: int | None = POOL,
    caches: bool = True,
    max_sessions: int | Literal["auto"] | None = "auto",
    prices: Prices = EXPENSIVE,
    prompt: int = PROMPT,
    engines: tuple[str, ...] = ("a",),
) -> tuple[Agents, list[int]]:
    """Start sessions that have requested their first turns; returns their ids too."""
    config = SchedulerConfig(
        batch_groups=sessions,
        group_size=1,
        over_provision=1.0,
        straggler="abort",
        pace="asynchronous",
        prices=prices,
        dispatch=Dispatch(max_sessions=max_sessions),
    )
    driver = Agents(
        config, episodes=True, engines=engines, kv_tokens=kv_tokens, caches_contexts=caches
    )
    driver.request_batch()
    ids = [started.rollout_id for started in driver.episodes_started]
    for rollout_id in ids:
        driver.ask(rollout_id, prompt)
    return driver, ids


def test_new_sessions_start_as_far_as_the_pool_has_room():
    driver, ids = agents(6)
    assert driver.running() == ids[:4]


@pytest.mark.parametrize(
    "settings",
    [{"caches": False}, {"kv_tokens": None}, {"max_sessions": None}],
    ids=lambda each: next(iter(each)),
)
def test_sessions_that_need_no_room_start_at_once(settings: dict[str, Any]):
    driver, ids = agents(6, **settings)
    assert driver.running() == ids


def test_a_session_at_its_tool_keeps_its_room_and_continues_at_once():
    driver, ids = agents(5)
    driver.end_turn(ids[0])
    assert driver.running() == ids[1:4], "the fifth waits"
    driver.ask(ids[0])
    assert driver.running() == ids[:4]


def test_ended_sessions_give_their_room_to_the_next():
    driver, ids = agents(5)
    driver.end_session(ids[0])
    assert driver.running() == ids[1:4], "the others need the room for their next turns"
    driver.end_session(ids[1])
    assert driver.running() == ids[2:]


def test_a_session_whose_kv_is_evicted_waits_and_the_next_does_not():
    driver, ids = agents(4)
    driver.end_turn(ids[0])
    driver.progress(driver.key(ids[3]), 20)
    driver.end_turn(ids[1])
    assert list(driver.pool.contexts) == [ids[1]], "the engine needs the room of the first"
    driver.ask(ids[0])
    driver.ask(ids[1])
    assert driver.running() == ids[1:]
    for each in ids[1:]:
        driver.end_session(each)
    assert driver.running() == ids[:1]


def test_a_long_tool_gives_its_room_away():
    """The pool takes 95 s to prefill, so KV is not kept for longer."""
    driver, ids = agents(5, prices=Prices(step_seconds=0.0, prefill_tokens_per_s=1.0))
    for each in ids[:3]:
        driver.end_turn(each)
    assert driver.running() == ids[3:4]
    driver.now += 96.0
    driver.report(PROMPT)
    assert driver.running() == ids[3:]


def test_an_idle_engine_takes_a_session_without_room():
    driver, ids = agents(2, kv_tokens=30)
    assert driver.running() == ids[:1]
    driver.end_turn(ids[0])
    assert driver.running() == ids[1:], "the first is at its tool"


def test_few_running_requests_are_worth_a_displaced_session():
    """A turn of one token is worth 60 of prefill, so more than three run for contexts of 20."""
    driver, ids = agents(5, prices=Prices(step_seconds=60.0, prefill_tokens_per_s=1.0))
    driver.end_turn(ids[0])
    assert driver.running() == ids[1:], "three run, and one more pays"


def test_flushed_sessions_wait_for_room():
    driver, ids = agents(4)
    for each in ids[:2]:
        driver.end_turn(each)
    driver.report(40, preemptions=0)
    driver.report(40, preemptions=1)
    driver.update()
    for each in ids[:2]:
        driver.ask(each)
    driver.settle()
    assert not driver.pool.contexts
    assert driver.pool.share == 0.9, "the engine is the same"
    assert len(driver.running()) < len(ids), "all four prefill again, which needs more room"


def test_preemptions_lower_the_limit_and_it_recovers():
    driver, ids = agents(6)
    driver.report(80, preemptions=7)
    assert driver.pool.share == 1.0, "the first report has no earlier one"
    for count in (8, 9, 12):
        driver.report(80, preemptions=count)
    assert driver.pool.share == pytest.approx(0.9**3)
    for each in ids[:2]:
        driver.end_session(each)
    fewer = len(driver.running())
    for _ in range(100):
        driver.report(20 * fewer, preemptions=12)
    assert driver.pool.share == 1.0
    assert len(driver.running()) > fewer


def test_the_share_stays_within_its_bounds():
    share = 1.0
    for _ in range(100):
        share = share_after(share, preempted=True)
    assert share == LEAST_SHARE
    assert share_after(1.0, preempted=False) == 1.0


def test_shared_prompts_count_once():
    """Reports show that the contexts of running requests share most of their tokens."""
    driver, ids = agents(12)
    assert driver.running() == ids[:4]
    driver.report(60)
    assert driver.pool.unique == pytest.approx(0.8 + 0.2 * 60 / 80)
    for _ in range(10):
        driver.report(len(driver.running()) * PROMPT // 4)
    assert driver.pool.unique == pytest.approx(0.25, abs=0.1)
    assert len(driver.running()) > 4


def test_no_session_starts_while_the_engine_queues_requests():
    driver, ids = agents(6, kv_tokens=1000, prompt=20)
    assert driver.running() == ids
    driver, ids = agents(5)
    driver.report(80, queued=1)
    driver.end_session(ids[0])
    driver.end_session(ids[1])
    assert driver.running() == ids[2:4]


def test_a_fixed_limit_counts_sessions_that_have_not_ended():
    driver, ids = agents(4, max_sessions=2, caches=False, kv_tokens=None)
    assert driver.running() == ids[:2]
    driver.end_turn(ids[0])
    assert driver.running() == ids[1:2], "the first is at its tool"
    driver.ask(ids[0])
    driver.end_session(ids[0])
    assert driver.running() == ids[1:3]


def test_evaluations_do_not_wait_and_fill_no_fixed_limit():
    driver, ids = agents(2, max_sessions=1)
    driver.end_turn(ids[0])
    driver.evaluate(1)
    driver.ask(evaluated := driver.episodes_started[-1].rollout_id)
    assert driver.running() == [evaluated]
    driver.feed(ev.EpisodeFinished(rollout_id=ids[0], score=Score(reward=0.0)))
    assert driver.running() == [ids[1], evaluated], "the evaluation does not count"
    driver, ids = agents(6)
    driver.evaluate(1)
    evaluated = driver.episodes_started[-1].rollout_id
    assert evaluated not in ids
    driver.ask(evaluated)
    assert driver.running()[:4] == ids[:4]
    assert evaluated in driver.running()


def test_a_session_starts_on_the_engine_that_has_room():
    """The engine with fewer requests keeps the KV of three sessions at their tools."""
    driver, ids = agents(9, engines=("a", "b"))
    on = {name: [driver.sends[key].rollout_id for key in driver.on(name)] for name in "ab"}
    for each in on["a"][:3]:
        driver.end_turn(each)
    assert driver.running() == sorted(on["a"][3:] + on["b"])
    for each in on["b"][:2]:
        driver.end_session(each)
    assert driver.sends[driver.key(ids[8])].engine == "b"


def test_the_rule_by_its_formula():
    prices = Prices(step_seconds=0.004, prefill_tokens_per_s=50_000)
    rule = partial(may_start, context=8000, turn_tokens=400.0, prices=prices)
    assert rule(room=8000, running=500)
    assert rule(room=-1, running=10), "400 * 0.004 * 50,000 / 8,000"
    assert not rule(room=7999, running=11)
