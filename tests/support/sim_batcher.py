"""Helpers for tests that drive the simulated engine's batcher without a clock."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from aprilsched.kernel.engines.base import Chunk, GenerationRequest
from aprilsched.simulation.engine.ranks import batcher_of
from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.simulation.engine.toy_model import ContextState, ToyModel, sampling_key
from aprilsched.types import Float32Array, Int32Array, SamplingParams


def request(
    request_id: str,
    length: int,
    *,
    prompt: int = 4,
    greedy: bool = False,
    stop: tuple[int, ...] = (),
    min_new: int = 0,
    ignore_eos: bool = True,
) -> GenerationRequest:
    """A request whose prompt is a function of its id."""
    sampling = SamplingParams(
        max_new_tokens=length,
        min_new_tokens=min_new,
        temperature=0.0 if greedy else 1.0,
        stop_token_ids=stop,
        ignore_eos=ignore_eos,
        sampling_seed=11,
    )
    first = sum(request_id.encode())
    ids = (np.arange(prompt) * 7 + first).astype(np.int32)
    return GenerationRequest(request_id=request_id, input_ids=ids, sampling=sampling)


@dataclass
class Outcome:
    """All chunks of one request."""

    chunks: list[Chunk] = field(default_factory=list[Chunk])
    ended_at: float | None = None

    @property
    def last(self) -> Chunk:
        return self.chunks[-1]

    @property
    def ids(self) -> Int32Array:
        return np.concatenate([c.token_ids for c in self.chunks])

    @property
    def logprobs(self) -> Float32Array:
        return np.concatenate([c.logprobs for c in self.chunks])

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        return [(s.version, s.start, s.end) for s in self.last.spans or ()]


class Driver:
    """A batcher and its clock; it collects the chunks of all requests."""

    def __init__(self, config: SimConfig) -> None:
        self.batcher = batcher_of(config)
        self.now = 0.0
        self.outcomes: dict[str, Outcome] = {}

    def submit(self, sent: GenerationRequest, *, length: int | None = None) -> None:
        self.outcomes[sent.request_id] = Outcome()
        self.batcher.submit(sent, self.now, length=length)

    def until(self, when: float) -> None:
        """Let time pass, event by event."""
        while (due := self.batcher.next_event_time()) is not None and due <= when:
            self.collect(due)
        self.collect(when)

    def settle(self) -> None:
        """Run until there are no more events."""
        while (due := self.batcher.next_event_time()) is not None:
            self.collect(due)

    def collect(self, when: float) -> None:
        self.now = max(self.now, when)
        for request_id, chunk in self.batcher.advance(when):
            outcome = self.outcomes[request_id]
            assert outcome.ended_at is None, "a chunk after the last one"
            outcome.chunks.append(chunk)
            if chunk.finish is not None:
                outcome.ended_at = when
        most = self.batcher.config.kv_tokens
        assert all(rank.kv_in_use <= most for rank in self.batcher.ranks)

    def pause(self, mode: str) -> None:
        assert mode in ("retract", "in_place")
        self.batcher.pause("retract" if mode == "retract" else "in_place", self.now)
        if self.batcher.paused is None:
            due = self.batcher.next_event_time()
            assert due is not None
            self.until(due)
        assert self.batcher.paused is not None
        assert self.batcher.next_event_time() is None
        self.collect(self.now)

    def resume(self) -> None:
        self.batcher.resume(self.now)


def explained(
    sent: GenerationRequest, outcome: Outcome, keys: dict[int, int], vocab_size: int
) -> bool:
    """Whether every token is what the weights of its span give for the tokens before it.

    This is true if every refit was followed by a flush, because each span then starts from a
    context that was prefilled under its own weights.
    """
    model = ToyModel(vocab_size)
    ids, logprobs = outcome.ids, outcome.logprobs
    seed = sampling_key(sent.sampling, sent.request_id)
    for version, start, end in outcome.spans:
        context = np.concatenate((sent.input_ids, ids[:start]))
        key = keys[version]
        state = ContextState(
            hash=model.absorb(0, context[:-1], key),
            last=int(context[-1]),
            length=len(context),
            seed=seed,
        )
        ((tokens, scores),) = model.sample([state], [end - start], key)
        if not np.array_equal(tokens, ids[start:end]):
            return False
        if not np.array_equal(scores, logprobs[start:end]):
            return False
    return True
