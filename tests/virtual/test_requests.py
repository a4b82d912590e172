"""Tests that media, fields of requests and kept answers go with a rollout wherever it goes.

The embedded engine puts a few tokens for each of the media in front of a context, as a server
expands placeholders, and what it samples depends on them. So a continuation that lost its media, or
sent them expanded, has other tokens than a response that was never interrupted.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched import (
    Batch,
    LongTailWorkload,
    Media,
    MemoryStore,
    Prompt,
    Rollout,
    RolloutScheduler,
    SamplingParams,
    SGLangFleet,
    SimFleet,
    SimPublisher,
    SqliteStore,
    Turn,
)
from aprilsched.errors import ConfigError
from aprilsched.kernel.values.companions import Companion
from aprilsched.observe.log import EventLog
from aprilsched.simulation.engine import SimConfig
from aprilsched.simulation.engine.sequence import MEDIA_TOKENS
from aprilsched.testing.server import SimServer
from tests.support import small
from tests.support.table import each_row

pytestmark = pytest.mark.virtual_time

KEEP = ("prompt_tokens", "request")
MEDIA = (Media("image", b"\x89PNG"), Media("audio", "http://a/b.wav"))
FIELDS = {"priority": 7, "custom_logit_processor": "code"}


config = partial(small.config, batch_groups=3, group_size=2)


def prompts(media: tuple[Media, ...] = MEDIA) -> Iterator[Prompt]:
    """Greedy prompts for 12 to 500 tokens, with the media and fields that their answers keep."""
    workload = LongTailWorkload(
        median=60, cap=500, group_size=2, vocab_size=1000, seed=5, limits="exact"
    )
    for key, prompt in enumerate(workload):
        assert isinstance(prompt.sampling, tuple)
        sampling = tuple(
            SamplingParams(
                max_new_tokens=each.max_new_tokens,
                temperature=0.0,
                ignore_eos=True,
                request=FIELDS,
                keep=KEEP,
            )
            for each in prompt.sampling
        )
        yield Prompt(input_ids=prompt.input_ids, sampling=sampling, key=key, media=media)


def check(rollout: Rollout, media: int = len(MEDIA)) -> None:
    """Check that every answered attempt got the media and the fields of its prompt."""
    assert rollout.answers
    assert [each.start for each in rollout.answers] == sorted(e.start for e in rollout.answers)
    for answer in rollout.answers:
        sent = len(rollout.prompt_ids) + answer.start
        assert answer.values["prompt_tokens"] == sent + MEDIA_TOKENS * media, "expanded once"
        assert answer.values["request"] == FIELDS
        assert answer.left_out == ()


async def batches(rollouts: RolloutScheduler, count: int) -> AsyncIterator[Batch]:
    for _ in range(count):
        yield await rollouts.next_batch()
        await rollouts.update_weights(SimPublisher(), version=rollouts.version + 1)


RULES: dict[str, dict[str, Any]] = {
    "retract": {},
    "abort": {"straggler": "abort"},
    "in place": {"straggler": "in_place"},
    "rolling": {"pace": "asynchronous", "straggler": "run", "refit": "rolling"},
}


@each_row("dies", [False, True], ids=["whole", "an engine dies"])
@each_row("rule", RULES)
async def test_every_attempt_has_the_media_and_the_fields(rule: str, dies: bool) -> None:
    """This includes an attempt that continues the tokens of a lost engine."""
    several = moved = 0
    lost = ""
    fleet = SimFleet(3, vocab_size=1000)
    async with RolloutScheduler(fleet, prompts(), config=config(**RULES[rule])) as rollouts:
        async for batch in batches(rollouts, 6):
            for rollout in batch.rollouts:
                check(rollout)
                several += len(rollout.answers) > 1
                on = {segment.engine for segment in rollout.segments}
                moved += lost in on and len(on) > 1
            if dies and not lost:
                lost = rollouts.state.in_flight.open.most_common(1)[0][0]
                next(engine for engine in fleet.engines if engine.name == lost).crash()
    assert several or rule not in ("abort", "rolling")
    assert moved or not dies


async def _whole(media: tuple[Media, ...]) -> dict[Any, list[list[int]]]:
    """The responses to the first prompts, none of which is interrupted."""
    found: dict[Any, list[list[int]]] = {}
    fleet = SimFleet(1, vocab_size=1000)
    async with RolloutScheduler(fleet, prompts(media), config=config()) as rollouts:
        for _ in range(3):
            for group in (await rollouts.next_batch()).groups:
                found[group.prompt.key] = [r.token_ids.tolist() for r in group.rollouts]
    return found


async def test_a_killed_run_resumes_with_media_and_answers() -> None:
    """On other engines, with the tokens of a run that was never interrupted."""
    expected, without = await _whole(MEDIA), await _whole(())
    assert expected.keys() == without.keys()
    assert expected != without, "the tokens depend on the media"
    store = MemoryStore()
    fleet = SimFleet(1, vocab_size=1000)
    scheduler = RolloutScheduler(fleet, prompts(), config=config(straggler="abort"), store=store)
    async with scheduler as rollouts:
        (await rollouts.next_batch()).acknowledge()
        await asyncio.sleep(10)  # until the others have returned
        kept = copy.deepcopy(store)
    again = RolloutScheduler(SimFleet(2, vocab_size=1000), prompts(), config=config(), store=kept)
    carried = 0
    async with again as rollouts:
        for _ in range(2):
            for group in (await rollouts.next_batch()).groups:
                assert group.prompt.media == MEDIA
                assert [r.token_ids.tolist() for r in group.rollouts] == expected[group.prompt.key]
                carried += sum(len(rollout.answers) > 1 for rollout in group.rollouts)
                for rollout in group.rollouts:
                    check(rollout)
    assert carried


async def test_answers_are_saved_with_their_rollout_and_logged_by_size(tmp_path: Path) -> None:
    path, log = tmp_path / "run.sqlite", tmp_path / "events.jsonl"
    events = EventLog(log, patient=True)
    events.start()
    fleet = SimFleet(1, vocab_size=1000)
    first = RolloutScheduler(
        fleet,
        prompts(),
        config=config(straggler="abort"),
        store=SqliteStore(path),
        listeners=[events],
    )
    async with first as rollouts:
        batch = await rollouts.next_batch()
        received = {r.rollout_id: r.answers for r in batch.rollouts}
    ended = [json.loads(line) for line in log.read_text().splitlines() if "answers" in line]
    assert ended
    assert {tuple(each["answers"]) for each in ended} == {KEEP}
    assert "custom_logit_processor" not in log.read_text()
    fleet = SimFleet(1, vocab_size=1000)
    second = RolloutScheduler(fleet, prompts(), config=config(), store=SqliteStore(path))
    async with second as rollouts:
        batch = await rollouts.next_batch()
        assert batch.redelivered
        assert {r.rollout_id: r.answers for r in batch.rollouts} == received


async def test_each_turn_of_an_episode_may_keep_something_else() -> None:
    async def episode(turn: Turn, prompt: Prompt) -> float:
        ids = prompt.input_ids
        for number in range(3):
            sampling = SamplingParams(
                max_new_tokens=20, ignore_eos=True, request={"turn": number}, keep=("request",)
            )
            answer = await turn.generate(ids, sampling)
            ids = np.concatenate((ids, answer.token_ids, np.array([7, 8], dtype=np.int32)))
        return 1.0

    fleet = SimFleet(1, vocab_size=1000)
    async with RolloutScheduler(fleet, prompts(), config=config(), episode=episode) as rollouts:
        for rollout in (await rollouts.next_batch()).rollouts:
            assert [each.values["request"] for each in rollout.answers] == [
                {"turn": 0},
                {"turn": 1},
                {"turn": 2},
            ]
            assert [each.start for each in rollout.answers] == [0, 22, 44]


async def _shown_more(turn: Turn, prompt: Prompt) -> float:
    """Two turns; the environment answers the first one with another image."""
    assert isinstance(prompt.key, int)
    long = 100 + 70 * (prompt.key % 5)
    sampling = SamplingParams(max_new_tokens=long, ignore_eos=True, keep=KEEP)
    first = await turn.generate(prompt.input_ids, sampling)
    ids = np.concatenate((prompt.input_ids, first.token_ids, np.array([7, 8], dtype=np.int32)))
    await turn.generate(ids, sampling, [*prompt.media, Media("image", "answer.png")])
    return 1.0


@each_row("straggler", ["abort", "retract"])
async def test_an_episode_may_show_more_media_in_a_later_turn(straggler: Any) -> None:
    """An attempt that continues a turn has the media of that turn."""
    fleet, attempts = SimFleet(1, vocab_size=1000), 0
    asked = config(straggler=straggler)
    async with RolloutScheduler(fleet, prompts(), config=asked, episode=_shown_more) as rollouts:
        async for batch in batches(rollouts, 4):
            for rollout in batch.rollouts:
                attempts += len(rollout.answers)
                second = len(rollout) // 2 + 1
                for answer in rollout.answers:
                    media = len(MEDIA) + (answer.start >= second)
                    sent = len(rollout.prompt_ids) + answer.start
                    assert answer.values["prompt_tokens"] == sent + MEDIA_TOKENS * media
    assert attempts > 4 * 6 * 2 or straggler != "abort"


async def test_media_count_in_the_kv_pool_as_the_engine_reports() -> None:
    fleet = SimFleet(1, vocab_size=1000)
    async with RolloutScheduler(fleet, prompts(), config=config()) as rollouts:
        await rollouts.next_batch()
        in_flight = rollouts.state.in_flight
        known = [r for r in in_flight.open_requests() if r.gained]
        assert known
        assert {request.media_tokens for request in known} == {MEDIA_TOKENS * len(MEDIA)}
        held = sum(r.rollout.context_tokens + r.media_tokens for r in in_flight.open_requests())
        assert in_flight.held_on == {"sim-0": held}


async def test_media_and_rows_of_the_context_are_refused_together() -> None:
    companions = (Companion("routed_experts", "uint8", (3, 2)),)
    fleet = SimFleet(1, vocab_size=1000)
    asked = config(companions=companions)
    async with RolloutScheduler(fleet, prompts(), config=asked) as rollouts:
        with pytest.raises(ConfigError, match="a prompt has media, and a row of routed_experts"):
            await rollouts.evaluate([next(prompts())], group_size=2)
    async with RolloutScheduler(fleet, prompts(), config=config()) as rollouts:
        assert (await rollouts.evaluate([next(prompts())], group_size=2)).groups
    given = RolloutScheduler(fleet, prompts(media=()), config=asked, episode=_shown_more)
    async with given as rollouts:
        assert not (await rollouts.evaluate([next(prompts(media=()))], group_size=2)).groups
        (entry, *_) = rollouts.state.in_flight.ledger.entries
        assert "a prompt has media, and a row of routed_experts" in entry.cause


async def test_what_is_too_large_is_left_out_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    def large() -> Iterator[Prompt]:
        sampling = SamplingParams(max_new_tokens=5, request={"note": "x" * (1 << 20)}, keep=KEEP)
        while True:
            yield Prompt(input_ids=np.arange(5, dtype=np.int32), sampling=sampling)

    async with RolloutScheduler(SimFleet(1), large(), config=config()) as rollouts:
        rollout = next((await rollouts.next_batch()).rollouts)
    (answer,) = rollout.answers
    assert answer.left_out == ("request",)
    assert answer.values == {"prompt_tokens": 5}
    assert sum("answered more than is kept" in each for each in caplog.messages) == 1


@each_row("ranked", [False, True])
async def test_fields_media_and_ranks_arrive_at_a_server(ranked: bool) -> None:
    """Through real HTTP, in scaled wall time; bytes arrive as a data URL."""
    server_config = SimConfig(vocab_size=1000, stream_at_pause=False, priority=ranked)
    sampling = SamplingParams(
        max_new_tokens=20, ignore_eos=True, request={"return_hidden_states": True}, keep=KEEP
    )

    def asked() -> Iterator[Prompt]:
        while True:
            yield Prompt(input_ids=np.arange(1, 6, dtype=np.int32), sampling=sampling, media=MEDIA)

    async with SimServer(server_config, time_scale=0.01) as server:
        fleet = SGLangFleet([server.url])
        async with RolloutScheduler(fleet, asked(), config=config()) as rollouts:
            rollout = next((await rollouts.next_batch()).rollouts)
            (evaluated,) = (await rollouts.evaluate([next(asked())])).rollouts
    received = rollout.answers[0].values
    assert received["prompt_tokens"] == 5 + MEDIA_TOKENS * len(MEDIA)
    priority = {"priority": 2} if ranked else {}
    assert received["request"] == {"return_hidden_states": True, **priority}
    assert evaluated.answers[0].values["request"] == {"return_hidden_states": True}
