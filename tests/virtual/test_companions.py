"""Tests that companion rows come from the pass that sampled each token.

The toy model's rows depend on the position and on the weights that forwarded it, and the embedded
engine returns those of the latest pass, as SGLang does. So a row that was joined wrongly, or was
overwritten when a context was computed again, is another row.
"""

from __future__ import annotations

import asyncio
import copy
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched import (
    Batch,
    LongTailWorkload,
    MemoryStore,
    Prompt,
    Rollout,
    RolloutScheduler,
    SamplingParams,
    SchedulerConfig,
    SimFleet,
    SimPublisher,
    SqliteStore,
    Turn,
)
from aprilsched.cli.runs.settings_tables import config_of, table_of
from aprilsched.config import Retries
from aprilsched.errors import ConfigError, EngineError
from aprilsched.kernel.core.policies.straggler import BEHAVIOURS
from aprilsched.kernel.engines.base import Chunk, GenerationRequest
from aprilsched.kernel.values.capabilities import Capabilities
from aprilsched.kernel.values.companions import Companion, routed_experts, top_logprobs
from aprilsched.simulation.engine import SimEngine
from aprilsched.simulation.engine import fleet as sim_fleet
from aprilsched.simulation.engine.toy_model import toy_rows, weights_key_of_version
from aprilsched.trainers.tensors import RaggedTensor, pack
from aprilsched.types import NO_VERSION
from tests.support import small
from tests.support.companions import EXPERTS, MASK, check_rows
from tests.support.table import each_row

pytestmark = pytest.mark.virtual_time

RULES: dict[str, dict[str, Any]] = {
    "retract": {},
    "abort": {"straggler": "abort"},
    "in place": {"straggler": "in_place"},
    "run": {"straggler": "run"},
    "asynchronous": {"pace": "asynchronous"},
    "asynchronous in place": {"pace": "asynchronous", "straggler": "in_place"},
    "rolling": {"pace": "asynchronous", "straggler": "run", "refit": "rolling"},
    "buckets": {"refill": "buckets"},
    "tail": {"refill": "tail"},
    "pool": {"refill": "pool"},
    "auto": {"over_provision": "auto"},
}


config = partial(small.config, companions=(EXPERTS, MASK))


def workload(**changes: Any) -> LongTailWorkload:
    return LongTailWorkload(median=60, cap=900, group_size=4, vocab_size=1000, seed=5, **changes)


async def batches(
    rollouts: RolloutScheduler, count: int, *, update: bool = True
) -> AsyncIterator[Batch]:
    for _ in range(count):
        batch = await rollouts.next_batch()
        yield batch
        if update:
            await rollouts.update_weights(SimPublisher(), version=rollouts.version + 1)


@each_row("rule", RULES)
async def test_rows_are_of_the_pass_that_sampled_their_token(rule: str) -> None:
    mixed = 0
    async with RolloutScheduler(SimFleet(2), workload(), config=config(**RULES[rule])) as rollouts:
        async for batch in batches(rollouts, 6):
            for rollout in batch.rollouts:
                check_rows(rollout)
                mixed += len(set(rollout.versions.tolist())) > 1
    assert mixed or rule in ("run", "rolling")


@each_row("required", [False, True])
async def test_rows_that_a_recompute_overwrote_are_marked(
    required: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If requests wait inside the engine for a refit that recomputes their context, the rows of
    older tokens come from the new weights. They are marked as inexact, and their tokens are masked
    if the rows are required."""
    own = property(lambda config: BEHAVIOURS[config.straggler])
    monkeypatch.setattr(SchedulerConfig, "behaviour", own)
    asked = Companion("routed_experts", "uint8", (3, 2), required)
    wrong = 0
    scheduler = RolloutScheduler(SimFleet(1), workload(), config=config(companions=(asked,)))
    async with scheduler as rollouts:
        async for batch in batches(rollouts, 6):
            wrong += sum(_wrong_rows(rollout, required=required) for rollout in batch.rollouts)
    assert wrong > 100


def _wrong_rows(rollout: Rollout, *, required: bool) -> int:
    experts = rollout.companions["routed_experts"]
    prompt = len(rollout.prompt_ids)
    keys = np.array([weights_key_of_version(int(v)) for v in rollout.versions], dtype=np.uint64)
    positions = np.arange(prompt - 1, prompt + len(rollout) - 1)
    expected = toy_rows(EXPERTS, positions, keys).values
    same = (experts.rows.values[prompt - 1 :] == expected).all((1, 2))
    assert np.array_equal(same, experts.exact)
    assert np.array_equal(rollout.loss_mask, experts.exact if required else np.ones_like(same))
    return int((~same).sum())


class Flaky(SimEngine):
    """An engine whose streams sometimes break and lose everything that they had not sent."""

    async def generate(
        self, request: GenerationRequest, *, length: int | None = None
    ) -> AsyncGenerator[Chunk, None]:
        chunks, breaks = 0, zlib.crc32(request.request_id[-15:].encode()) % 3 == 0
        async with aclosing(super().generate(request, length=length)) as stream:
            async for chunk in stream:
                yield chunk
                chunks += 1
                if breaks and chunks == 1 and chunk.finish is None:
                    await asyncio.sleep(0.5)  # Updates come in between.
                    raise EngineError(self.name, "the stream broke.")


async def test_rows_that_were_lost_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the same version the prefill of the next attempt gives the same rows; under a later one
    the rollout marks them as rows of another pass."""
    monkeypatch.setattr(sim_fleet, "SimEngine", Flaky)
    retries = Retries(attempts=50, interruptions=50)
    again = later = 0
    async with RolloutScheduler(
        SimFleet(2), workload(), config=config(pace="asynchronous", retries=retries)
    ) as rollouts:
        async for batch in batches(rollouts, 6):
            for rollout in batch.rollouts:
                again += len(rollout.segments) > 1
                later += _wrong_rows(rollout, required=False)
        assert rollouts.state.in_flight.counters.retries > 10
    assert again > 10
    assert later > 0


async def episode(turn: Turn, prompt: Prompt) -> float:
    """Three turns with tokens of an environment between them."""
    ids = prompt.input_ids
    for number in range(3):
        tokens = int(ids.sum()) % 150 + 20 * number + 1
        sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
        answer = await turn.generate(ids, sampling)
        experts = answer.companions["routed_experts"]
        assert len(experts.rows) == len(ids) + len(answer.token_ids) - 1
        assert experts.exact.all()
        await asyncio.sleep(0.1)
        ids = np.concatenate((ids, answer.token_ids, np.array([7, 8, 9], dtype=np.int32)))
    return 1.0


async def leaves(turn: Turn, prompt: Prompt) -> float:
    """Two alternating branches, and a third one from the middle of the first response."""
    turn.branches = "all"
    own = np.array([4, 4], dtype=np.int32)
    contexts = [prompt.input_ids, np.concatenate((prompt.input_ids, own))]
    for number in range(6):
        which = number % 3
        ids = contexts[which]
        tokens = int(ids.sum()) % 90 + 20
        sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
        answer = await turn.generate(ids, sampling, branch=True)
        assert answer.companions["routed_experts"].exact.all()
        contexts[which] = np.concatenate((ids, answer.token_ids, own))
        if number == 0:
            contexts.append(np.concatenate((ids, answer.token_ids[:9], own)))
        await asyncio.sleep(0.1)
    return 1.0


async def test_branches_have_the_rows_of_their_sampling_passes() -> None:
    scheduler = RolloutScheduler(SimFleet(2), workload(), config=config(), episode=leaves)
    several = 0
    async with scheduler as rollouts:
        async for batch in batches(rollouts, 4):
            for rollout in batch.rollouts:
                assert len(rollout.branches) == 2
                several += len(set(rollout.versions[rollout.versions >= 0].tolist())) > 1
                for each in (rollout, *rollout.branches):
                    check_rows(each)
    assert several > 3


async def test_prompts_choose_among_the_companions_of_the_run(tmp_path: Path) -> None:
    def asked() -> Iterator[Prompt]:
        for number, prompt in enumerate(workload()):
            yield replace(prompt, companions=(("sampling_mask",), ())[number % 2])

    torch = pytest.importorskip("torch")
    path, chosen = tmp_path / "run.sqlite", set[Any]()
    for again in (False, True):
        store = SqliteStore(path)
        async with RolloutScheduler(SimFleet(2), asked(), config=config(), store=store) as rollouts:
            batch = await rollouts.next_batch()
            assert batch.redelivered == again
            for group in batch.groups:
                names = group.prompt.companions or ()
                assert all(r.companions.keys() == set(names) for r in group.rollouts)
                chosen.add(names)
            x = pack(list(batch.rollouts), no_version=NO_VERSION)
            masks, exact = x.companions["sampling_mask"], x.companions_exact["sampling_mask"]
            assert isinstance(masks, RaggedTensor)
            asks = [bool(r.companions) for r in batch.rollouts]
            each = torch.tensor(asks).repeat_interleave(x.cu_seqlens.diff())[x.response_mask]
            assert (masks.offsets.diff()[x.response_mask] > 0).equal(each)
            assert exact[x.response_mask].equal(each)
    assert chosen == {("sampling_mask",), ()}


@each_row("turns", [None, episode, leaves])
async def test_a_killed_run_resumes_with_its_rows(turns: Any) -> None:
    """This includes a save between the end of a turn, the tokens of its environment and the first
    tokens of the next turn."""
    store = MemoryStore()
    named: Any = {"config": config(save_interval_s=0.01), "episode": turns}
    first = RolloutScheduler(SimFleet(2), workload(), store=store, **named)
    async with first as rollouts:
        async for batch in batches(rollouts, 2):
            batch.acknowledge()
        kept = copy.deepcopy(store)
    carried = 0
    second = RolloutScheduler(SimFleet(2), workload(), store=kept, **named)
    async with second as rollouts:  # its engines were restarted
        await rollouts.update_weights(SimPublisher(), version=3)
        async for batch in batches(rollouts, 3):
            for rollout in batch.rollouts:
                for each in (rollout, *rollout.branches):
                    check_rows(each)
                carried += rollout.segments[0].version < 2
    assert carried


async def test_rows_of_an_abandoned_prompt_are_not_restored() -> None:
    """A turn that is withdrawn in its prefill has rows and no token. If the episode then starts
    another prompt under later weights, a resumed run has only the rows of that prompt."""
    updated, store = asyncio.Event(), MemoryStore()
    long = np.arange(60_000, dtype=np.int32) % 1000

    async def changing(turn: Turn, prompt: Prompt) -> float:
        if not updated.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await turn.generate(long)
                raise AssertionError("the prefill was to take longer")
            await updated.wait()
        await turn.generate(prompt.input_ids, SamplingParams(max_new_tokens=600, ignore_eos=True))
        return 1.0

    sizes: dict[str, Any] = {"batch_groups": 1, "over_provision": 1.0}
    asked = config(straggler="abort", pace="asynchronous", save_interval_s=0.01, **sizes)
    named: dict[str, Any] = {"config": asked, "episode": changing}
    async with RolloutScheduler(SimFleet(1), workload(), store=store, **named) as rollouts:
        await asyncio.sleep(5)
        members = rollouts.state.in_flight.rollouts.values()
        given_up = [each.log.companions["routed_experts"].held for each in members]
        assert max(given_up) > 600
        assert not any(each.log.size for each in members)
        await rollouts.update_weights(SimPublisher())
        updated.set()
        await asyncio.sleep(2)
        await rollouts.update_weights(SimPublisher())  # the responses are restored, with their rows
        await asyncio.sleep(0.1)
        assert all(1 < each.log.size < 600 for each in members)
        kept = copy.deepcopy(store)
    async with RolloutScheduler(SimFleet(1), workload(), store=kept, **named) as rollouts:
        await rollouts.update_weights(SimPublisher(), version=3)
        for rollout in (await rollouts.next_batch()).rollouts:
            check_rows(rollout)
            assert rollout.segments[0].version == 1


async def test_engines_that_do_not_return_them_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Dense(SimEngine):
        @property
        def capabilities(self) -> Capabilities:
            return replace(super().capabilities, companions=frozenset())

    monkeypatch.setattr(sim_fleet, "SimEngine", Dense)
    for asked, advice in ((EXPERTS, "start it with"), (top_logprobs(2), "use servers that do")):
        with pytest.raises(ConfigError, match=f"does not return {asked.name}; {advice}"):
            await RolloutScheduler(
                SimFleet(1), workload(), config=config(companions=(asked,))
            ).__aenter__()


@each_row(
    ("written", "advice"),
    [
        ("experts", "choose one of routed_experts, indexer_topk, sampling_mask"),
        ("routed_experts", "give the shape of a row, such as \\(48, 8\\)"),
        ("routed_experts=float32[3,2]", "give an integer type"),
        ("routed_experts=nothing[3,2]", "give an integer type"),
        ("routed_experts=uint8[3,0]", "give the shape of a row"),
        ("routed_experts=uint8[3000,3000]", "at most 1048576"),
        ("sampling_mask=int32[3]", "give no shape"),
        ("top_logprobs=int32[5,2]", "give float32"),
        ("top_logprobs=float32[5]", "the number of tokens and 2"),
        ("routed_experts uint8", "write its name, type and shape as in"),
    ],
)
def test_a_companion_that_cannot_be_is_refused(written: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        SchedulerConfig(companions=(written,))


def test_a_companion_is_written_as_a_string_or_a_table() -> None:
    asked = SchedulerConfig(companions=("routed_experts=uint8[48,8]!", "sampling_mask"))
    assert asked.companions == (
        routed_experts(layers=48, per_token=8, experts=128, required=True),
        Companion("sampling_mask"),
    )
    assert routed_experts(layers=1, per_token=1, experts=257).dtype == "uint16"
    assert config_of(table_of(asked)).companions == asked.companions
    with pytest.raises(ConfigError, match="give each name once"):
        SchedulerConfig(companions=("sampling_mask", "sampling_mask"))
