"""Runs one seed: the real scheduler and adapters with faulty servers, on a virtual clock."""

from __future__ import annotations

import asyncio
import random
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from aprilsched import LongTailWorkload, RolloutScheduler, SchedulerConfig, SGLangFleet
from aprilsched.config import Health, Pool
from aprilsched.engines.base import Engine, RefitFromDisk
from aprilsched.engines.http import HttpLimits
from aprilsched.engines.sim import run_virtual
from aprilsched.engines.sim.settings import SimConfig
from aprilsched.engines.sim.toy_model import ToyModel
from aprilsched.errors import (
    ConfigError,
    EngineRejected,
    FleetLost,
    PromptsExhausted,
    RefitError,
    RunGivenUp,
)
from aprilsched.runs.summary import remainder
from aprilsched.telemetry.summary import Summary
from aprilsched.testing import SimServer
from aprilsched.testing.faults import FaultScript, faults_of
from aprilsched.timing.model import H200_QWEN3_4B
from aprilsched.types import Batch
from experiments.faults.scripts import random_script
from experiments.faults.truth import CONTENT, is_right
from experiments.faults.watching import Watch, cause_of

__all__ = ["Figures", "run"]

ENGINES = 3
BATCHES = 12
GROUPS, GROUP_SIZE = 4, 4
VOCAB = 512
INTERVAL = 16
TRAIN_S = (1.0, 10.0, 60.0)
REFUSALS = 300
"""Updates in a row that reach no engine, a second apart, after which the trainer gives up."""
BATCH_S = 8.0
"""About what the engines need for a batch."""
DEADLINE_S = 6 * 3600.0
"""Of virtual time: whoever is not done by then hangs."""
FLEET_WAIT_S = 600.0
AFTERWARDS_S = 3600.0
"""After closing: faults end, and nothing of ours may be left on an engine."""

MACHINE = SimConfig(
    # 25 tokens/s for each response, so that few tokens take as long as the scheduler's timeouts
    # and the windows in which it looks for slow engines are made for.
    timing=replace(H200_QWEN3_4B, t0=0.04),
    stream_interval=INTERVAL,
    vocab_size=VOCAB,
    stream_at_pause=False,
)
RECOMPUTES = ("retract", "abort", "run")
"""Stragglers of these have every context computed under the weights that sample after it."""


@dataclass(kw_only=True)
class Figures:
    """What one run did."""

    seed: int
    kinds: list[str]
    config: dict[str, Any]
    script: dict[str, Any]
    fired: dict[str, int] = field(default_factory=dict[str, int])
    ending: str = "hung"
    """"done", or the exception that ended it."""
    error: str = ""
    batches: int = 0
    seconds: float = 0.0
    rollouts: dict[str, Any] = field(default_factory=dict[str, Any])
    tokens: dict[str, Any] = field(default_factory=dict[str, Any])
    checked: int = 0
    """Delivered rollouts whose every token was checked."""
    wrong: int = 0
    """Those of them with a wrong token."""
    failed_attempts: int = 0
    retries: int = 0
    losses: dict[str, int] = field(default_factory=dict[str, int])
    standby: int = 0
    readmitted: int = 0
    recoveries: list[float] = field(default_factory=list[float])
    refit_errors: int = 0
    next_token: float = 0.0
    """The longest time from a fault to the next token of any engine."""
    own_next_token: list[float] = field(default_factory=list[float])
    """From each fault to the next token of the engine that it happened to."""
    longest_batch: float = 0.0
    longest_silence: float = 0.0
    """Of a request that was with an engine at the end."""
    dropped_for: dict[str, int] = field(default_factory=dict[str, int])
    """Groups dropped, by cause."""
    left_paused: int = 0
    left_running: int = 0


class Checkpoints:
    """Publishes versions that were all written beforehand."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, versions: int) -> None:
        for version in range(1, versions + 1):
            path = self._path(version)
            path.mkdir()
            (path / "config.json").write_text("{}")
            (path / "model.safetensors").write_text(CONTENT.format(version))

    def holds(self, version: int) -> bool:
        return self._path(version).is_dir()

    async def prepare(self, version: int) -> None:
        pass

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        answers = await asyncio.gather(
            *(self._update(engine, version) for engine in engines), return_exceptions=True
        )
        return {
            engine.name: answer if isinstance(answer, Exception) else None
            for engine, answer in zip(engines, answers, strict=True)
        }

    async def _update(self, engine: Engine, version: int) -> None:
        if not isinstance(engine, RefitFromDisk):
            raise EngineRejected(engine.name, "does not load weights from a disk.", status=501)
        await engine.update_from_disk(self._path(version), version)

    def _path(self, version: int) -> Path:
        return self._folder / f"version-{version:08d}"


def configuration(seed: int) -> SchedulerConfig:
    """How the run of this seed schedules."""
    rng = np.random.default_rng((seed, 2))
    straggler = str(rng.choice(["retract", "in_place", "abort", "run", "choose"]))
    synchronous = bool(rng.random() < 0.5)
    refills = ["wave", "pool"]
    if synchronous and straggler in ("retract", "abort"):
        refills.append("buckets")
    ratio = float(rng.choice([1.0, 1.5, 2.5]))
    refill = str(rng.choice(refills))
    return SchedulerConfig(
        batch_groups=GROUPS,
        group_size=GROUP_SIZE,
        over_provision=ratio,
        refill=Pool(together=2) if refill == "pool" else refill,  # type: ignore[arg-type]
        straggler=straggler,  # type: ignore[arg-type]
        pace="synchronous" if synchronous else "asynchronous",
        max_staleness=int(rng.choice([2, 8])) if rng.random() < 0.5 else None,
        health=Health(fleet_wait_s=FLEET_WAIT_S),
    )


def run(seed: int, script: dict[str, Any] | None = None) -> dict[str, Any]:
    """The figures of one run, as plain data."""
    random.seed(seed)  # the adapter's retries draw their waits from it
    train_s = TRAIN_S[seed % len(TRAIN_S)]
    horizon_s = BATCHES * (BATCH_S + train_s)
    content = script or random_script(seed, engines=ENGINES, horizon_s=horizon_s)
    config = configuration(seed)
    names = ("straggler", "refill", "over_provision", "pace", "max_staleness")
    figures = Figures(
        seed=seed,
        kinds=[fault["kind"] for fault in content["fault"]],
        config={name: getattr(config, name) for name in names} | {"train_s": train_s},
        script=content,
    )
    with TemporaryDirectory() as folder:
        publisher = Checkpoints(Path(folder))
        publisher.write(3 * BATCHES)
        try:
            run_virtual(_Run(figures, config, faults_of(content), publisher).execute())
        except Exception as error:  # whatever it is, it is what this campaign looks for
            figures.ending = type(error).__name__
            figures.error = "".join(traceback.format_exception(error))[-4000:]
    return asdict(figures)


class _Run:
    def __init__(
        self,
        figures: Figures,
        config: SchedulerConfig,
        script: FaultScript,
        checkpoints: Checkpoints,
    ) -> None:
        self.figures = figures
        self.config = config
        self.script = script
        self.checkpoints = checkpoints
        self.watch = Watch()
        self.summary = Summary(trainer_waits=config.pace == "synchronous")
        self.summary.warns = False
        self.model = ToyModel(VOCAB)
        self.servers: list[SimServer] = []
        self.refused = 0
        """Updates in a row that no engine took."""

    async def execute(self) -> None:
        async with AsyncExitStack() as stack:
            seed = self.figures.seed
            # An address of its own for each server: names, and so the run, do not depend on which
            # ports are free.
            hosts = [
                f"127.{seed // 250 % 250 + 1}.{seed % 250 + 1}.{n + 1}" for n in range(ENGINES)
            ]
            for index, host in enumerate(hosts):
                server = SimServer(
                    MACHINE,
                    host=host,
                    port=31000,
                    faults=self.script.of_engine(index),
                    refit_seconds=0.2,
                )
                self.servers.append(await stack.enter_async_context(server))
            try:
                async with asyncio.timeout(DEADLINE_S):
                    await self._with_scheduler()
            except TimeoutError:
                self.figures.ending = "hung"
            self._count()
            await asyncio.sleep(AFTERWARDS_S)
            for server in filter(lambda server: server.listening, self.servers):
                batcher = server.engine.batcher
                self.figures.left_paused += batcher.paused is not None
                self.figures.left_running += batcher.running + batcher.waiting

    async def _with_scheduler(self) -> None:
        prompts = LongTailWorkload(
            median=150,
            sigma=0.8,
            cap=1500,
            group_size=GROUP_SIZE,
            vocab_size=VOCAB,
            seed=self.figures.seed,
        )
        fleet = SGLangFleet(
            [server.url for server in self.servers],
            stream_interval=INTERVAL,
            limits=HttpLimits(max_answer_bytes=2**20),
        )
        scheduler = RolloutScheduler(
            fleet,
            prompts,
            config=self.config,
            listeners=(self.summary, self.watch),
            run_id=f"campaign{self.figures.seed:08d}",
        )
        self.scheduler = scheduler
        self.watch.state = scheduler.state
        try:
            async with scheduler as rollouts:
                await self._train(rollouts)
                self.figures.ending = "done"
                silences = self.watch.silences(asyncio.get_running_loop().time())
                self.figures.longest_silence = max(silences, default=0.0)
        except (FleetLost, RefitError, RunGivenUp, PromptsExhausted, ConfigError) as error:
            self.figures.ending, self.figures.error = type(error).__name__, str(error)
        state = scheduler.state
        causes = Counter(
            cause_of(e.cause) for e in state.in_flight.ledger.entries if e.reason == "failed"
        )
        self.figures.dropped_for = dict(causes)
        result = self.summary.result(remainder(state), clock="virtual")
        self.figures.rollouts, self.figures.tokens = asdict(result.rollouts), asdict(result.tokens)
        self.figures.retries = state.in_flight.counters.retries
        self.figures.batches = result.batches

    async def _train(self, rollouts: RolloutScheduler) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(BATCHES):
            asked = loop.time()
            while True:
                try:
                    self._check(await rollouts.next_batch())
                    break
                except RefitError:  # no engine has whole weights
                    await self._update(rollouts)
            self.figures.longest_batch = max(self.figures.longest_batch, loop.time() - asked)
            await asyncio.sleep(self.figures.config["train_s"])
            await self._update(rollouts)

    async def _update(self, rollouts: RolloutScheduler) -> None:
        try:
            await rollouts.update_weights(self.checkpoints)
            self.refused = 0
        except RefitError:
            self.figures.refit_errors += 1
            self.refused += 1
            if self.refused > REFUSALS:
                raise
            await asyncio.sleep(1.0)

    def _check(self, batch: Batch) -> None:
        for group in batch.groups:
            for rollout in group.rollouts:
                constant = len(rollout) > 0 and len(set(rollout.versions.tolist())) == 1
                if rollout.versions_exact and (constant or self.config.straggler in RECOMPUTES):
                    self.figures.checked += 1
                    self.figures.wrong += not is_right(rollout, group.prompt, self.model)

    def _count(self) -> None:
        figures, watch = self.figures, self.watch
        figures.seconds = asyncio.get_running_loop().time()
        figures.failed_attempts = watch.failed_attempts
        figures.losses, figures.standby = dict(watch.losses), watch.standby
        figures.readmitted, figures.recoveries = watch.readmitted, watch.recoveries
        fired: Counter[str] = Counter()
        for server in self.servers:
            fired += server.faults.fired
            for happened in server.faults.log:
                any_engine = watch.next_token(happened.at)
                own = watch.next_token(happened.at, server.url.removeprefix("http://"))
                figures.next_token = max(figures.next_token, any_engine or 0.0)
                figures.own_next_token += [] if own is None else [own]
        figures.fired = dict(fired)


if __name__ == "__main__":
    import json
    import sys

    for number in map(int, sys.argv[1:]):
        print(json.dumps(run(number), indent=1))
