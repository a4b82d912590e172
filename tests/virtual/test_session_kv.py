"""Compares the automatic limit of sessions with fixed ones, in simulations of agents.

`pytest -s -m long tests/virtual/test_session_kv.py` prints the figures of docs/guides/agents.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import pytest
from numpy.random import Generator, Philox
from numpy.typing import NDArray

from aprilsched import Prompt, RolloutScheduler, SamplingParams, SimFleet, Turn
from aprilsched.config import Dispatch, Prices, SchedulerConfig
from aprilsched.kernel.core.messages.facts import BatchDelivered, Fact
from aprilsched.simulation import NEVER, Costs, Simulation
from aprilsched.simulation.engine.settings import SimConfig

PROMPT, TURNS, TURN, TOOL = 2000, 10, 300, 700
"""Tokens of a prompt, mean number of turns, and mean tokens of a turn and of a tool's answer."""
GROUPS, SIZE, RATIO = 8, 8, 1.5
SESSIONS = int(GROUPS * SIZE * RATIO)
"""Sessions that are open at a time."""
CONTEXT = PROMPT + (TURNS + 1) * (TURN + TOOL) / 2
"""Mean context of a session, in tokens."""
BURN_IN = 2

Tool: TypeAlias = tuple[float, float, float]
"""Median of the seconds of a tool, sigma of their logarithm, and their maximum."""
TOOLS: dict[str, Tool] = {
    "short": (0.5, 1.0, 60.0),
    "medium": (3.0, 1.5, 600.0),
    "long": (20.0, 1.5, 1200.0),
}
LIMITS: dict[float, tuple[float, ...]] = {
    0.5: (0.4,),
    1.0: (0.5, 0.75, 0.9),
    2.0: (0.4, 0.5, 0.6, 0.75, 1.0, 1.5),
}
"""Fixed limits by the sessions' demand, both as multiples of the pool."""


@dataclass(frozen=True)
class Agents:
    """Prompts whose responses are sessions with tools of heavy-tailed durations."""

    tool: Tool
    seed: int

    def __iter__(self) -> Iterator[Prompt]:
        index = 0
        while True:
            samplings = tuple(
                SamplingParams(max_new_tokens=self.tokens(index, member), ignore_eos=True)
                for member in range(SIZE)
            )
            ids = np.zeros(PROMPT, dtype=np.int32)
            yield Prompt(input_ids=ids, sampling=samplings, key=index)
            index += 1

    def draws(self, index: int, use: int) -> Generator:
        key = np.array([self.seed, index], dtype=np.uint64)
        return Generator(Philox(key=key, counter=np.array([0, 0, 0, use + 1], dtype=np.uint64)))

    def turns(self, index: int, member: int) -> int:
        return 1 + min(4 * TURNS, int(self.draws(index, member).geometric(1 / TURNS)))

    def tokens(self, index: int, member: int) -> int:
        mean = TURN * self.turns(index, member)
        return max(1, int(self.draws(index, 100 + member).gamma(4, mean / 4)))

    def pauses(self, prompt: Prompt, member: int) -> list[float]:
        assert isinstance(prompt.key, int)
        median, sigma, longest = self.tool
        draws = self.draws(prompt.key, 200 + member)
        normal = draws.standard_normal(self.turns(prompt.key, member) - 1)
        seconds: NDArray[np.float64] = np.minimum(median * np.exp(sigma * normal), longest)
        return seconds.tolist()


class Meter:
    """Records the tokens that were delivered up to each batch, with its time."""

    def __init__(self) -> None:
        self.batches: list[tuple[float, int]] = []
        self.simulation: Simulation | None = None

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        assert self.simulation is not None
        for _ in (fact for fact in facts if isinstance(fact, BatchDelivered)):
            counters = self.simulation.state.in_flight.counters
            self.batches.append((now, counters.tokens_delivered))


def useful_work(
    tool: Tool,
    demand: float,
    limit: int | Literal["auto"] | None,
    *,
    seed: int = 1,
    batches: int = 10,
) -> float:
    """Return delivered tokens per second, with sessions that need `demand` times the pool."""
    agents, meter = Agents(tool, seed), Meter()
    meter.simulation = Simulation(
        SchedulerConfig(
            batch_groups=GROUPS,
            group_size=SIZE,
            over_provision=RATIO,
            pace="asynchronous",
            refill="pool",
            dispatch=Dispatch(max_sessions=limit),
        ),
        agents,
        engine=SimConfig(
            make_tokens=False,
            stream_interval=NEVER,
            prefix_cache=True,
            kv_tokens=int(SESSIONS * CONTEXT / demand),
        ),
        costs=Costs(train_seconds=1.0, refit_seconds=1.0),
        batches=batches,
        pauses=agents.pauses,
        tool_tokens=TOOL,
        listeners=[meter],
    )
    meter.simulation.run()
    (since, before), (until, after) = meter.batches[BURN_IN - 1], meter.batches[-1]
    return (after - before) / (until - since)


def test_the_automatic_limit_gains_where_sessions_need_twice_the_pool():
    tool = TOOLS["short"]
    today = useful_work(tool, 2.0, None, batches=6)
    assert useful_work(tool, 2.0, "auto", batches=6) > 1.2 * today


@pytest.mark.virtual_time
async def test_the_coordinator_limits_sessions_by_the_engine_s_reports():
    """Eight sessions of up to 1,000 tokens share a pool of 2,500 tokens."""
    in_pool: list[int] = []

    async def agent(turn: Turn, prompt: Prompt) -> None:
        context = prompt.input_ids
        for _ in range(4):
            reply = await turn.generate(context, SamplingParams(max_new_tokens=100))
            context = np.concatenate([context, reply.token_ids, np.ones(50, dtype=np.int32)])
            pool = rollouts.state.fleet.session_kv.of("sim-0")
            in_pool.append(pool.tokens + rollouts.state.in_flight.held_on["sim-0"])
            await asyncio.sleep(5.0)

    prompts = [Prompt(input_ids=np.arange(1, 401, dtype=np.int32))] * 8
    config = SchedulerConfig(
        batch_groups=8, group_size=1, over_provision=1.0, prices=Prices(step_seconds=0.0)
    )
    fleet = SimFleet(engines=1, kv_tokens=2_500, prefix_cache=True)
    async with RolloutScheduler(fleet, prompts, episode=agent, config=config) as rollouts:
        batch = await anext(rollouts)
        assert rollouts.state.fleet.session_kv.of("sim-0").preemptions is not None
    assert [rollout.turns for rollout in batch.rollouts] == [4] * 8
    assert max(in_pool) <= 2_500


@pytest.mark.long
@pytest.mark.parametrize("demand", LIMITS)
@pytest.mark.parametrize("name", TOOLS)
def test_the_automatic_limit_is_near_the_best_fixed_one(name: str, demand: float):
    """The best of the fixed limits is chosen by the mean over the seeds."""

    def mean(limit: int | Literal["auto"] | None) -> float:
        return float(np.mean([useful_work(TOOLS[name], demand, limit, seed=s) for s in (1, 2)]))

    today, auto = mean(None), mean("auto")
    fixed = {share: mean(int(share * SESSIONS / demand)) for share in LIMITS[demand]}
    best = max(today, *fixed.values())
    print(f"{name}, {demand}: today {today:.0f}, fixed {fixed}, auto {auto:.0f}: {auto / best:.3f}")
    assert auto >= 0.97 * best
