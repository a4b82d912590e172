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
from aprilsched.observe.figures.summary import Summary
from aprilsched.planning.step_times.model import H200_QWEN3_4B
from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.simulation.results import remainder
from aprilsched.types import NO_VERSION, Batch, Rollout
from tests.campaign.clockwork import VirtualThreads
from tests.campaign.history import History, Outcome, recorded
from tests.campaign.mix import Mix
from tests.campaign.publishing import ChaosPlanner
from tests.campaign.random_faults import Script, random_script
from tests.campaign.truth import (
    CONTENT,
    TruthModel,
    file_key,
    is_right,
    sampling_of,
    true_versions,
    wrong_rows,
)
from tests.support.checking import Checking
from tests.support.faults import FaultyServer

ENGINES = 3
BATCHES = 12
VOCAB = 512
INTERVAL = 16
TRAIN_S = (1.0, 10.0, 60.0)
REFUSALS = 300
"""Updates in a row that reach no engine, a second apart, after which the trainer gives up."""
BATCH_S = 8.0
"""About what the engines need for a batch."""
DEADLINE_S = 6 * 3600.0
"""Of virtual time: whoever is not done by then hangs."""
AFTERWARDS_S = 3600.0
"""After closing: faults end, and nothing of ours may be left on an engine."""

MACHINE = SimConfig(
    # 25 tokens/s for each response, so that few tokens take as long as the scheduler's timeouts
    # and the windows in which it looks for slow engines are made for.
    timing=replace(H200_QWEN3_4B, t0=0.04),
    stream_interval=INTERVAL,
    vocab_size=VOCAB,
    stream_at_pause=False,
    model=TruthModel,
)
NARROW = replace(MACHINE, max_running=2, max_queued=2)
"""The machine of a third of the seeds: 3 of them have room for 12 of the 16 rollouts of a batch."""
RECOMPUTES = ("retract", "abort", "run")
"""Stragglers of these have every context computed under the weights that sample after it."""


class Checkpoints(DiskPublisher):
    """Publishes checkpoints whose content names their version."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, self._write, keep=3 * BATCHES)
        self._version = 0

    async def prepare(self, version: int) -> None:
        self._version = version
        await super().prepare(version)

    def _write(self, path: Path) -> None:
        (path / "config.json").write_text("{}")
        (path / "model.safetensors").write_text(CONTENT.format(self._version))


def settings_of(mix: Mix) -> SchedulerConfig:
    """What the mix has for the schedule; batches, bounds and timeouts are the same in each seed, so
    that the seeds' times can be compared."""
    return replace(
        mix.config(),
        batch_groups=4,
        group_size=4,
        dispatch=Dispatch(),
        retries=Retries(),
        timeouts=Timeouts(),
        health=Health(fleet_wait_s=600.0),
        # Responses are sampled from the whole vocabulary, of which servers return no masks.
        companions=mix.config().companions[:1],
    )


def run(seed: int, *, companions: bool = False, aloud: bool = False) -> Outcome:
    """Run a seed. Complaints are in the outcome; nothing is raised."""
    random.seed(seed)  # the adapter's retries draw their waits from it
    mix = Mix.of(seed, only=(), companions=companions)
    horizon_s = BATCHES * (BATCH_S + TRAIN_S[seed % len(TRAIN_S)])
    script = random_script(seed, engines=ENGINES, horizon_s=horizon_s)
    kinds = [fault.kind for fault, _ in script]
    outcome = Outcome(seed, kinds=kinds, settings=mix.described())
    history = History(aloud=aloud)
    history.note(f"{script}")
    with TemporaryDirectory() as folder:
        trial = _Run(mix, outcome, history, script, Path(folder))
        return recorded(outcome, history, trial.execute())


class _Run:
    """The run of one seed: its servers, and a trainer that holds every rollout to the truth."""

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
        self.checking = Checking()
        self.summary = Summary(trainer_waits=self.config.pace == "synchronous")
        self.model = TruthModel(VOCAB)
        self.servers: list[FaultyServer] = []
        self.figures: Counter[str] = Counter()
        self.refused = 0
        """Updates in a row that no engine took."""

    async def execute(self) -> None:
        loop, seed = asyncio.get_running_loop(), self.outcome.seed
        VirtualThreads(lambda name: 0.01).install(loop)
        async with AsyncExitStack() as stack:
            # An address of its own for each server: names, and so the run, do not depend on which
            # ports are free.
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
        self.outcome.figures = dict(self.figures)
        for name in ("lost", "duplicated", "wrong", "left_running"):
            if self.figures[name]:
                self.outcome.complaints.append(f"{self.figures[name]} rollouts are {name}")

    async def _with_scheduler(self) -> str:
        """Returns how it ended."""
        law: dict[str, Any] = {"median": 150, "sigma": 0.8, "cap": 1500, "group_size": 4}
        prompts = LongTailWorkload(**law, vocab_size=VOCAB, seed=self.outcome.seed)
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
            listeners=(self.summary, self.checking, self.history),
            run_id=f"campaign{self.outcome.seed:08d}",
        )
        self.checking.scheduler = scheduler
        ending = "done"
        try:
            async with scheduler as rollouts:
                await self._train(rollouts)
        except (FleetLost, RefitError, RunGivenUp, PromptsExhausted, ConfigError) as error:
            ending = f"{type(error).__name__}: {error}"
        state = scheduler.state
        failed = [entry for entry in state.in_flight.ledger.entries if entry.reason == "failed"]
        self.figures["groups_dropped"] += len(failed)
        result = self.summary.result(remainder(state), clock="virtual")
        for name in ("launched", "delivered", "in_flight", "lost", "duplicated"):
            self.figures[name] += getattr(result.rollouts, name)
        return ending

    async def _train(self, rollouts: RolloutScheduler) -> None:
        for _ in range(BATCHES):
            while True:
                try:
                    self._check(await rollouts.next_batch())
                    break
                except RefitError:  # no engine has whole weights
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

    def _check(self, batch: Batch) -> None:
        for group in batch.groups:
            for rollout in group.rollouts:
                if rollout.versions_exact:
                    asked = sampling_of(rollout, group.prompt, len(group.rollouts))
                    self.figures["checked"] += 1
                    self.figures["wrong"] += not any(self._is_true(rollout, s) for s in asked)

    def _is_true(self, rollout: Rollout, sampling: Any) -> bool:
        """Each version is that which sampled its token, and each token what it samples there."""
        if len(rollout) != sampling.max_new_tokens or rollout.finish_reason != "length":
            return False
        truth = true_versions(rollout.logprobs, rollout.versions != NO_VERSION)
        if (truth != rollout.versions).any() or wrong_rows(rollout, truth, file_key):
            return False
        for companion in rollout.companions.values():
            self.figures["rows"] += int(companion.exact.sum())
            self.figures["rows_of_another_pass"] += int((~companion.exact).sum())
        # Where keys are kept, those of later versions have them of several.
        recomputes = self.config.straggler in RECOMPUTES or self.config.cached_kv == "recompute"
        known = len(set(truth.tolist())) == 1 or recomputes
        # What a run that keeps them has in a tier is found by later requests too.
        kept = self.config.cached_kv == "keep" and self.mix.machine.tier is not None
        known = known and not (kept or rollout.stale_keys)
        return not known or is_right(rollout, sampling, self.model, file_key)
