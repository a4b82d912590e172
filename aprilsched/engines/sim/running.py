"""The decoding batch: who runs, how far the step counter is, and when the next one ends.

Invariants:
- All members advance one token a step, so one counter (``steps``) says how far everyone is.
- Members are in the order of their admission.
- A heap entry counts only while its ticket is the member's: leaving makes it void, and nothing
  has to be searched for.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection

from aprilsched.engines.sim.output import Output
from aprilsched.engines.sim.sequence import Sequence

__all__ = ["RunningBatch"]


class RunningBatch:
    """Requests that decode together, on a step counter with ticks every `interval` steps."""

    def __init__(self, interval: int, output: Output) -> None:
        self.steps = 0
        self.next_tick = interval
        self._interval = interval
        self._output = output
        self._members: dict[int, Sequence] = {}
        self._finishing: list[tuple[int, int, Sequence]] = []
        self._tickets = 0

    def __len__(self) -> int:
        return len(self._members)

    @property
    def members(self) -> Collection[Sequence]:
        """In the order of admission; do not join or leave while iterating."""
        return self._members.values()

    @property
    def newest(self) -> Sequence:
        """The one admitted last."""
        return next(reversed(self._members.values()))

    def sampled(self, sequence: Sequence) -> int:
        """Output tokens so far, of a member or of anyone else."""
        return self.steps - sequence.joined if sequence.running else sequence.out

    def join(self, sequence: Sequence) -> None:
        """The pass that ends now has sampled its next token; it decodes from here on."""
        sequence.out += 1
        sequence.joined = self.steps - sequence.out
        sequence.ticket = self._tickets
        self._tickets += 1
        self._members[sequence.ticket] = sequence

    def leave(self, sequence: Sequence) -> None:
        """Out of the batch; its tokens are made and its KV, all but the last token's, stays."""
        del self._members[sequence.ticket]
        sequence.out = self.steps - sequence.joined
        sequence.ticket = -1
        sequence.cached = sequence.computed = sequence.context - 1

    def next_due(self) -> int:
        """The step at which the batch changes next: somebody's last one, or the tick."""
        heap = self._finishing
        while heap and heap[0][2].ticket != heap[0][1]:
            heapq.heappop(heap)
        return min(self.next_tick, heap[0][0]) if heap else self.next_tick

    def take_finished(self, weights_key: int) -> list[Sequence]:
        """Those whose last token is sampled; they have left."""
        done: list[Sequence] = []
        while self._finishing and self._finishing[0][0] <= self.steps:
            _, ticket, sequence = heapq.heappop(self._finishing)
            if sequence.ticket == ticket:
                done.append(sequence)
        return self.take(done, weights_key) if done else done

    def take(self, sequences: list[Sequence], weights_key: int) -> list[Sequence]:
        """Make the tokens of these members and let them leave."""
        self.make(sequences, weights_key)
        for sequence in sequences:
            self.leave(sequence)
        return sequences

    def make(self, sequences: Collection[Sequence], weights_key: int) -> None:
        """Have the model make what these members have sampled."""
        if sequences:
            self._output.make(sequences, self.steps, weights_key)

    def predict(self, sequences: Collection[Sequence], weights_key: int) -> None:
        """Note when these members will end, where that is known before the next tick."""
        for sequence in self._output.predict(sequences, self.next_tick, weights_key):
            heapq.heappush(self._finishing, (sequence.finish_at, sequence.ticket, sequence))

    def predict_anew(self, weights_key: int) -> None:
        """After a refit other tokens follow, so stop tokens come at other places."""
        self._finishing.clear()
        self.predict(self.members, weights_key)

    def tick(self, weights_key: int, version: int) -> None:
        """Send what every member has, and look one interval ahead for stop tokens."""
        self.next_tick = (self.steps // self._interval + 1) * self._interval
        self.make(self.members, weights_key)
        self._output.stream(self.members, version)
        self.predict([s for s in self.members if s.stops], weights_key)
