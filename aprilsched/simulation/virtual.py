"""Runs the production scheduler with modelled engines in virtual time.

It is the second shell around :mod:`aprilsched.kernel.core`. The coordinator uses asyncio and real
engines; this shell uses a heap of timed calls and
:class:`~aprilsched.simulation.engine.batcher.Batcher` objects, and is a hundred times faster than a
virtual event loop.

Invariant: decisions are the same as in production, because the same core makes them; only the code
that carries out commands differs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from numbers import Integral
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from aprilsched.errors import AprilschedError, ConfigError, FleetLost, RunGivenUp
from aprilsched.kernel.core.config import Caller, SchedulerConfig
from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.messages.facts import Fact, GroupLaunched
from aprilsched.kernel.core.scheduler import Scheduler
from aprilsched.kernel.core.state.state import SchedulerState
from aprilsched.kernel.shell.listener import AnyListener
from aprilsched.kernel.shell.loop import EventLoop
from aprilsched.kernel.shell.watches import INTERVAL_S, load_seen
from aprilsched.kernel.values.checks import checked, typed
from aprilsched.planning import Planner
from aprilsched.simulation.agenda import Agenda
from aprilsched.simulation.engine.sequence import drawn_length, with_length
from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.simulation.engine.sim_engine import load_of
from aprilsched.simulation.modelled_engine import ModelledEngine
from aprilsched.simulation.modelled_trainer import Costs, ModelledTrainer
from aprilsched.types import Group, Int32Array, Prompt, SamplingParams, Score

NEVER = 1 << 30
"""A stream interval with which chunks come only when a response ends or is paused. This changes no
decision and makes a run twice as fast, except with rolling refits."""
TIMED = SimConfig(make_tokens=False, stream_interval=NEVER)
"""Engines of which only the time is modelled."""
_OFTEN = 128
"""The largest stream interval with rolling refits, in tokens."""


@runtime_checkable
class Redraws(Protocol):
    """Prompts whose responses have other lengths each time that they are generated."""

    def lengths_again(self, prompt: Prompt, draw: int) -> Sequence[int] | NDArray[np.int64]:
        """The lengths of the responses to `prompt`, one for each; `draw` numbers the times."""
        ...


@dataclass(slots=True)
class _Episode:
    """A response of several turns."""

    sampling: SamplingParams
    context: Int32Array
    tokens: list[int]
    """Number of tokens of each turn that was not asked for yet."""
    pauses: list[float]
    """Seconds of each gap that has not started."""


def checked_config(config: SchedulerConfig) -> None:
    """Check that it is one.

    Raises:
        ConfigError: if it is not, as a recipe that was not called.
    """
    given: Any = config
    if not isinstance(given, SchedulerConfig):
        name = given if isinstance(given, str) else getattr(given, "__name__", "april")
        shown = name if callable(given) else typed(given)
        raise ConfigError(f"config is {shown}; give {name}(config), which is a SchedulerConfig.")


def checked_count(name: str, value: int, *, least: int) -> None:
    """Check that it is a whole number and not below `least`.

    Raises:
        ConfigError: if it is not.
    """
    if checked(name, value, Integral) < least:
        raise ConfigError(f"{name} is {value}; give {least} or more.")


def _models(
    engine: SimConfig | Sequence[SimConfig], engines: int, config: SchedulerConfig
) -> list[SimConfig]:
    """Return the settings of each engine, with chunks as often as `config` needs them."""
    models = [engine] * engines if isinstance(engine, SimConfig) else list(engine)
    if len(models) != engines:
        raise ConfigError(
            f"there are {engines} engines and settings for {len(models)}; give one for each."
        )
    if config.refit == "rolling":
        # The cost of moving a response depends on its current length.
        return [replace(m, stream_interval=min(m.stream_interval, _OFTEN)) for m in models]
    return models


class Simulation:
    """One simulated run, which :meth:`run` carries out.

    Args:
        config: configuration of the scheduler.
        prompts: the prompts; a response has ``max_new_tokens`` tokens with ``ignore_eos``, and
            otherwise ends at ``min_new_tokens``, if that is not 0. If they have a method
            ``lengths_again``, it returns the lengths of a prompt that is generated again because
            its tokens became too stale.
        engines: number of engines.
        engine: settings of every engine, or a list with those of each.
        costs: durations of everything else.
        batches: number of batches that the trainer takes.
        update_every: number of batches between two versions; 0 for a single version.
        streamed: whether the trainer takes each batch group by group.
        accept: filters groups, as in RolloutScheduler.
        pauses: gives the seconds of each gap between the turns of a response, by its prompt and
            its index in the group. Each response is an episode then, whose tokens are divided
            evenly among its turns; None for responses of one turn.
        tool_tokens: number of tokens that each gap appends to the context.
        planner: chooses schedules for ``over_provision="auto"``; by default one that knows the
            first engine's own model.
        listeners: objects that see every event and command.

    Raises:
        ConfigError: if `engine` is a list of another length than `engines`, or another setting
            cannot be used.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        prompts: Iterable[Prompt],
        *,
        engines: int = 1,
        engine: SimConfig | Sequence[SimConfig] = TIMED,
        costs: Costs | None = None,
        batches: int = 40,
        update_every: int = 1,
        streamed: bool = False,
        accept: Callable[[Group], bool] | None = None,
        pauses: Callable[[Prompt, int], Sequence[float]] | None = None,
        tool_tokens: int = 0,
        planner: Planner | None = None,
        listeners: Sequence[AnyListener] = (),
    ) -> None:
        checked_config(config)
        for name, value in (("engines", engines), ("batches", batches)):
            checked_count(name, value, least=1)
        checked_count("update_every", update_every, least=0)
        checked_count("tool_tokens", tool_tokens, least=0)
        self._answer = np.zeros(tool_tokens, dtype=np.int32)
        self.agenda = Agenda()
        self._costs = Costs() if costs is None else costs
        self._prompts: Iterator[Prompt] = iter(prompts)
        self._redraws = prompts if isinstance(prompts, Redraws) else None
        self._accept = accept
        self._failure: AprilschedError | None = None
        caller = Caller(
            reward_scope="rollout" if self._costs.reward_seconds else "none",
            accepts=accept is not None,
            episodes=pauses is not None,
        )
        self._pauses = pauses
        self._episodes: dict[int, _Episode] = {}
        models = _models(engine, engines, config)
        self._config = config
        first = models[0]
        self._planner = planner or Planner(
            first.timing, max_running=first.max_running, dp_ranks=first.dp_ranks
        )
        if self._redraws is not None:
            listeners = [*listeners, self]
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
            batch_units=config.batch_units,
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
        infos = tuple(
            ev.EngineInfo(name=name, version=0, able=each.batcher.config.capabilities)
            for name, each in self.engines.items()
        )
        feed(ev.Opened(engines=infos))
        if self.state.limits_sessions and any(info.able.caches_contexts for info in infos):
            self._report_loads()
        self.trainer.start()
        while not self.trainer.done and self._failure is None:
            if not self.agenda.step():
                raise AssertionError("nothing is due and the trainer still waits")
        if self._failure is not None:
            raise self._failure

    def _report_loads(self) -> None:
        """Report loads once a second, as the coordinator's watch does."""
        for each in self.engines.values():
            load = load_of(each.batcher, self.agenda.now, 1.0)
            if (seen := load_seen(each.name, load)) is not None:
                self._loop.feed(seen)
        self.agenda.after(INTERVAL_S, self._report_loads)

    def _wire(self) -> None:
        engines, trainer = self.engines, self.trainer
        self._loop.performers.update(
            {
                facts.PromptsRequested: self._fetch,
                do.Send: lambda c: engines[c.engine].send(c),
                do.Abort: lambda c: engines[c.engine].abort(c),
                do.Pause: lambda c: engines[c.engine].pause(c),
                do.Flush: lambda c: engines[c.engine].flush(c),
                do.Continue: lambda c: engines[c.engine].resume(),
                do.Verify: lambda c: engines[c.engine].verify(),
                facts.RefitBegun: self._refit,
                do.ScoreRollout: self._score,
                do.Filter: self._filter,
                do.StartEpisode: self._start_episode,
                do.ResolveTurn: self._end_turn,
                do.Plan: self._plan,
                facts.GroupDropped: lambda _: None,
                facts.PromptRefused: lambda _: None,
                facts.EngineAdmitted: lambda _: None,
                facts.EngineLost: self._lose_engine,
                facts.FleetAwaited: lambda _: None,
                facts.FleetGivenUp: lambda _: None,
                do.GiveUp: self._give_up,
                facts.UpdateFinished: trainer.finish_update,
                do.Offer: trainer.take,
                do.WithdrawOffer: trainer.withdraw,
                do.Deliver: trainer.deliver,
                do.EndOfPrompts: self._end_prompts,
            }
        )

    def _fetch(self, command: facts.PromptsRequested) -> None:
        prompts = tuple(islice(self._prompts, command.count))
        last = len(prompts) < command.count
        self._loop.feed(ev.PromptsArrived(prompts=prompts, last=last))

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        """Give each group other lengths whose prompt is generated again."""
        redraws = self._redraws
        for fact in facts:
            if redraws is not None and isinstance(fact, GroupLaunched) and fact.again is not None:
                self._draw_again(redraws, fact.group_id)

    def _draw_again(self, redraws: Redraws, group_id: int) -> None:
        """Give a group other lengths, which are in its record."""
        group = self.state.in_flight.groups.get(group_id)
        if group is None:
            return
        lengths = redraws.lengths_again(group.prompt, group.group_id)[: group.size]
        for member, length in zip(group.members, lengths, strict=True):
            member.sampling = with_length(member.sampling, int(length))
            if member.request is not None:
                member.request.sampling = member.sampling

    def _refit(self, command: facts.RefitBegun) -> None:
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

    def _start_episode(self, command: do.StartEpisode) -> None:
        if self._pauses is not None:
            pauses = list(self._pauses(command.prompt, command.index))
            turns = len(pauses) + 1
            length = drawn_length(command.sampling)
            ends = [length * n // turns for n in range(turns + 1)]
            tokens = [max(1, end - start) for start, end in pairwise(ends)]
            episode = _Episode(command.sampling, command.prompt.input_ids, tokens, pauses)
            self._episodes[command.rollout_id] = episode
            self._ask(command.rollout_id, episode)

    def _ask(self, rollout_id: int, episode: _Episode) -> None:
        sampling = with_length(episode.sampling, episode.tokens.pop(0))
        turn = ev.TurnRequested(rollout_id=rollout_id, input_ids=episode.context, sampling=sampling)
        self._loop.feed(turn)

    def _end_turn(self, command: do.ResolveTurn) -> None:
        rollout_id, episode = command.rollout_id, self._episodes[command.rollout_id]
        episode.context = np.concatenate([episode.context, command.token_ids, self._answer])
        if episode.pauses:
            self.agenda.after(episode.pauses.pop(0), lambda: self._ask(rollout_id, episode))
        else:
            del self._episodes[rollout_id]
            self._loop.feed(ev.EpisodeFinished(rollout_id=rollout_id))

    def _filter(self, command: do.Filter) -> None:
        accepted = self._accept is None or self._accept(cast("Any", command.unit))
        self._loop.feed(ev.Filtered(group_id=command.unit.unit_id, accepted=accepted))

    def _plan(self, command: do.Plan) -> None:
        self._loop.feed(ev.Planned(schedule=self._planner.plan(command, self._config)))

    def _lose_engine(self, command: facts.EngineLost) -> None:
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
