"""A whole run in virtual time: core, engines, trainer, prompts and rewards on one agenda.

Invariant: the decisions are those of production, because the same core makes them; only the
commands are carried out by other code.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from aprilsched.core.config import Caller, SchedulerConfig
from aprilsched.core.messages import commands as do
from aprilsched.core.messages import events as ev
from aprilsched.core.scheduler import Scheduler
from aprilsched.core.state.state import SchedulerState
from aprilsched.driver.forecasts import ForecastErrors
from aprilsched.driver.loop import EventLoop
from aprilsched.engines.sim.config import SimConfig
from aprilsched.errors import AprilschedError, ConfigError, FleetLost, RunGivenUp
from aprilsched.planning import Planner
from aprilsched.simulation.agenda import Agenda
from aprilsched.simulation.modelled_engine import ModelledEngine
from aprilsched.simulation.trainer import Costs, ModelledTrainer
from aprilsched.telemetry.base import AnyListener
from aprilsched.types import Group, Prompt, Score

__all__ = ["NEVER", "Simulation", "rare_collections"]

NEVER = 1 << 30
"""A stream interval with which chunks come only when a response ends or is paused. This changes no
decision and makes a run twice as fast, except with rolling refits."""
_OFTEN = 128
"""The largest stream interval with rolling refits, in tokens."""


@runtime_checkable
class Redraws(Protocol):
    """Prompts whose responses have other lengths each time that they are generated."""

    def lengths_again(self, prompt: Prompt, draw: int) -> Sequence[int] | NDArray[np.int64]:
        """The lengths of the responses to `prompt`, one for each; `draw` numbers the times."""
        ...


class Simulation:
    """One simulated run, which :meth:`run` carries out.

    Args:
        config: configuration of the scheduler. Episodes are not simulated.
        prompts: the prompts; each response has the length that ``max_new_tokens`` gives. With a
            method ``lengths_again``, a prompt that is generated again, because its tokens became
            too stale, has the lengths that this gives.
        engines: number of engines.
        engine: settings of every engine, or a list with those of each.
        costs: durations of everything else.
        batches: number of batches that the trainer takes.
        update_every: number of batches between two versions; 0 for a single version.
        streamed: whether the trainer takes each batch group by group.
        accept: filters groups, as in RolloutScheduler.
        planner: chooses schedules for ``over_provision="auto"``; by default one that knows the
            first engine's own model.
        listeners: objects that see every event and command.

    Raises:
        ConfigError: if `engine` is a list of another length than `engines`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        prompts: Iterable[Prompt],
        *,
        engines: int = 1,
        engine: SimConfig | Sequence[SimConfig] | None = None,
        costs: Costs | None = None,
        batches: int = 40,
        update_every: int = 1,
        streamed: bool = False,
        accept: Callable[[Group], bool] | None = None,
        planner: Planner | None = None,
        listeners: Sequence[AnyListener] = (),
    ) -> None:
        self.agenda = Agenda()
        self._costs = costs or Costs()
        self._prompts: Iterator[Prompt] = iter(prompts)
        self._redraws = prompts if isinstance(prompts, Redraws) else None
        self._accept = accept
        self._failure: AprilschedError | None = None
        caller = Caller(
            reward_scope="rollout" if self._costs.reward_seconds else "none",
            accepts=accept is not None,
        )
        engine = engine or SimConfig(make_tokens=False, stream_interval=NEVER)
        models = [engine] * engines if isinstance(engine, SimConfig) else list(engine)
        if len(models) != engines:
            raise ConfigError(
                f"there are {engines} engines and settings for {len(models)}; give one for each."
            )
        races = config.policies.refill.launched(config.group_size) > config.group_size
        if config.refit == "rolling" or races:
            # What it costs to move a response depends on the length that it has so far, and so does
            # what is known of the length of one that is thrown away in the middle of a batch.
            models = [replace(m, stream_interval=min(m.stream_interval, _OFTEN)) for m in models]
        self._config = config
        first = models[0]
        self._planner = planner or Planner(first.timing, max_running=first.max_running)
        if config.automatic:
            errors = ForecastErrors(self._planner, trainer_waits=config.trainer_waits)
            listeners = [*listeners, errors]
        self._loop = EventLoop(Scheduler(config, caller), listeners, clock=lambda: self.agenda.now)
        self.engines = {
            name: ModelledEngine(
                name, model, self.agenda, self._loop.feed, pause_seconds=self._costs.pause_seconds
            )
            for name, model in ((f"sim-{index}", model) for index, model in enumerate(models))
        }
        self.trainer = ModelledTrainer(
            self.agenda,
            self._loop.feed,
            batches=batches,
            update_every=update_every,
            train_seconds=self._costs.train_seconds,
            batch_groups=config.batch_groups,
            streamed=streamed,
        )
        self._wire()

    @property
    def state(self) -> SchedulerState:
        return self._loop.core.state

    def run(self) -> None:
        """Run to the last batch, or to the end of the prompts.

        Raises:
            AprilschedError: if a real run would end too: no engine is left, or too many groups
                failed.
        """
        feed = self._loop.feed
        infos = (
            ev.EngineInfo(
                name=name,
                version=0,
                kv_tokens=e.batcher.config.kv_tokens,
                max_running=e.batcher.config.max_running,
            )
            for name, e in self.engines.items()
        )
        feed(ev.Opened(engines=tuple(infos)))
        self.trainer.begin()
        while not self.trainer.done and self._failure is None:
            if not self.agenda.step():
                raise AssertionError("nothing is due and the trainer still waits")
        if self._failure is not None:
            raise self._failure

    # --- commands ------------------------------------------------------------------------------

    def _wire(self) -> None:
        engines, trainer = self.engines, self.trainer
        self._loop.performers.update(
            {
                do.FetchPrompts: self._fetch,
                do.Launch: self._launch,
                do.Send: lambda c: engines[c.engine].send(c),
                do.Abort: lambda c: engines[c.engine].abort(c),
                do.Pause: lambda c: engines[c.engine].pause(c),
                do.Flush: lambda c: engines[c.engine].flush(c),
                do.Continue: lambda c: engines[c.engine].resume(),
                do.Verify: lambda c: engines[c.engine].verify(),
                do.Refit: self._refit,
                do.ScoreRollout: self._score,
                do.Filter: self._filter,
                do.Plan: self._plan,
                do.CancelWork: lambda _: None,
                do.AdmitEngine: lambda _: None,
                do.LoseEngine: self._lose_engine,
                do.AwaitFleet: lambda _: None,
                do.GiveUpFleet: lambda _: None,
                do.GiveUp: self._give_up,
                do.FinishUpdate: trainer.finish_update,
                do.Offer: trainer.take,
                do.WithdrawOffer: trainer.withdraw,
                do.Deliver: trainer.deliver,
                do.EndOfPrompts: self._end_prompts,
            }
        )

    def _fetch(self, command: do.FetchPrompts) -> None:
        prompts = tuple(islice(self._prompts, command.count))
        last = len(prompts) < command.count
        self._loop.feed(ev.PromptsArrived(prompts=prompts, last=last))

    def _launch(self, command: do.Launch) -> None:
        """Give the group other lengths if its prompt is generated again. A length is a limit here,
        so the group's record has it."""
        group = self.state.in_flight.groups.get(command.group_id)
        if group is None or group.again is None or self._redraws is None:
            return
        lengths = self._redraws.lengths_again(group.prompt, group.group_id)[: group.size]
        for member, length in zip(group.members, lengths, strict=True):
            member.sampling = replace(member.sampling, max_new_tokens=int(length))
            if member.request is not None:
                member.request.sampling = member.sampling

    def _refit(self, command: do.Refit) -> None:
        def loaded() -> None:
            for name in command.engines:
                self.engines[name].refit(command.version, catch_up=command.catch_up)

        self.agenda.after(self._costs.refit_seconds, loaded)

    def _score(self, command: do.ScoreRollout) -> None:
        rollout_id = command.rollout.rollout_id
        self.agenda.after(
            self._costs.reward_seconds,
            lambda: self._loop.feed(ev.Rewarded(rollout_id=rollout_id, score=Score(reward=0.0))),
        )

    def _filter(self, command: do.Filter) -> None:
        accepted = self._accept is None or self._accept(command.group)
        self._loop.feed(ev.Filtered(group_id=command.group.group_id, accepted=accepted))

    def _plan(self, command: do.Plan) -> None:
        self._loop.feed(ev.Planned(schedule=self._planner.plan(command, self._config)))

    def _lose_engine(self, command: do.LoseEngine) -> None:
        if command.last:
            self._failure = FleetLost(f"no engine is left: {command.cause}")

    def _give_up(self, command: do.GiveUp) -> None:
        self._failure = command.error

    def _end_prompts(self, command: do.EndOfPrompts) -> None:
        if isinstance(command.error, RunGivenUp):
            self._failure = command.error
        else:
            self.trainer.end(command)


_THRESHOLDS = (50_000, 20, 20)


@contextmanager
def rare_collections() -> Generator[None]:
    """Make garbage collections rare, and exclude all present objects from them.

    This is for a process that does nothing else, because it changes the whole interpreter.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
