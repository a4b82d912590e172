"""One modelled engine in virtual time: a batcher that is woken only at its next event.

Invariants:
- All requests that are sent at one instant are in the queue before a pass is planned, because the
  engine is advanced only when its turn on the agenda comes.
- Every attempt that is sent is answered by exactly one Finished or Interrupted.
"""

from __future__ import annotations

from collections.abc import Callable

from aprilsched.errors import ConfigError
from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.engines.base import Chunk, GenerationRequest
from aprilsched.kernel.shell.chunk_buffer import ending, progress
from aprilsched.simulation.agenda import Agenda
from aprilsched.simulation.engine.ranks import batcher_of
from aprilsched.simulation.engine.settings import SimConfig


class ModelledEngine:
    """Carries out the scheduler's commands, and feeds back the events."""

    def __init__(
        self,
        name: str,
        config: SimConfig,
        agenda: Agenda,
        feed: Callable[[ev.Event], None],
        *,
        pause_seconds: float,
    ) -> None:
        self.name = name
        self.batcher = batcher_of(config)
        self._agenda = agenda
        self._feed = feed
        self._pause_seconds = pause_seconds
        self._attempts: dict[str, tuple[int, int]] = {}
        self._names: dict[tuple[int, int], str] = {}
        self._armed: float | None = None

    def send(self, command: do.Send) -> None:
        """Queue an attempt.

        Raises:
            ConfigError: if the KV pool is smaller than its context and its limit.
        """
        key = (command.request_id, command.attempt)
        name = f"{command.rollout_id}-{key[0]}.{key[1]}"
        self._attempts[name] = key
        self._names[key] = name
        request = GenerationRequest(
            request_id=name,
            input_ids=command.input_ids,
            sampling=command.sampling,
            affinity=command.group_id,
            rollout=command.rollout_id,
            rank=command.rank,
        )
        if (why := self.batcher.refusal(request)) is not None:
            raise ConfigError(f"{self.name} refused a request: {why}")
        self.batcher.submit(request, self._agenda.now)
        self._arm()

    def abort(self, command: do.Abort) -> None:
        name = self._names.get((command.request_id, command.attempt), "")
        self.batcher.abort(name, self._agenda.now)
        # An attempt in the queue ends at once; the others end with the step in progress.
        self._agenda.at(self._agenda.now, self._look)
        self._arm()

    def pause(self, command: do.Pause) -> None:
        now = self._agenda.now
        self.batcher.pause(command.mode, now)
        stopped = self.batcher.next_event_time()
        self._arm()
        stands = (now if stopped is None else stopped) + self._pause_seconds
        self._agenda.at(stands, self._confirm_pause)

    def flush(self, _: do.Flush) -> None:
        if self.batcher.flush():
            self._feed(ev.Flushed(engine=self.name))
        else:
            cause = "the cache is in use"
            self._feed(ev.ControlFailed(engine=self.name, call="flush", cause=cause))

    def resume(self) -> None:
        self.batcher.resume(self._agenda.now)
        self._arm()
        self._feed(ev.Continued(engine=self.name))

    def verify(self) -> None:
        self._feed(ev.Verified(engine=self.name, version=self.batcher.version))

    def refit(self, version: int, *, catch_up: bool = False) -> None:
        took = self.batcher.refit(version)
        has = version if took else self.batcher.version
        cause = "" if took else "it was not paused"
        self._feed(ev.Refitted(engine=self.name, version=has, cause=cause, catch_up=catch_up))

    def _confirm_pause(self) -> None:
        self._look()
        self._feed(ev.Paused(engine=self.name))

    def _arm(self) -> None:
        due = self.batcher.next_event_time()
        if due is not None and (self._armed is None or due < self._armed):
            self._armed = due
            self._agenda.at(due, self._wake)

    def _wake(self) -> None:
        # The condition is false for a wake-up that an earlier one has replaced.
        if self._armed is not None and self._armed <= self._agenda.now:
            self._look()

    def _look(self) -> None:
        """Advance the batcher to the present, and report its chunks."""
        if self._armed is not None and self._armed <= self._agenda.now:
            self._armed = None
        for name, chunk in self.batcher.advance(self._agenda.now):
            self._report(name, chunk)
        self._arm()

    def _report(self, name: str, chunk: Chunk) -> None:
        request_id, attempt = self._attempts[name]
        if (news := progress(chunk, request_id, attempt)) is not None:
            self._feed(news)
        if (end := ending(chunk, request_id, attempt)) is not None:
            del self._names[self._attempts.pop(name)]
            self._feed(end)
