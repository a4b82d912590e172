"""One request inside the batcher, and the state of its output.

Invariants:
- ``out`` tokens have been decoded. The toy model runs lazily and has sampled ``made <= out`` of
  them; ``sent <= made`` have left in chunks.
- While the request runs, ``out`` follows the batcher's step counter: ``steps - joined``.
- ``cached`` context tokens have KV; the last context token never has, so ``cached < context``.
- Version spans cover the sampled tokens exactly, without gaps, as SGLang's do.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import numpy as np

from aprilsched.kernel.engines.base import Chunk, GenerationRequest
from aprilsched.kernel.values.companions import TOP, Rows
from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.simulation.engine.toy_model import (
    ContextState,
    adapted_key,
    sampling_key,
    toy_masks,
    toy_rows,
    toy_top,
)
from aprilsched.types import Answer, Float32Array, Int32Array, SamplingParams, VersionSpan


def version_spans(
    events: Iterable[tuple[int, int]], current: int, tokens: int
) -> tuple[VersionSpan, ...]:
    """Spans over the first `tokens` output tokens, as SGLang 0.5.21 computes them.

    `events` are (old version, output tokens at the change), oldest first. A change without a
    token in between leaves no span; a request without any token has one span of length 0.
    """
    spans: list[VersionSpan] = []
    for version, changed_at in (*events, (current, tokens)):
        end = min(changed_at, tokens)
        if spans and end <= spans[-1].end:
            continue
        start = spans[-1].end if spans else 0
        if spans and version == spans[-1].version:
            start = spans.pop().start
        spans.append(VersionSpan(version=version, start=start, end=end))
    return tuple(spans)


MEDIA_TOKENS = 16
"""Tokens that each image, video or sound becomes."""


def expand(request: GenerationRequest, vocab_size: int) -> Int32Array:
    """The context that is computed: each of the media is a few tokens in front of the others, which
    follow from its source."""
    if not request.media:
        return request.input_ids
    told = [repr(media.source).encode() for media in request.media]
    ids = np.array([zlib.crc32(each) % vocab_size for each in told], dtype=np.int32)
    return np.concatenate((ids.repeat(MEDIA_TOKENS), request.input_ids))


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """The mutable state of one request; :class:`~aprilsched.simulation.engine.batcher.Batcher` owns it.

    `stops` are the token ids that end the response, after at least `min_new` tokens. `adapter` is
    the weights key of its adapter, 0 without one. `seed` is the result of `sampling_key`.
    `input_ids` is the context that the request sends, with its media expanded.
    """

    request: GenerationRequest
    input_ids: Int32Array
    stops: frozenset[int]
    adapter: int = 0
    seed: int = 0
    prompt: int = field(init=False)
    limit: int = field(init=False)
    min_new: int = field(init=False)
    state: ContextState = field(init=False)
    out: int = 0
    made: int = 0
    sent: int = 0
    cached: int = 0
    computed: int = 0
    """Largest number of context tokens that ever had KV; computing fewer again is re-prefill."""
    shared: int = 0
    """Number of context tokens still to prefill that a prefix cache has."""
    joined: int = 0
    ticket: int = -1
    """Number of the admission, or -1 while not running; heap entries of older ones are ignored."""
    finish_at: int = 0
    stopped: bool = False
    aborting: bool = False
    tokens: list[Int32Array] = field(init=False)
    unsent: list[tuple[Int32Array, Float32Array]] = field(init=False)
    changes: list[tuple[int, int]] = field(init=False)
    passes: list[tuple[int, int]] = field(init=False)
    """Where the positions end whose latest pass was under one weights key, and that key, if the
    request asks for companions of the context."""

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self.prompt = len(self.input_ids)
        self.limit = sampling.max_new_tokens
        self.min_new = sampling.min_new_tokens
        self.state = ContextState(hash=0, last=0, length=0, seed=self.seed)
        self.tokens, self.unsent, self.changes, self.passes = [], [], [], []

    @property
    def context(self) -> int:
        """Number of prompt tokens and decoded tokens."""
        return self.prompt + self.out

    @property
    def running(self) -> bool:
        return self.ticket >= 0

    def context_ids(self) -> Int32Array:
        """The whole context so far, int32 [context]; only while ``made == out``."""
        return np.concatenate((self.input_ids, *self.tokens))

    def drop_kv(self) -> None:
        """Drop the KV: the context has to be prefilled again."""
        self.cached = 0
        self.state.hash = 0
        self.passes.clear()

    def add(self, token_ids: Int32Array, logprobs: Float32Array) -> None:
        """Append tokens that the model has sampled."""
        self.made += len(token_ids)
        self.tokens.append(token_ids)
        self.unsent.append((token_ids, logprobs))

    def forward(self, end: int, key: int) -> None:
        """Note that the positions up to `end` have been forwarded, the last of them under `key`."""
        if self.request.companions:
            self.passes.append((end, key))

    def take_unsent(self) -> tuple[Int32Array, Float32Array]:
        """Return the unsent tokens and logprobs; they count as sent from now on."""
        blocks, self.unsent = self.unsent, []
        self.sent = self.made
        if len(blocks) == 1:
            return blocks[0]
        if not blocks:
            return np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32)
        return np.concatenate([b[0] for b in blocks]), np.concatenate([b[1] for b in blocks])

    def drop_unsent(self) -> None:
        """Drop the unsent tokens, as an abort in the waiting queue does."""
        self.unsent = []
        self.out = self.made = self.sent


# --- companions ----------------------------------------------------------------------------------


def token_rows(
    sequence: Sequence, ids: Int32Array, logprobs: Float32Array
) -> dict[str, Rows] | None:
    """The rows of new tokens for each companion of tokens; None where none is asked for."""
    if not sequence.request.companions:
        return None
    wanted = [each for each, _ in sequence.request.companions if each.per == "token"]
    return {
        each.name: toy_top(each, ids, logprobs) if each.name == TOP else toy_masks(each, ids)
        for each in wanted
    } or None


def context_rows(sequence: Sequence) -> dict[str, Rows] | None:
    """The rows of what was forwarded, from the first missing position on; None where no companion
    of the context is asked for. Like SGLang, it gives those of the latest pass over each
    position."""
    if not sequence.request.companions:
        return None
    ends = np.array([end for end, _ in sequence.passes], dtype=np.int64)
    keys = np.array([key for _, key in sequence.passes], dtype=np.uint64)
    known = min(int(ends[-1]) if len(ends) else 0, sequence.prompt + sequence.sent - 1)
    found: dict[str, Rows] = {}
    for companion, start in sequence.request.companions:
        if companion.per == "context" and known > start:
            positions = np.arange(start, known)
            passed = keys[np.searchsorted(ends, positions, side="right")]
            found[companion.name] = toy_rows(companion, positions, passed)
    return found or None


def _answer(sequence: Sequence) -> Answer | None:
    """What a request keeps: the number of its tokens, and what it has asked for itself."""
    sampling = sequence.request.sampling
    if not sampling.keep:
        return None
    entries = {"prompt_tokens": sequence.prompt, "request": sampling.request}
    return Answer.of(entries, sampling.keep)


# --- output --------------------------------------------------------------------------------------

# The output of a simulated engine: samples tokens from the toy model and builds the chunks.
#
# Tokens are sampled lazily, when somebody will see them (at a tick, an ending or a pause, or in the
# search for stop tokens), for all requests concerned at once. This is correct because the weights
# cannot change before the tokens are sampled.

Ending: TypeAlias = Literal["stop", "length", "abort"]
# Zeros of any length as slices of a view on one element: pure timing allocates nothing.
_NO_IDS: Int32Array = np.broadcast_to(np.zeros(1, dtype=np.int32), 1 << 40)
_NO_LOGPROBS: Float32Array = np.broadcast_to(np.zeros(1, dtype=np.float32), 1 << 40)

_Block: TypeAlias = tuple[Int32Array, Float32Array]


class Output:
    """Holds the chunks that are not taken yet, and the model that samples their tokens."""

    def __init__(self, config: SimConfig) -> None:
        self._model = config.model(config.vocab_size) if config.make_tokens else None
        self._tier = config.tier
        self._eos = frozenset(() if config.eos_token_id is None else (config.eos_token_id,))
        self._chunks: list[tuple[str, Chunk]] = []

    def stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        """The token ids that end a response with these sampling parameters."""
        if self._model is None:
            return frozenset()
        stops = frozenset(sampling.stop_token_ids)
        return stops if sampling.ignore_eos else stops | self._eos

    def seed(self, request: GenerationRequest) -> int:
        """The seed on which the request's tokens depend; 0 where no tokens are made."""
        return 0 if self._model is None else sampling_key(request.sampling, request.request_id)

    def prefill(self, sequence: Sequence, take: int, key: int) -> None:
        """Compute the KV of the next `take` context tokens under the weights `key`."""
        start, end = sequence.cached, sequence.cached + take
        key = adapted_key(key, sequence.adapter)
        if self._model is not None:
            ids = sequence.context_ids()
            last = end == len(ids)
            state = sequence.state
            fresh = ids[start : end - 1 if last else end]
            if self._tier is None or start:
                state.hash = self._model.absorb(state.hash, fresh, key)
            else:
                under = f"{sequence.request.cache_key} {sequence.adapter}"
                state.hash = self._tier.absorb(self._model, fresh, key, found_under=under)
            if last:
                state.last, state.length = int(ids[-1]), len(ids)
            sequence.forward(end - 1 if last else end, key)
        sequence.cached = end
        sequence.computed = max(sequence.computed, end)

    def make(self, sequences: Iterable[Sequence], steps: int, key: int) -> None:
        """Sample the tokens that running requests have decoded up to the step counter `steps`."""
        due = [s for s in sequences if steps - s.joined > s.made]
        if due:
            counts = [steps - s.joined - s.made for s in due]
            blocks = self._sample(due, [s.state for s in due], counts, key)
            for sequence, (ids, logprobs) in zip(due, blocks, strict=True):
                sequence.add(ids, logprobs)
                if sequence.request.companions:
                    weights = adapted_key(key, sequence.adapter)
                    sequence.forward(sequence.prompt + sequence.made - 1, weights)

    def predict(self, sequences: Iterable[Sequence], horizon: int, key: int) -> list[Sequence]:
        """Find the step of each request's last token; sets ``finish_at`` and ``stopped``.

        Returns the requests whose end is known: all without stop tokens, and those with stop
        tokens that end by the step `horizon`.
        """
        known: list[Sequence] = []
        searched: list[Sequence] = []
        for sequence in sequences:
            sequence.stopped = False
            sequence.finish_at = sequence.joined + sequence.limit
            if not sequence.stops or sequence.finish_at <= sequence.joined + sequence.made:
                known.append(sequence)
            else:
                searched.append(sequence)
        if searched:
            known += self._look_ahead(searched, horizon, key)
        return known

    def _look_ahead(self, searched: list[Sequence], horizon: int, key: int) -> list[Sequence]:
        counts = [min(s.finish_at, horizon) - s.joined - s.made for s in searched]
        copies = [replace(s.state) for s in searched]
        sampled = self._sample(searched, copies, counts, key)
        known: list[Sequence] = []
        for sequence, (ids, _) in zip(searched, sampled, strict=True):
            first = max(sequence.min_new - sequence.made - 1, 0)
            hits = np.flatnonzero(np.isin(ids[first:], list(sequence.stops)))
            if hits.size:
                sequence.stopped = True
                sequence.finish_at = sequence.joined + sequence.made + first + int(hits[0]) + 1
            if hits.size or sequence.finish_at <= horizon:
                known.append(sequence)
        return known

    def stream(self, sequences: Iterable[Sequence], version: int) -> None:
        """Put a chunk for each request that has unsent tokens."""
        for sequence in sequences:
            if sequence.unsent:
                ids, logprobs = sequence.take_unsent()
                rows = token_rows(sequence, ids, logprobs)
                self._put(
                    sequence,
                    Chunk(
                        token_ids=ids,
                        logprobs=logprobs,
                        label=version,
                        token_rows=rows,
                        prompt_tokens=sequence.prompt if sequence.request.media else None,
                    ),
                )

    def end(self, sequence: Sequence, ending: Ending, version: int) -> None:
        """Put the last chunk of a request; its spans cover everything that was sent."""
        ids, logprobs = sequence.take_unsent()
        spans = version_spans(sequence.changes, version, sequence.sent)
        chunk = Chunk(
            token_ids=ids,
            logprobs=logprobs,
            finish=ending,
            spans=spans,
            cached_tokens=0,
            token_rows=token_rows(sequence, ids, logprobs),
            context_rows=context_rows(sequence),
            prompt_tokens=sequence.prompt if sequence.request.media else None,
            answer=_answer(sequence),
        )
        self._put(sequence, chunk)

    def take(self) -> list[tuple[str, Chunk]]:
        """Return all chunks since the last call, in order, with their request ids."""
        chunks, self._chunks = self._chunks, []
        return chunks

    def _put(self, sequence: Sequence, chunk: Chunk) -> None:
        self._chunks.append((sequence.request.request_id, chunk))

    def _sample(
        self,
        sequences: SequenceOf[Sequence],
        states: SequenceOf[ContextState],
        counts: SequenceOf[int],
        key: int,
    ) -> list[_Block]:
        """Sample after `states`, one for each of `sequences`; those of one adapter together."""
        if self._model is None:
            return [(_NO_IDS[:n], _NO_LOGPROBS[:n]) for n in counts]
        rows: dict[int, list[int]] = {}
        for row, sequence in enumerate(sequences):
            rows.setdefault(sequence.adapter, []).append(row)
        if len(rows) == 1:
            return self._model.sample(states, counts, adapted_key(key, next(iter(rows))))
        blocks: dict[int, _Block] = {}
        for adapter, own in rows.items():
            weights = adapted_key(key, adapter)
            picked = [states[row] for row in own], [counts[row] for row in own]
            blocks.update(zip(own, self._model.sample(*picked, weights), strict=True))
        return [blocks[row] for row in range(len(states))]
