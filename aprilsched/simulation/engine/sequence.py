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
from dataclasses import dataclass, field, replace

import numpy as np

from aprilsched.kernel.engines.base import GenerationRequest
from aprilsched.simulation.engine.toy_model import ContextState
from aprilsched.types import Float32Array, Int32Array, SamplingParams, VersionSpan


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
    """Return the context to compute: a few tokens per medium, before the text tokens.

    The tokens of a medium depend on its source.
    """
    if not request.media:
        return request.input_ids
    sources = [repr(media.source).encode() for media in request.media]
    ids = np.array([zlib.crc32(each) % vocab_size for each in sources], dtype=np.int32)
    return np.concatenate((ids.repeat(MEDIA_TOKENS), request.input_ids))


def drawn_length(sampling: SamplingParams) -> int:
    """Return the length at which the engine ends a response that has no stop tokens.

    A trained model ends a response by itself, at a length that only it knows. `min_new_tokens` is
    that length here: the end token follows as soon as it is allowed. The scheduler and admission
    read the limit only.
    """
    if sampling.ignore_eos or not sampling.min_new_tokens:
        return sampling.max_new_tokens
    return sampling.min_new_tokens


def with_length(sampling: SamplingParams, length: int) -> SamplingParams:
    """Return `sampling` with another :func:`drawn_length`, of at most its limit if it has one."""
    if sampling.ignore_eos or not sampling.min_new_tokens:
        return replace(sampling, max_new_tokens=length)
    return replace(sampling, min_new_tokens=min(length, sampling.max_new_tokens))


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """The mutable state of one request; :class:`~aprilsched.simulation.engine.batcher.Batcher` owns
    it.

    `stops` are the token ids that end the response, after at least `min_new` tokens. Without them
    it ends at its :func:`drawn_length`, and always at `length` if that is given. `adapter` is the
    weights key of its adapter, 0 without one. `seed` is the result of `sampling_key`. `input_ids`
    is the context that the request sends, with its media expanded.
    """

    request: GenerationRequest
    input_ids: Int32Array
    stops: frozenset[int]
    adapter: int = 0
    seed: int = 0
    length: int | None = None
    prompt: int = field(init=False)
    limit: int = field(init=False)
    longest: int = field(init=False)
    """Output tokens at which it ends, if no stop token ends it earlier; at most `limit`."""
    min_new: int = field(init=False)
    state: ContextState = field(init=False)
    first_at: float | None = None
    """Time of its first token since it was sent or retracted, until a chunk reports it."""
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
    fixed: bool = False
    """Whether its tokens to come count in full while it runs."""
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
        self.limit = self.longest = sampling.max_new_tokens
        self.min_new = sampling.min_new_tokens
        if self.length is not None:
            self.longest = min(max(self.length, self.min_new), self.limit)
        elif not self.stops:
            self.longest = drawn_length(sampling)
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
        """Return the whole context so far, int32 [context]; only while ``made == out``."""
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
