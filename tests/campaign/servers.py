"""Runs one seed of faulty servers, with the real scheduler and the real adapters.

The servers are real HTTP over loopback, on the virtual clock. Every delivered token is compared
with the truth.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from aprilsched import (
    DiskPublisher,
    LongTailWorkload,
    RolloutScheduler,
    SchedulerConfig,
    SGLangFleet,
)
from aprilsched.config import Dispatch, Health, Retries, Timeouts
from aprilsched.errors import ConfigError, FleetLost, PromptsExhausted, RefitError, RunGivenUp
from aprilsched.kernel.engines.http import HttpLimits
from aprilsched.planning.step_times.model import H200_QWEN3_4B
from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.types import Rollout, SamplingParams, Unit
from tests.campaign.checks import Checks, Records
from tests.campaign.clockwork import VirtualThreads
from tests.campaign.history import History, Outcome, recorded
from tests.campaign.mix import Mix
from tests.campaign.publishing import ChaosPlanner
from tests.campaign.random_faults import Script, random_script
from tests.campaign.truth import CONTENT, TruthModel, file_key, sampling_of
from tests.support.faults import FaultyServer

ENGINES = 3
BATCHES = 12
VOCAB = 512
INTERVAL = 16
TRAIN_S = (1.0, 10.0, 60.0)
REFUSALS = 300
"""Consecutive updates, a second apart, that reach no engine before the trainer gives up."""
BATCH_S = 8.0
"""Approximate time of a batch on these engines."""
DEADLINE_S = 6 * 3600.0
"""In virtual time; a task that is not done by then counts as hanging."""
AFTERWARDS_S = 3600.0
"""After closing, faults stop, and no request of the run may be left on an engine."""

MACHINE = SimConfig(
    # 25 tokens/s for each response, so that few tokens take as long as the timeouts of the
    # scheduler and its windows for slow engines.
    timing=replace(H200_QWEN3_4B, t0=0.04),
    stream_interval=INTERVAL,
    vocab_size=VOCAB,
    stream_at_pause=False,
    model=TruthModel,
)
NARROW = replace(MACHINE, max_running=2, max_queued=2)
"""The machine in a third of the seeds: 3 of them have room for 12 of the 16 rollouts of a batch."""


class Checkpoints(DiskPublisher):
    """Publishes checkpoints whose content identifies their version."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, self._write, keep=3 * BATCHES)
        self._version = 0

    async def prepare(self, version: int) -> None:
        self._version = version
        await super().prepare(version)

    def _write(self, path: Path) -> None:
        (path / "config.json").write_text("{}")
        (path / "model.safetensors").write_text(CONTENT.format(self._version))


class _Checks(Checks):
    """Checks rollouts of one turn, with weights loaded from files."""

    weights_key = staticmethod(file_key)

    def asked(self, rollout: Rollout, group: Unit) -> list[SamplingParams]:
        return sampling_of(rollout, group.prompt, len(group.rollouts))


def settings_of(mix: Mix) -> SchedulerConfig:
    """Return the settings of the schedule. Batches, bounds and timeouts are the same in each seed,
    so that the durations of seeds can be compared."""
    return replace(
        mix.config(),
        batch_groups=4,
        group_size=4,
        dispatch=Dispatch(),
        retries=Retries(),
        timeouts=Timeouts(),
        health=Health(fleet_wait_s=600.0),
        # Responses are sampled from the whole vocabulary, so servers return no masks.
        companions=mix.config().companions[:1],
    )


def run(seed: int, *, companions: bool = False) -> Outcome:
    """Run a seed. Complaints are in the outcome; nothing is raised."""
    random.seed(seed)  # the adapter draws its retry delays from it
    mix = replace(Mix.of(seed, only=(), companions=companions), episodes=False)
    horizon_s = BATCHES * (BATCH_S + TRAIN_S[seed % len(TRAIN_S)])
    script = random_script(seed, engines=ENGINES, horizon_s=horizon_s)
    kinds = [fault.kind for fault, _ in script]
    outcome = Outcome(seed, kinds=kinds, settings=mix.described())
    history = History()
    history.note(f"{script}")
    with TemporaryDirectory() as folder:
        trial = _Run(mix, outcome, history, script, Path(folder))
        return recorded(outcome, history, trial.execute())


class _Run:
    """The run of one seed: its servers, and a trainer that checks every rollout against the
    truth."""

    def __init__(
        self, mix: Mix, outcome: Outcome, history: History, script: Script, folder: Path
    ) -> None:
        self.mix = mix
        self.config = settings_of(mix)
        self.outcome = outcome
        self.history = history
        self.script = script
        self.checkpoints = Checkpoints(folder)
        self.train_s = TRAIN_S[mix.seed % len(TRAIN_S)]
        self.checks = _Checks(mix, Records(), outcome.complaints.append)
        self.servers: list[FaultyServer] = []
        self.figures: Counter[str] = Counter()
        self.refused = 0
        """Consecutive updates that no engine accepted."""

    async def execute(self) -> None:
        loop, seed = asyncio.get_running_loop(), self.outcome.seed
        VirtualThreads(lambda name: 0.01).install(loop)
        async with AsyncExitStack() as stack:
            # Each server has its own address: then names, and so the run, do not depend on free
            # ports.
            net = f"127.{seed // 250 % 250 + 1}.{seed % 250 + 1}"
            for index in range(ENGINES):
                server = FaultyServer(
                    replace(NARROW if seed // 3 % 3 == 0 else MACHINE, tier=self.mix.machine.tier),
                    host=f"{net}.{index + 1}",
                    port=31000,
                    faults=[fault for fault, engines in self.script if index in engines],
                    seed=(seed, index),
                    refit_seconds=0.2,
                )
                self.servers.append(await stack.enter_async_context(server))
            try:
                async with asyncio.timeout(DEADLINE_S):
                    self.outcome.ending.append(await self._with_scheduler())
            except TimeoutError:
                self.outcome.complaints.append(f"not done after {DEADLINE_S:g} s")
            self.outcome.seconds = loop.time()
            await asyncio.sleep(AFTERWARDS_S)
            for server in self.servers:
                self.figures["faults"] += server.faults.fired.total()
                if server.listening:
                    batcher = server.engine.batcher
                    self.figures["left_paused"] += batcher.paused is not None
                    self.figures["left_running"] += batcher.running + batcher.waiting
        self.outcome.figures = dict(self.figures + self.checks.figures)
        if left := self.figures["left_running"]:
            self.outcome.complaints.append(f"{left} requests are left on servers")

    async def _with_scheduler(self) -> str:
        """Run the seed and return how it ended."""
        distribution: dict[str, Any] = {"median": 150, "sigma": 0.8, "cap": 1500, "group_size": 4}
        prompts = LongTailWorkload(**distribution, vocab_size=VOCAB, seed=self.outcome.seed)
        fleet = SGLangFleet(
            [server.url for server in self.servers],
            stream_interval=INTERVAL,
            limits=HttpLimits(max_answer_bytes=2**20),
        )
        scheduler = RolloutScheduler(
            fleet,
            prompts,
            config=self.config,
            planner=ChaosPlanner(self.mix),
            listeners=(self.checks, self.history),
            run_id=f"campaign{self.outcome.seed:08d}",
        )
        self.checks.state = scheduler.state
        ending = "done"
        try:
            async with scheduler as rollouts:
                await self._train(rollouts)
        except (FleetLost, RefitError, RunGivenUp, PromptsExhausted, ConfigError) as error:
            ending = f"{type(error).__name__}: {error}"
        self.checks.end(scheduler.state)
        return ending

    async def _train(self, rollouts: RolloutScheduler) -> None:
        for _ in range(BATCHES):
            while True:
                try:
                    batch = await rollouts.next_batch()
                    self.checks.batch(
                        batch, version=rollouts.version, secured=False, settings=self.mix.settings
                    )
                    break
                except RefitError:  # no engine has consistent weights
                    await self._update(rollouts)
            await asyncio.sleep(self.train_s)
            await self._update(rollouts)

    async def _update(self, rollouts: RolloutScheduler) -> None:
        try:
            await rollouts.update_weights(self.checkpoints)
            self.refused = 0
        except RefitError:
            self.refused += 1
            if self.refused > REFUSALS:
                raise
            await asyncio.sleep(1.0)
