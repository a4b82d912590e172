"""The engines' tracks of a trace: their states, requests and KV pools."""

from __future__ import annotations

from dataclasses import dataclass

from aprilsched.kernel.core.messages import facts as of
from aprilsched.observe.exports.trace import Bands, TraceFile, Tracks

TIDS = 100_000
"""Number of track ids of a process."""
_SLOTS = 10
"""Number of track ids for the bands of an engine, before the ids of its slots."""
_STEP = 0.01
"""The counter of known tokens is written when its value has changed by this share. Otherwise each
chunk would add an event, for changes too small to see."""
_ENDINGS = ("mn", "eg", "dr", "uk", "ri", "ir", "pa", "pf")
"""Perfetto takes the colour of a slice from its name and ignores the digits in it, so a name ends
in letters that change with the version. After "rollout v", these names give blue, orange, green,
pink, violet, lime, teal and red in the UI of Perfetto 52. They have no other meaning."""


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt:
    """An open attempt on an engine, and its current slice."""

    sent: of.AttemptSent
    track: int
    known: int
    """Number of tokens of its prompt and output so far."""
    first_version: int | None
    """The version that the rollout's first token was to be sampled with."""
    version: int | None = None
    since: int | None = None
    """Start of its slice; None before the first slice."""
    until: int | None = None
    """End of its slice; None while the engine works on it."""
    tokens: int = 0
    """Number of tokens in its slice."""


class EngineTracks:
    """The tracks of an engine, which is process `pid`: its slots with the rollouts in them, its
    bands and its counters.

    An attempt keeps its slot from its sending to its end. It has a slice for each stretch in which
    the engine works on it under one version, so a pause is a gap. A token counts in the slice in
    which it arrived, or in the last one before if it arrived in a gap.
    """

    def __init__(self, file: TraceFile, *, pid: int, name: str) -> None:
        self.version: int | None = None
        self.attempts: dict[int, Attempt] = {}
        """The open attempts, by the id of their request."""
        self.released: set[str] = set()
        """Tags of the memory that the engine has released."""
        self.waking: tuple[str, ...] = ()
        """Tags of the memory being resumed."""
        self.flushed = False
        """Whether its cache is empty: it was flushed and has not been continued yet."""
        self._file = file
        self._pid = pid
        self._known = 0
        """Tokens of all open attempts."""
        self._paused = False
        self._written: dict[str, int] = {}
        """The last written values of the counters."""
        file.name(f"engine {name}", pid)
        self.bands = Bands(file, pid=pid, first=pid * TIDS + 1, category="state")
        self._slots = Tracks(file, pid=pid, first=pid * TIDS + _SLOTS, name="slot {:03}")

    def send(self, sent: of.AttemptSent, first_version: int | None, at: int) -> None:
        attempt = Attempt(
            sent=sent, track=self._slots.take(), known=sent.tokens, first_version=first_version
        )
        self.attempts[sent.request_id] = attempt
        self._known += attempt.known
        if not self._paused:
            self._start(attempt, at)

    def progress(self, request_id: int, tokens: int) -> None:
        attempt = self.attempts[request_id]
        attempt.tokens += tokens
        attempt.known += tokens
        self._known += tokens

    def close(self, request_id: int, ending: str, at: int) -> None:
        attempt = self.attempts.pop(request_id)
        self._known -= attempt.known
        self._write(attempt, ending, at)
        self._slots.free(attempt.track)

    def pause(self, at: int) -> None:
        """No attempt continues until :meth:`go_on`."""
        self._paused = True
        for attempt in self.attempts.values():
            if attempt.until is None:
                attempt.until = at

    def go_on(self, at: int) -> None:
        if self._paused:
            self._paused = self.flushed = False
            for attempt in self.attempts.values():
                self._write(attempt, "paused", at)
                self._start(attempt, at)

    def refitted(self, version: int | None, at: int) -> None:
        """Start slices of the new version for the attempts that continue."""
        changed, self.version = version != self.version, version
        for attempt in self.attempts.values() if changed else ():
            if attempt.until is None and attempt.sent.adapter is None:
                self._write(attempt, "refit", at)
                self._start(attempt, at)

    def stop(self, ending: str, at: int) -> None:
        """End everything that is open, for example because the process of the run has ended."""
        for request_id in list(self.attempts):
            self.close(request_id, ending, at)
        self.bands.end_all(at)
        self.released.clear()
        self._paused = self.flushed = False
        self.count(at)

    def count(self, at: int) -> None:
        """Write the counters that have changed enough to be seen, or from or to 0."""
        known = 0 if self.flushed else self._known
        for name, unit, value, step in (
            ("in flight", "requests", len(self.attempts), 0.0),
            ("KV", "tokens", known, _STEP),
        ):
            before = self._written.get(name, 0)
            if value != before and not (value and abs(value - before) < step * before):
                self._written[name] = value
                self._file.write("C", name, at, self._pid, 0, {unit: value})

    def _start(self, attempt: Attempt, at: int) -> None:
        adapter = attempt.sent.adapter
        attempt.version = self.version if adapter is None else adapter
        attempt.since, attempt.until, attempt.tokens = at, None, 0

    def _write(self, attempt: Attempt, ending: str, at: int) -> None:
        since, sent, version = attempt.since, attempt.sent, attempt.version
        end = at if attempt.until is None else attempt.until
        if since is None or (end == since and not attempt.tokens):
            return
        ended = "?" if version is None else f"{version} {_ENDINGS[version % len(_ENDINGS)]}"
        args = {
            "rollout_id": sent.rollout_id,
            "group_id": sent.group_id,
            "request_id": sent.request_id,
            "attempt": sent.attempt,
            "tokens": attempt.tokens,
            "version": version,
            "carried": version != attempt.first_version,
            "ending": ending,
        }
        name, more = f"rollout {sent.rollout_id} v{ended}", {"dur": end - since, "cat": "rollout"}
        self._file.write("X", name, since, self._pid, attempt.track, args, **more)
