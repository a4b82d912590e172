"""The tokens of one rollout while it is being generated, with the version of each.

Invariant: ids and logprobs have one length, and the runs cover it without gap or overlap.

Tokens are only ever appended. Each branch of a rollout is a *path*: a sequence of parts of the log,
so that tokens shared by branches are stored once. The active branch continues at the end of the
log. A response token has a position in the log and another one on the path. The position on the
path is the one that matters to an engine and to the rows of companions.

A token takes 8 bytes (int32 id, float32 logprob), and spare room adds at most half of that.
Versions are stored as runs, and expanded only when the rollout is delivered. A long first chunk is
kept as the array that arrived and never written to: it has no spare room, so the next tokens move
everything to a new array.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from aprilsched.kernel.values.companions import CompanionLog, CompanionRows, Rows
from aprilsched.types import (
    NO_VERSION,
    Answer,
    BoolArray,
    Float32Array,
    Int32Array,
    Segment,
    VersionSpan,
)

_FIRST_ROOM = 64
_GROWTH = 1.5
_NO_IDS: Int32Array = np.empty(0, dtype=np.int32)
_NO_LOGPROBS: Float32Array = np.empty(0, dtype=np.float32)
_NO_COMPANIONS: dict[str, CompanionLog] = {}

Path: TypeAlias = tuple[tuple[int, int], ...]
"""Parts of a log as (start, end), in the order of the log."""

_T = TypeVar("_T", bound=np.generic)


@dataclass(slots=True)
class _Run:
    end: int
    version: int
    engine: str | None


class TokenLog:
    """Growable response tokens with the policy version of each."""

    __slots__ = (
        "_before",
        "_ids",
        "_logprobs",
        "_runs",
        "_shift",
        "answers",
        "companions",
        "exact",
        "size",
        "stale_keys",
    )

    def __init__(self) -> None:
        self._ids = _NO_IDS
        self._logprobs = _NO_LOGPROBS
        self.size = 0
        """Number of response tokens of all branches."""
        self._runs: list[_Run] = []
        self._before: Path = ()
        """The path of the active branch without its last part."""
        self._shift = 0
        """Offset from the path to the log for tokens of the last part."""
        self.exact = True
        """False once the version of some token is unknown."""
        self.stale_keys = False
        """True once a token attends to keys computed by older weights."""
        self.companions: dict[str, CompanionLog] = _NO_COMPANIONS
        """Data that engines return in addition to the tokens, by name."""
        self.answers: tuple[Answer, ...] = ()
        """Other fields of the engines' answers that are kept."""

    # --- paths -----------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """The path of the active branch, whose last part ends with the log."""
        *before, last = self.open_path
        return (*before, last) if last[0] < last[1] else tuple(before)

    @property
    def open_path(self) -> Path:
        """The path of the active branch, including a last part that has no token yet."""
        return (*self._before, (self._shift + _length(self._before), self.size))

    @property
    def path_tokens(self) -> int:
        """Number of response tokens of the active branch."""
        return self.size - self._shift

    def go_on(self, path: Path) -> None:
        """Make the branch with this path active, so that new tokens continue it."""
        if path and path[-1][1] == self.size:
            path, low = path[:-1], path[-1][0]
        else:
            low = self.size
        self._before = path
        self._shift = low - _length(path)

    def along(self, path: Path) -> Int32Array:
        """Return the ids on a path, int32 [T]."""
        return _along(self._ids, path)

    def part(self, path: Path) -> TokenLog:
        """Return a log of the tokens on `path` alone, without companions."""
        log = TokenLog()
        log._extend(_along(self._ids, path), _along(self._logprobs, path))
        at = 0
        for low, end in path:
            log.answers += tuple(
                [
                    replace(each, start=each.start - low + at)
                    for each in self.answers
                    if low <= each.start < end
                ]
            )
            for run in self._runs:
                if run.end > low and log.covered < at + end - low:
                    log._mark_to(at + min(run.end, end) - low, run.version, run.engine)
            at += end - low
        log.exact, log.stale_keys = self.exact, self.stale_keys
        return log

    # --- tokens ----------------------------------------------------------------------------------

    @staticmethod
    def restored(
        ids: Int32Array,
        logprobs: Float32Array,
        runs: Iterable[tuple[int, int, str | None]],
        *,
        exact: bool,
        stale_keys: bool = False,
    ) -> TokenLog:
        """Return a log from saved data; `runs` come from :attr:`runs` and cover all `ids`."""
        log = TokenLog()
        log._extend(ids, logprobs)
        log._runs = [_Run(*run) for run in runs]
        log.exact = exact
        log.stale_keys = stale_keys
        return log

    @property
    def runs(self) -> tuple[tuple[int, int, str | None], ...]:
        """The end, version and engine of each run."""
        return tuple((run.end, run.version, run.engine) for run in self._runs)

    def since(self, start: int) -> tuple[Int32Array, Float32Array]:
        """Return ids and logprobs from `start` on, as views valid until the next token."""
        return self._ids[start : self.size], self._logprobs[start : self.size]

    def truncate(self, size: int, *, prompt: int) -> None:
        """Cut the response after its first `size` tokens; its prompt has `prompt` tokens."""
        path = clipped(self.path, size)
        self.size = min(self.size, size)
        self.go_on(path)
        self.answers = tuple([each for each in self.answers if each.start < self.size])
        for each in self.companions.values():
            # A restarted response may have another prompt.
            tokens = self.path_tokens
            context = prompt + tokens - 1 if tokens else 0
            each.truncate(context if each.companion.per == "context" else tokens, tokens)
        # Copied, because new tokens would overwrite the array, which other objects may share.
        self._ids = self._ids[: self.size].copy()
        self._logprobs = self._logprobs[: self.size].copy()
        self._runs = self._runs_before(self.size)

    @property
    def token_ids(self) -> Int32Array:
        """A copy of the ids, int32 [T]."""
        return self._ids[: self.size].copy()

    def after(self, ids: Int32Array) -> Int32Array:
        """Return `ids` followed by the active branch's tokens, int32 [len(ids) + T].

        Without tokens it is `ids` itself.
        """
        if not self._shift:
            return np.concatenate((ids, self._ids[: self.size])) if self.size else ids
        return np.concatenate((ids, self.along(self.path)))

    def tail(self, start: int) -> tuple[Int32Array, Float32Array, Int32Array]:
        """Return copies of ids, logprobs and versions from `start` on."""
        return (
            self._ids[start : self.size].copy(),
            self._logprobs[start : self.size].copy(),
            self.versions()[start:],
        )

    def append(self, ids: Int32Array, logprobs: Float32Array, *, version: int, engine: str) -> None:
        """Add tokens that `engine` sampled, presumably under `version`; see :meth:`assign`."""
        self._extend(ids, logprobs)
        last = self._runs[-1] if self._runs else None
        if last is not None and last.version == version and last.engine == engine:
            # The fast path: nearly every chunk continues the last run.
            last.end = self.size
        elif len(ids):
            self._runs.append(_Run(self.size, version, engine))

    def append_environment(self, ids: Int32Array) -> None:
        """Add tokens of the environment, which no policy sampled."""
        self._extend(ids, np.zeros(len(ids), dtype=np.float32))
        if len(ids):
            self._mark_to(self.size, NO_VERSION, None)
        for each in self.companions.values():
            if each.companion.per == "token":
                each.fill(self.path_tokens)

    def add_token_rows(self, rows: Mapping[str, Rows]) -> None:
        """Add the rows of the latest tokens."""
        for name, added in rows.items():
            each = self.companions.get(name)
            if each is not None:
                each.fill(self.path_tokens - len(added))
                each.add(added)

    def add_context_rows(
        self, rows: Mapping[str, Rows], *, prompt: int, start: int, recomputed: bool
    ) -> None:
        """Add the rows that an engine returned at the end of an attempt.

        The versions show which rows come from the forward pass that sampled their token. If an
        attempt has tokens of several versions and its context was `recomputed` in between, an
        engine returns the rows of the last pass over each position, so rows of older tokens come
        from other weights. The same holds for tokens of an earlier attempt whose rows were lost:
        this attempt forwarded them again under the weights at its start.

        Args:
            rows: the new rows, by the name of their companion.
            prompt: number of prompt tokens.
            start: position of the attempt's tokens in the log.
            recomputed: whether a refit during the attempt made the engine compute its context
                again.
        """
        versions = _along(self.versions(), self.path)
        start -= self._shift
        own = versions[start:]
        if own.size:
            first, last = int(own[0]), int(own[-1])
            passes = np.where(np.arange(self.path_tokens) < start, first, versions)
            if recomputed:
                passes.fill(last)
            foreign = (passes != versions) & (versions != NO_VERSION)
        else:
            # It is unknown under which weights an attempt without a token read its context.
            foreign = versions != NO_VERSION
        for name, added in rows.items():
            each = self.companions.get(name)
            if each is not None:
                low = each.held - prompt + 1
                each.add(added)
                each.mark(foreign, max(0, low), max(0, each.held - prompt + 1))

    def restore_rows(
        self,
        saved: Iterable[tuple[str, int, Rows]],
        foreign: Mapping[str, Sequence[tuple[int, int]]],
        *,
        prompt: int,
    ) -> None:
        """Restore saved rows, after the tokens.

        `saved` contains name, first row and rows, in the order in which they were saved. Missing
        rows of the context are requested again.
        """
        for name, start, rows in saved:
            each = self.companions.get(name)
            if each is not None and each.takes(rows) and start <= each.held:
                each.add(rows.part(min(each.held - start, len(rows))))
        for name, each in self.companions.items():
            each.foreign = [(low, end) for low, end in foreign.get(name, ())]
            tokens = self.path_tokens
            wanted = max(0, prompt + tokens - 1)
            if each.companion.per == "token":
                wanted = tokens
                if each.held < wanted:
                    each.foreign.append((each.held, wanted))
                    each.fill(wanted)
            each.truncate(wanted, tokens)

    def companion_rows(self, *, prompt: int, end: int | None = None) -> dict[str, CompanionRows]:
        """Return the rows of each companion for the active branch, or its part before `end`.

        `prompt` is the number of prompt tokens, and `end` a position in the log.
        """
        if not self.companions:
            return {}
        sampled = _along(self.sampled(), clipped(self.path, self.size if end is None else end))
        return {
            name: each.whole(prompt=prompt, sampled=sampled)
            for name, each in self.companions.items()
        }

    def assign(self, start: int, spans: tuple[VersionSpan, ...], *, engine: str) -> None:
        """Replace the versions of all tokens from `start` on by the engine's own report.

        Spans count from `start`. They may extend beyond the received tokens, because an abort can
        cut off the last ones, and may have zero length. Tokens beyond the last span get its
        version.
        """
        if start >= self.size or not spans:
            return
        if len(spans) == 1 and self._last_is(start, spans[0].version, engine):
            return
        self._runs = self._runs_before(start)
        for span in spans:
            end = min(start + span.end, self.size)
            if end > self.covered:
                self._mark_to(end, span.version, engine)
        if self.covered < self.size:
            self._mark_to(self.size, spans[-1].version, engine)

    def versions(self) -> Int32Array:
        """Return the version of each token, int32 [T]; -1 for tokens of the environment."""
        out = np.empty(self.size, dtype=np.int32)
        if len(self._runs) == 1:
            out.fill(self._runs[0].version)
            return out
        low = 0
        for run in self._runs:
            out[low : run.end] = run.version
            low = run.end
        return out

    def logprobs(self) -> Float32Array:
        """Return a copy of the logprobs, float32 [T]."""
        return self._logprobs[: self.size].copy()

    def sampled(self) -> BoolArray:
        """Return whether a policy sampled each token, bool [T]; False for the environment's."""
        for run in self._runs:
            if run.version == NO_VERSION:
                return self.versions() != NO_VERSION
        out = np.empty(self.size, dtype=np.bool_)
        out.fill(True)
        return out

    def segments(self) -> tuple[Segment, ...]:
        """Return the runs in the form that users get."""
        found: list[Segment] = []
        low = 0
        for run in self._runs:
            found.append(Segment(start=low, end=run.end, version=run.version, engine=run.engine))
            low = run.end
        return tuple(found)

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that a policy sampled."""
        count = low = 0
        for run in self._runs:
            if run.version != NO_VERSION:
                count += run.end - low
            low = run.end
        return count

    @property
    def oldest_version(self) -> int | None:
        """The oldest version among the sampled tokens; None if there are none."""
        oldest: int | None = None
        for run in self._runs:
            if run.version != NO_VERSION and (oldest is None or run.version < oldest):
                oldest = run.version
        return oldest

    @property
    def mixed(self) -> bool:
        """Whether the sampled tokens have more than one version."""
        return len({run.version for run in self._runs if run.version != NO_VERSION}) > 1

    @property
    def covered(self) -> int:
        """End of the last run. An invariant checks that it equals the length."""
        return self._runs[-1].end if self._runs else 0

    def _extend(self, ids: Int32Array, logprobs: Float32Array) -> None:
        if not self.size and len(ids) >= _FIRST_ROOM:
            self._ids, self._logprobs, self.size = ids, logprobs, len(ids)
            return
        size = self.size + len(ids)
        if size > len(self._ids):
            room = max(size, int(len(self._ids) * _GROWTH), _FIRST_ROOM)
            self._ids = grown(self._ids, room, self.size)
            self._logprobs = grown(self._logprobs, room, self.size)
        self._ids[self.size : size] = ids
        self._logprobs[self.size : size] = logprobs
        self.size = size

    def _runs_before(self, end: int) -> list[_Run]:
        """Return the runs of the tokens before `end`."""
        starts = [0, *[run.end for run in self._runs]]
        parts = zip(starts, self._runs, strict=False)
        return [_Run(min(r.end, end), r.version, r.engine) for low, r in parts if low < end]

    def _last_is(self, start: int, version: int, engine: str) -> bool:
        """Return whether the last run, of this version and engine, covers all from `start` on."""
        run = self._runs[-1]
        low = self._runs[-2].end if len(self._runs) > 1 else 0
        return low <= start and run.version == version and run.engine == engine

    def _mark_to(self, end: int, version: int, engine: str | None) -> None:
        last = self._runs[-1] if self._runs else None
        if last is not None and last.version == version and last.engine == engine:
            last.end = end
        else:
            self._runs.append(_Run(end, version, engine))


def clipped(path: Path, end: int) -> Path:
    """Return the parts of a path before position `end` of the log."""
    return tuple([(a, min(b, end)) for a, b in path if a < end])


def joined(paths: Iterable[Iterable[tuple[int, int]]]) -> Path:
    """Return the union of the paths in the order of the log, with adjacent parts merged."""
    parts: list[tuple[int, int]] = []
    for low, end in sorted([part for path in paths for part in path]):
        if parts and low <= parts[-1][1]:
            parts[-1] = (parts[-1][0], max(parts[-1][1], end))
        else:
            parts.append((low, end))
    return tuple(parts)


def common(one: Path, other: Path) -> int:
    """Return the length of the common prefix of two paths, in tokens."""
    same = 0
    for (low, end), (start, stop) in zip(one, other, strict=False):
        if low != start:
            break
        same += min(end, stop) - low
        if end != stop:
            break
    return same


def moved(place: int, kept: Path) -> int:
    """Return the new position of `place` when only the `kept` parts of the log remain."""
    return sum([min(end, place) - low for low, end in kept if low < place])


def _length(path: Path) -> int:
    return sum([b - a for a, b in path])


def _along(array: NDArray[_T], path: Path) -> NDArray[_T]:
    if len(path) == 1:
        return array[path[0][0] : path[0][1]].copy()
    return np.concatenate([array[:0], *[array[a:b] for a, b in path]])


def grown(array: np.ndarray, room: int, used: int) -> np.ndarray:
    """Return a new array of length `room` with the first `used` elements of `array`."""
    larger = np.empty(room, dtype=array.dtype)
    larger[:used] = array[:used]
    return larger
