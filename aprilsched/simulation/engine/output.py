"""The output of a simulated engine: samples tokens from the toy model and builds the chunks.

Tokens are sampled lazily, for all affected requests at once, when they become visible: at a tick,
at the end of a request, at a pause, or in the search for stop tokens. This is correct because the
weights cannot change before the tokens are sampled.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Literal, TypeAlias

import numpy as np

from aprilsched.kernel.engines.base import Chunk, GenerationRequest
from aprilsched.simulation.engine.companions import answer, context_rows, token_rows
from aprilsched.simulation.engine.sequence import Sequence, version_spans
from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.simulation.engine.toy_model import ContextState, adapted_key, sampling_key
from aprilsched.types import Float32Array, Int32Array, SamplingParams

Ending: TypeAlias = Literal["stop", "length", "abort"]
# Zeros of any length as slices of a view on one element: pure timing allocates nothing.
_NO_IDS: Int32Array = np.broadcast_to(np.zeros(1, dtype=np.int32), 1 << 40)
_NO_LOGPROBS: Float32Array = np.broadcast_to(np.zeros(1, dtype=np.float32), 1 << 40)

_Block: TypeAlias = tuple[Int32Array, Float32Array]


class Output:
    """Holds the chunks that are not taken yet, and the model that samples their tokens."""

    def __init__(self, config: SimConfig, dp_rank: int | None = None) -> None:
        self._dp_rank = dp_rank
        self._model = config.model(config.vocab_size) if config.make_tokens else None
        self._tier = config.tier
        self._eos = frozenset(() if config.eos_token_id is None else (config.eos_token_id,))
        self._chunks: list[tuple[str, Chunk]] = []
        self.now = 0.0
        """Time of the work that chunks are put for, in modelled seconds."""

    def stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        """Return the token ids that end a response with these sampling parameters."""
        if self._model is None:
            return frozenset()
        stops = frozenset(sampling.stop_token_ids)
        return stops if sampling.ignore_eos else stops | self._eos

    def seed(self, request: GenerationRequest) -> int:
        """Return the seed on which the request's tokens depend; 0 where no tokens are made."""
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
            sequence.finish_at = sequence.joined + sequence.longest
            # At its limit a response is cut off, whether or not its length is the limit.
            sequence.stopped = sequence.longest < sequence.limit
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
                        decode_seconds=self._decode_seconds(sequence),
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
            answer=answer(sequence, self._dp_rank),
            decode_seconds=self._decode_seconds(sequence),
        )
        self._put(sequence, chunk)

    def take(self) -> list[tuple[str, Chunk]]:
        """Return all chunks since the last call, in order, with their request ids."""
        chunks, self._chunks = self._chunks, []
        return chunks

    def _decode_seconds(self, sequence: Sequence) -> float | None:
        first, sequence.first_at = sequence.first_at, None
        return None if first is None else round(self.now - first, 6)

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
