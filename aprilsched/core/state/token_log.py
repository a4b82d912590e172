"""The tokens of one rollout while it is being generated, with the version of each.

Invariant: ids and logprobs have one length, and the runs cover it without gap or overlap.

A token takes 8 bytes (int32 id, float32 logprob) and at most half of that in spare room. Versions
are kept as runs, and are spread out only when the rollout is delivered. A long first chunk is kept
as the array that arrived and is never written to: since there is no room behind it, further tokens
move everything to a new array.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from aprilsched.companions import CompanionLog, CompanionRows, Rows
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


@dataclass(slots=True)
class _Run:
    end: int
    version: int
    engine: str | None


class TokenLog:
    """Growable response tokens with the policy version of each."""

    __slots__ = (
        "_ids",
        "_logprobs",
        "_runs",
        "_size",
        "answers",
        "companions",
        "exact",
        "stale_keys",
    )

    def __init__(self) -> None:
        self._ids = _NO_IDS
        self._logprobs = _NO_LOGPROBS
        self._size = 0
        self._runs: list[_Run] = []
        self.exact = True
        """False once the version of some token is unknown."""
        self.stale_keys = False
        """True once tokens have arrived that attend to keys which older weights computed."""
        self.companions: dict[str, CompanionLog] = _NO_COMPANIONS
        """What engines return beside the tokens, by name."""
        self.answers: tuple[Answer, ...] = ()
        """What else they answered to the attempts, and is kept."""

    def __len__(self) -> int:
        return self._size

    @staticmethod
    def restored(
        ids: Int32Array,
        logprobs: Float32Array,
        runs: Iterable[tuple[int, int, str | None]],
        *,
        exact: bool,
        stale_keys: bool = False,
    ) -> TokenLog:
        """A log from saved data. `runs` are as :attr:`runs` returned them, and cover all of
        `ids`."""
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
        """Ids and logprobs from `start` on: views, valid until the next token is added."""
        return self._ids[start : self._size], self._logprobs[start : self._size]

    def truncate(self, size: int, *, prompt: int) -> None:
        """Forget all tokens after the first `size`, of a response after `prompt` tokens."""
        self._size = min(self._size, size)
        self.answers = tuple([each for each in self.answers if each.start < self._size])
        for each in self.companions.values():
            # A response that begins again may have another prompt.
            context = prompt + self._size - 1 if self._size else 0
            each.truncate(context if each.companion.per == "context" else self._size, self._size)
        # Copied, because the next tokens would overwrite the array, which may belong to others.
        self._ids = self._ids[: self._size].copy()
        self._logprobs = self._logprobs[: self._size].copy()
        kept: list[_Run] = []
        for run in self._runs:
            if self._size > (kept[-1].end if kept else 0):
                kept.append(_Run(min(run.end, self._size), run.version, run.engine))
        self._runs = kept

    @property
    def token_ids(self) -> Int32Array:
        """A copy of the ids, int32 [T]."""
        return self._ids[: self._size].copy()

    def after(self, ids: Int32Array) -> Int32Array:
        """int32 [len(ids) + T]: `ids` and then all tokens; `ids` itself while there are no
        tokens."""
        return np.concatenate((ids, self._ids[: self._size])) if self._size else ids

    def tail(self, start: int) -> tuple[Int32Array, Float32Array, Int32Array]:
        """Copies of ids, logprobs and versions from `start` on."""
        return (
            self._ids[start : self._size].copy(),
            self._logprobs[start : self._size].copy(),
            self.versions()[start:],
        )

    def append(self, ids: Int32Array, logprobs: Float32Array, *, version: int, engine: str) -> None:
        """Add tokens that `engine` sampled, under `version` as far as is known now."""
        self._extend(ids, logprobs)
        last = self._runs[-1] if self._runs else None
        if last is not None and last.version == version and last.engine == engine:
            # Nearly every chunk continues the last run, so it costs no further call.
            last.end = self._size
        else:
            self._mark(version, engine)

    def append_environment(self, ids: Int32Array) -> None:
        """Add tokens of the environment, which no policy sampled."""
        self._extend(ids, np.zeros(len(ids), dtype=np.float32))
        self._mark(NO_VERSION, None)
        for each in self.companions.values():
            if each.companion.per == "token":
                each.fill(self._size)

    def add_token_rows(self, rows: Mapping[str, Rows]) -> None:
        """Add the rows of the tokens that were added last."""
        for name, added in rows.items():
            each = self.companions.get(name)
            if each is not None:
                each.fill(self._size - len(added))
                each.add(added)

    def add_context_rows(
        self, rows: Mapping[str, Rows], *, prompt: int, start: int, recomputed: bool
    ) -> None:
        """Add the rows that an attempt brought at its end.

        Which of them are of the pass that sampled their token follows from the versions: where an
        attempt has tokens of several versions and the context was `recomputed` in between, an
        engine returns the rows of the last pass over each position, so those of older tokens are
        of other weights. The same holds for tokens of an earlier attempt whose rows were lost:
        they were forwarded again under the weights that this attempt began with.

        Args:
            rows: the new rows, by the name of their companion.
            prompt: number of prompt tokens.
            start: where the tokens of the attempt begin in the response.
            recomputed: whether a refit during the attempt made the engine compute its context
                again.
        """
        versions = self.versions()
        own = versions[start:]
        if own.size:
            first, last = int(own[0]), int(own[-1])
            passes = np.where(np.arange(self._size) < start, first, versions)
            if recomputed:
                passes.fill(last)
            foreign = (passes != versions) & (versions != NO_VERSION)
        else:
            # Nobody says under which weights an attempt without a token read its context.
            foreign = versions != NO_VERSION
        for name, added in rows.items():
            each = self.companions.get(name)
            if each is not None:
                begin = each.held - prompt + 1
                each.add(added)
                each.mark(foreign, max(0, begin), max(0, each.held - prompt + 1))

    def restore_rows(
        self,
        saved: Iterable[tuple[str, int, Rows]],
        foreign: Mapping[str, Sequence[tuple[int, int]]],
        *,
        prompt: int,
    ) -> None:
        """Take saved rows back, after the tokens: names, first rows and rows, in the order in which
        they were saved. A row of the context that is missing among them is asked for again."""
        for name, start, rows in saved:
            each = self.companions.get(name)
            if each is not None and each.takes(rows) and start <= each.held:
                each.add(rows.part(min(each.held - start, len(rows))))
        for name, each in self.companions.items():
            each.foreign = [(begin, end) for begin, end in foreign.get(name, ())]
            wanted = max(0, prompt + self._size - 1)
            if each.companion.per == "token":
                wanted = self._size
                if each.held < wanted:
                    each.foreign.append((each.held, wanted))
                    each.fill(wanted)
            each.truncate(wanted, self._size)

    def companion_rows(self, *, prompt: int, tokens: int | None = None) -> dict[str, CompanionRows]:
        """The rows of each companion, of a response after `prompt` tokens: of all its tokens, or of
        the first `tokens`."""
        if not self.companions:
            return {}
        sampled = self.sampled()[:tokens]
        return {
            name: each.whole(prompt=prompt, sampled=sampled)
            for name, each in self.companions.items()
        }

    def assign(self, start: int, spans: tuple[VersionSpan, ...], *, engine: str) -> None:
        """Replace the versions of all tokens from `start` on by the engine's own report.

        Spans count from `start`. They may reach beyond the tokens that arrived, because an abort
        can cut the last tokens off, and they may have zero length. Tokens beyond the last span get
        its version.
        """
        if start >= self._size or not spans:
            return
        if len(spans) == 1 and self._last_is(start, spans[0].version, engine):
            return
        kept: list[_Run] = []
        begin = 0
        for run in self._runs:
            if begin >= start:
                break
            kept.append(_Run(min(run.end, start), run.version, run.engine))
            begin = run.end
        self._runs = kept
        for span in spans:
            end = min(start + span.end, self._size)
            if end > self.covered:
                self._mark_to(end, span.version, engine)
        if self.covered < self._size:
            self._mark_to(self._size, spans[-1].version, engine)

    def versions(self) -> Int32Array:
        """The version of each token, int32 [T]; -1 for tokens of the environment."""
        out = np.empty(self._size, dtype=np.int32)
        if len(self._runs) == 1:
            out.fill(self._runs[0].version)
            return out
        begin = 0
        for run in self._runs:
            out[begin : run.end] = run.version
            begin = run.end
        return out

    def logprobs(self) -> Float32Array:
        """A copy of the logprobs, float32 [T]."""
        return self._logprobs[: self._size].copy()

    def sampled(self) -> BoolArray:
        """Whether a policy sampled each token, bool [T]; False for tokens of the environment."""
        for run in self._runs:
            if run.version == NO_VERSION:
                return self.versions() != NO_VERSION
        out = np.empty(self._size, dtype=np.bool_)
        out.fill(True)
        return out

    def segments(self) -> tuple[Segment, ...]:
        """The runs in the form that users get."""
        out: list[Segment] = []
        begin = 0
        for run in self._runs:
            out.append(Segment(start=begin, end=run.end, version=run.version, engine=run.engine))
            begin = run.end
        return tuple(out)

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that a policy sampled."""
        count = begin = 0
        for run in self._runs:
            if run.version != NO_VERSION:
                count += run.end - begin
            begin = run.end
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
        """Where the last run ends. It equals the length, which is checked as an invariant."""
        return self._runs[-1].end if self._runs else 0

    def _extend(self, ids: Int32Array, logprobs: Float32Array) -> None:
        if not self._size and len(ids) >= _FIRST_ROOM:
            self._ids, self._logprobs, self._size = ids, logprobs, len(ids)
            return
        size = self._size + len(ids)
        if size > len(self._ids):
            room = max(size, int(len(self._ids) * _GROWTH), _FIRST_ROOM)
            self._ids = _grown(self._ids, room, self._size)
            self._logprobs = _grown(self._logprobs, room, self._size)
        self._ids[self._size : size] = ids
        self._logprobs[self._size : size] = logprobs
        self._size = size

    def _last_is(self, start: int, version: int, engine: str) -> bool:
        """Whether the last run has all tokens from `start` on, with this version and engine."""
        run = self._runs[-1]
        begin = self._runs[-2].end if len(self._runs) > 1 else 0
        return begin <= start and run.version == version and run.engine == engine

    def _mark(self, version: int, engine: str | None) -> None:
        if self._size > self.covered:
            self._mark_to(self._size, version, engine)

    def _mark_to(self, end: int, version: int, engine: str | None) -> None:
        last = self._runs[-1] if self._runs else None
        if last is not None and last.version == version and last.engine == engine:
            last.end = end
        else:
            self._runs.append(_Run(end, version, engine))


def _grown(array: np.ndarray, room: int, used: int) -> np.ndarray:
    grown = np.empty(room, dtype=array.dtype)
    grown[:used] = array[:used]
    return grown
