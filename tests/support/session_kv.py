"""Drives sessions on a real server whose KV pool is too small for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aprilsched import Prompt, RolloutScheduler, SamplingParams, SchedulerConfig, Turn
from aprilsched.kernel.core.messages.facts import Fact, TokensReceived
from aprilsched.kernel.engines.base import Fleet
from aprilsched.kernel.engines.load import EngineLoad, ReportsLoad
from aprilsched.testing.contract import until

SESSIONS, TURN = 8, 300
"""Sessions that start together, and tokens of each of their two turns."""


class Shares:
    """Listens for the lowest share of the pool that sessions may use."""

    def __init__(self) -> None:
        self.lowest = 1.0
        self.rollouts: RolloutScheduler | None = None

    def share(self) -> float:
        assert self.rollouts is not None
        pools = self.rollouts.state.fleet.session_kv.pools
        return min((pool.share for pool in pools.values()), default=1.0)

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        if self.rollouts is not None and any(isinstance(f, TokensReceived) for f in facts):
            self.lowest = min(self.lowest, self.share())


async def fall_and_recover(fleet: Fleet) -> tuple[EngineLoad, float, float]:
    """Run sessions that overflow the pool, then wait until preemptions are forgotten.

    Returns the engine's last report, the lowest share of the pool that sessions could use, and the
    share at the end.
    """

    async def agent(turn: Turn, prompt: Prompt) -> None:
        context = prompt.input_ids
        for _ in range(2):
            reply = await turn.generate(context)
            context = np.concatenate([context, reply.token_ids, prompt.input_ids[:4]])

    sampling = SamplingParams(max_new_tokens=TURN, temperature=1.0, ignore_eos=True)
    rng = np.random.default_rng(5)
    prompts = [
        Prompt(input_ids=rng.integers(3, 500, size=16).astype(np.int32), sampling=sampling)
        for _ in range(SESSIONS)
    ]
    config = SchedulerConfig(batch_groups=SESSIONS, group_size=1, over_provision=1.0)
    shares = Shares()
    async with RolloutScheduler(
        fleet, prompts, episode=agent, config=config, listeners=[shares]
    ) as rollouts:
        shares.rollouts = rollouts
        batch = await anext(rollouts)
        assert all(len(rollout) == 2 * TURN + 4 for rollout in batch.rollouts)
        # The server idles, so each report without a preemption raises the share.
        await until(lambda: shares.share() > shares.lowest, 600.0)
        (engine,) = fleet.engines
        assert isinstance(engine, ReportsLoad)
        load = await engine.load(metrics=True)
        return load, shares.lowest, shares.share()
