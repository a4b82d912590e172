"""The requests that engines have, and the tokens of their contexts, by engine.

A prompt that the members of a group share counts for each of them, and a context counts while its
engine is paused without its KV: what is said is what the requests need, the most that they hold.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from aprilsched.core import commands as do
from aprilsched.core import events as ev
from aprilsched.core.events import EngineInfo
from aprilsched.telemetry.dispatching import DispatchingListener

__all__ = ["Contexts", "Open"]


@dataclass(slots=True, kw_only=True)
class Open:
    """A request with an engine; `context` is its prompt and all known tokens."""

    attempt: int
    engine: str
    rollout_id: int
    context: int


class Contexts(DispatchingListener):
    """Counts a token when its chunk is there."""

    def __init__(self) -> None:
        super().__init__()
        self.open: dict[int, Open] = {}
        """By request."""
        self.tokens: Counter[str] = Counter()
        """By engine."""
        self.engines: dict[str, EngineInfo] = {}
        """As they said of themselves when they came."""
        self._handlers = {
            ev.Opened: self._opened,
            ev.EngineJoined: self._joined,
            ev.Progress: self._progress,
            ev.Finished: self._came_back,
            ev.Interrupted: self._came_back,
            ev.Failed: self._came_back,
            do.Send: self._send,
            do.LoseEngine: self._lose,
        }

    def _opened(self, event: ev.Opened) -> None:
        self.open.clear()
        self.tokens.clear()
        self.engines = {info.name: info for info in event.engines}

    def _joined(self, event: ev.EngineJoined) -> None:
        self.engines[event.info.name] = event.info

    def _send(self, command: do.Send) -> None:
        self._close(command.request_id)
        context = len(command.input_ids)
        self.open[command.request_id] = Open(
            attempt=command.attempt,
            engine=command.engine,
            rollout_id=command.rollout_id,
            context=context,
        )
        self.tokens[command.engine] += context

    def _progress(self, event: ev.Progress) -> None:
        request = self.open.get(event.request_id)
        if request is not None and request.attempt == event.attempt:
            tokens = len(event.token_ids)
            request.context += tokens
            self.tokens[request.engine] += tokens

    def _came_back(self, event: ev.Finished | ev.Interrupted | ev.Failed) -> None:
        request = self.open.get(event.request_id)
        if request is not None and request.attempt == event.attempt:
            self._close(event.request_id)

    def _close(self, request_id: int) -> None:
        request = self.open.pop(request_id, None)
        if request is not None:
            self.tokens[request.engine] -= request.context

    def _lose(self, command: do.LoseEngine) -> None:
        for request_id in [i for i, r in self.open.items() if r.engine == command.engine]:
            self._close(request_id)
