"""Drives sessions on a real server whose KV pool is too small for them."""

from __future__ import annotations

import numpy as np

from aprilsched import Prompt, RolloutScheduler, SamplingParams, SchedulerConfig, Turn
from aprilsched.kernel.core.state.session_kv import SessionPool
from aprilsched.kernel.engines.base import Fleet
from aprilsched.kernel.engines.load import EngineLoad, ReportsLoad
from aprilsched.testing.contract import until

SESSIONS, TURN = 8, 300
"""Sessions that start together, and most tokens of each of their two turns."""
WAIT_S = 600.0


async def fall_and_recover(fleet: Fleet) -> EngineLoad:
    """Run sessions that overflow the pool, and check that preemptions lower the share of the pool
    that sessions may use, and that it recovers. Returns the engine's last report."""

    def pool() -> SessionPool:
        (engine,) = fleet.engines
        return rollouts.state.fleet.session_kv.of(engine.name)

    async def agent(turn: Turn, prompt: Prompt) -> None:
        # A fall of the limit needs a report from before the preemptions.
        await until(lambda: pool().preemptions is not None, WAIT_S)
        context = prompt.input_ids
        for _ in range(2):
            reply = await turn.generate(context)
            context = np.concatenate([context, reply.token_ids, prompt.input_ids[:4]])

    # SGLang admits requests with `ignore_eos` only with room for all of their tokens.
    sampling = SamplingParams(max_new_tokens=TURN, temperature=1.0)
    rng = np.random.default_rng(5)
    prompts = [
        Prompt(input_ids=rng.integers(3, 500, size=16).astype(np.int32), sampling=sampling)
        for _ in range(SESSIONS)
    ]
    config = SchedulerConfig(batch_groups=SESSIONS, group_size=1, over_provision=1.0)
    async with RolloutScheduler(fleet, prompts, episode=agent, config=config) as rollouts:
        batch = await anext(rollouts)
        assert all(rollout.turns == 2 for rollout in batch.rollouts)
        await until(lambda: pool().share < 1.0, WAIT_S)
        lowest = pool().share
        # The server idles, so the reports that follow have no new preemptions.
        await until(lambda: pool().share > lowest, WAIT_S)
        (engine,) = fleet.engines
        assert isinstance(engine, ReportsLoad)
        load, last = await engine.load(metrics=True), pool().share
    assert engine.capabilities.caches_contexts
    assert load.preemptions is not None
    assert load.preemptions > 0
    assert lowest < 1.0
    assert last > lowest
    return load
