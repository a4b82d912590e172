"""Tests that a summary rebuilt from the event log alone equals the run's own summary."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from aprilsched import (
    Group,
    Prompt,
    Rollout,
    RolloutScheduler,
    SamplingParams,
    SchedulerConfig,
    SimFleet,
    SimPublisher,
    Turn,
)
from aprilsched.__main__ import main
from aprilsched.errors import EngineError, EngineRejected
from aprilsched.kernel.core.messages.events import EngineLost
from aprilsched.kernel.engines.base import Chunk, GenerationRequest
from aprilsched.observe.figures.run_figures import RunSummary
from aprilsched.observe.figures.run_state import RunState
from aprilsched.observe.figures.summary import Summary
from aprilsched.observe.log import EventLog
from aprilsched.observe.log.reading import replay
from aprilsched.observe.log.rebuild import rebuilt_summary, remainder_of
from aprilsched.observe.log.run import read_run
from aprilsched.observe.log.usage import usage_of
from aprilsched.simulation.engine import run_virtual
from aprilsched.simulation.results import remainder
from tests.support.small import config, workload
from tests.support.table import each_row
from tests.virtual.test_usage import check

SMALL = ["--batch-groups", "4", "--group-size", "4", "--over-provision", "2", "--quiet"]
SHORT = ["--median", "60", "--cap", "600"]

# fmt: off
RUNS: dict[str, tuple[list[str], Callable[[RunSummary], object]]] = {
    "waves": ([], lambda own: own.rollouts.in_flight),
    "pool": (["--refill", "pool"], lambda own: own.tokens.reprefilled),
    "buckets": (
        ["--refill", "buckets", "--refill.probes", "1"],
        lambda own: own.rollouts.in_flight,
    ),
    "evict": (
        ["--max-staleness", "1", "--max-staleness.rule", "evict"],
        lambda own: own.rollouts.dropped["stale"] and own.tokens.discarded,
    ),
    "tail": (
        ["--refill", "tail", "--max-staleness", "0", "--max-staleness.rule", "restart"],
        lambda own: own.rollouts.dropped["begun_again"] and own.tokens.discarded,
    ),
    "mask": (
        ["--max-staleness", "1", "--refill", "pool", "--over-provision", "4"],
        lambda own: own.tokens.masked and own.staleness_max > own.staleness_max_trained,
    ),
    "asynchronous": (["--pace", "asynchronous"], lambda own: own.seconds.pause),
    "abort": (["--straggler", "abort"], lambda own: own.tokens.reprefilled),
    "in place": (["--straggler", "in_place"], lambda own: own.rollouts.in_flight),
    "run": (["--straggler", "run"], lambda own: own.staleness_max),
    "auto": (["--over-provision", "auto"], lambda own: own.steady_state.forecast),
    "a full fleet": (
        ["--dispatch.max-in-flight", "20", "--sim.engines", "2"], lambda own: own.rollouts.in_flight
    ),
    "a trainer": (
        ["--train-seconds", "5", "--update-every", "2", "--burn-in", "1"],
        lambda own: own.seconds.trainer,
    ),
}
# fmt: on
"""Arguments of ``aprilsched run``, and what must occur in each run."""


def leaves(value: Any, where: str = "") -> dict[str, Any]:
    """Every figure of the summary by its name."""
    if isinstance(value, dict):
        parts = list(cast("dict[str, Any]", value).items())
    elif isinstance(value, list):
        parts = [(str(i), part) for i, part in enumerate(cast("list[Any]", value))]
    else:
        return {where: value}
    return {k: v for name, part in parts for k, v in leaves(part, f"{where}.{name}").items()}


def differences(rebuilt: object, own: object) -> dict[str, Any]:
    """The figures that differ by more than rounding: the log's times are in microseconds."""
    first, second = leaves(msgspec.to_builtins(rebuilt)), leaves(msgspec.to_builtins(own))
    return {
        name: (first.get(name), second.get(name))
        for name in first.keys() | second.keys()
        if not equal(first.get(name), second.get(name))
    }


def equal(rebuilt: Any, own: Any) -> bool:
    if isinstance(own, float) and isinstance(rebuilt, float):
        return rebuilt == pytest.approx(own, rel=1e-5, abs=1e-5)
    return type(own) is type(rebuilt) and own == rebuilt


@each_row("name", RUNS)
def test_every_figure_is_rebuilt_and_the_time_adds_up(tmp_path: Path, name: str):
    changes, shows = RUNS[name]
    arguments = ["run", *SMALL, *SHORT, "--batches", "7", "--seed", "5", *changes]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    own = read_run(tmp_path).summary
    assert shows(own)
    usage = usage_of(tmp_path)
    check(usage)
    assert usage.seconds.sum() == pytest.approx(usage.wall * len(usage.engines), rel=1e-3)
    (tmp_path / "summary.json").unlink()
    rebuilt = read_run(tmp_path).summary
    assert rebuilt.error is not None
    assert "was killed" in rebuilt.error
    assert differences(replace(rebuilt, error=None), own) == {}


def test_a_simulated_run_is_rebuilt_too(tmp_path: Path):
    arguments = ["--batches", "5", "--batch-groups", "4", "--group-size", "4", "--quiet", *SHORT]
    assert main(["simulate", "--policy", "april", *arguments, "--out", str(tmp_path)]) == 0
    own = read_run(tmp_path / "april").summary
    rebuilt = replace(rebuilt_summary(tmp_path / "april"), error=None)
    assert differences(rebuilt, own) == {}


# --- what the command line has no flags for ----------------------------------------------------


Program = Callable[[RolloutScheduler], Coroutine[Any, Any, None]]


def check_rebuilt(
    tmp_path: Path,
    program: Program,
    *,
    fleet: SimFleet | None = None,
    settings: SchedulerConfig | None = None,
    **functions: Any,
) -> RunSummary:
    """Run `program` with a log, and check that the rebuilt summary equals the scheduler's, which it
    returns."""
    path = tmp_path / "events.jsonl"
    own = Summary()
    again_state, rebuilt = RunState(), Summary()
    log = EventLog(path)
    log.start()

    async def run() -> RolloutScheduler:
        async with RolloutScheduler(
            fleet or SimFleet(2, stream_interval=8),
            functions.pop("prompts", None) or workload(),
            config=settings or config(),
            listeners=[log, own],
            **functions,
        ) as rollouts:
            await program(rollouts)
        return rollouts

    state = run_virtual(run()).state
    log.close()
    assert log.error is None
    replay(path, [again_state, rebuilt])
    live, found = remainder(state), remainder_of(again_state)
    assert sorted(found.in_flight) == sorted(live.in_flight)
    assert differences(found.counters, live.counters) == {}
    pairs = zip(found.ledger.entries, live.ledger.entries, strict=True)
    assert all(a == replace(b, at=a.at) for a, b in pairs)
    summary = own.result(live, clock="virtual")
    again = rebuilt.result(found, clock="virtual")
    assert differences(again, summary) == {}
    return summary


async def train(rollouts: RolloutScheduler) -> None:
    for _ in range(5):
        await rollouts.next_batch()
        await rollouts.update_weights(SimPublisher())


def test_rewards_and_rejected_groups(tmp_path: Path):
    async def score(rollout: Rollout, prompt: Prompt) -> float:
        await asyncio.sleep(0.05)
        return float(len(rollout.token_ids))

    def accept(group: Group) -> bool:
        return group.group_id % 2 > 0

    summary = check_rebuilt(tmp_path, train, reward=score, accept=accept)
    assert summary.rollouts.dropped["rejected"] > 0


def test_rewards_that_fail(tmp_path: Path):
    async def score(group: Group) -> list[float]:
        if group.group_id % 2:
            raise ValueError("no answer")
        return [0.0] * len(group.rollouts)

    summary = check_rebuilt(tmp_path, train, reward=score, reward_scope="group")
    assert summary.rollouts.dropped["reward_failed"] > 0


def test_evaluations(tmp_path: Path):
    async def evaluate(rollouts: RolloutScheduler) -> None:
        for _ in range(3):
            await rollouts.next_batch()
            await rollouts.evaluate([workload().prompt(i) for i in range(5)], group_size=4)
            await rollouts.update_weights(SimPublisher())
        asking = asyncio.ensure_future(rollouts.evaluate([workload().prompt(0)], group_size=4))
        await asyncio.sleep(0.1)
        asking.cancel()

    summary = check_rebuilt(tmp_path, evaluate)
    assert summary.rollouts.evaluated == 60
    assert summary.rollouts.in_flight > 0


def test_episodes_with_tools(tmp_path: Path):
    async def talk(turn: Turn, prompt: Prompt) -> float:
        sampling = SamplingParams(max_new_tokens=10 + int(prompt.input_ids[0]), ignore_eos=True)
        first = await turn.generate(prompt.input_ids, sampling)
        await asyncio.sleep(0.2)
        if int(prompt.input_ids[0]) % 7 == 0 and turn.index == 1:
            raise ValueError("the tool is broken")
        await turn.generate([*prompt.input_ids, *first.token_ids, 7, 7, 7], sampling)
        return 1.0

    prompts = [Prompt(input_ids=np.array([10 * i + 1, 2], dtype=np.int32)) for i in range(60)]
    summary = check_rebuilt(
        tmp_path, train, prompts=prompts, episode=talk, settings=config(pace="asynchronous")
    )
    assert summary.rollouts.dropped["episode_failed"] > 0
    assert summary.rollouts.dropped["sibling_failed"] > 0
    tokens = sum((batch.mean_length or 0.0) * batch.rollouts for batch in summary.per_batch)
    assert tokens > summary.tokens.delivered, "the tools' tokens are in the lengths"


def test_turns_that_were_given_up(tmp_path: Path):
    async def talk(turn: Turn, prompt: Prompt) -> float:
        sampling = SamplingParams(max_new_tokens=10 + int(prompt.input_ids[0]), ignore_eos=True)
        context = prompt.input_ids.tolist()
        for number in range(5):
            try:
                async with asyncio.timeout(0.4):
                    output = await turn.generate([*context, *[number] * number], sampling)
            except TimeoutError:
                if (turn.index + number) % 2:
                    continue
                output = await turn.partial()
                if not len(output.token_ids):
                    continue
            context += [*[number] * number, *output.token_ids.tolist(), 7, 7]
            await asyncio.sleep(0.1)
        return 1.0

    prompts = [Prompt(input_ids=np.array([10 * i + 1, 2], dtype=np.int32)) for i in range(60)]
    summary = check_rebuilt(
        tmp_path, train, prompts=prompts, episode=talk, settings=config(pace="asynchronous")
    )
    assert summary.tokens.discarded > 0
    assert summary.rollouts.in_flight > 0


def test_attempts_that_fail_and_engines_that_are_lost(tmp_path: Path):
    fleet = SimFleet(3, stream_interval=8)
    for engine in fleet.engines:
        engine.generate = breaking(engine.generate)  # type: ignore[method-assign]

    async def lose_one(rollouts: RolloutScheduler) -> None:
        for number in range(8):
            await rollouts.next_batch()
            await rollouts.update_weights(SimPublisher())
            if number == 1:
                rollouts._feed(EngineLost(engine="sim-2", cause="burnt"))

    summary = check_rebuilt(tmp_path, lose_one, fleet=fleet)
    assert summary.rollouts.dropped["failed"] > 0
    assert summary.rollouts.dropped["sibling_failed"] > 0
    assert summary.tokens.discarded > 0


def breaking(generate: Callable[[GenerationRequest], Any]) -> Any:
    """Break off every fifth response, and refuse every twentieth request, on all engines."""
    count = 0

    async def broken(request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        nonlocal count
        count += 1
        number = count
        async with aclosing(generate(request)) as chunks:
            # Checks of a returned engine have no group, and ids of another form.
            if request.affinity and int(request.request_id.split("-")[1]) % 20 == 0:
                raise EngineRejected("sim", "is too long", status=400)
            async for chunk in chunks:
                yield chunk
                if number % 5 == 0:
                    raise EngineError("sim", "broke off")

    return broken
