"""Compares the log-probabilities of the trainer and of the engines that sampled a batch.

At staleness 0 the engine and the trainer have the same weights, so every difference comes from
their arithmetic: kernels, dtypes, the order of sums, the routing of experts. In a loss this looks
like off-policyness, and no bound on staleness makes it smaller.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from aprilsched.errors import ConfigError
from aprilsched.kernel.core.messages.events import LogprobComparison, LogprobDifferences
from aprilsched.types import NO_VERSION, Batch, Rollout

BOUND = 0.1
"""A token is beyond the bound if its probabilities differ by more than 10 %. Rounding in bfloat16
stays below for most tokens."""
OTHER_WEIGHTS_K3 = 0.05
"""Mean of exp(d) - 1 - d at staleness 0, in nats, above which the engine has other weights. It is
about half of the mean square of d; rounding in bfloat16 stays below 0.01."""
STALENESS_CLASSES = 6
"""Classes of staleness; the last one has all tokens that are 5 or more versions old."""
_LARGEST = 20.0
"""exp(d) of a larger difference would hide everything else in a mean; see
:mod:`aprilsched.trainers.corrections`."""
_TOKENS_AT_ONCE = 1 << 16
"""Compared between two turns of the event loop, in about 2 ms."""


async def compared(batch: Batch, logprobs: object) -> LogprobComparison:
    """Return the differences between `logprobs` and the batch's own log-probabilities.

    Their forms are described in :meth:`RolloutScheduler.report_logprobs`.

    Raises:
        ConfigError: if `logprobs` do not have the shape of the batch.
    """
    comparison, at_once = _Comparison(batch), 0
    for rollout, row in _rows(batch, logprobs):
        comparison.add(rollout, row)
        at_once += len(rollout)
        if at_once >= _TOKENS_AT_ONCE:
            # Streams of engines are read on this event loop, and must not wait for a large batch.
            await asyncio.sleep(0)
            at_once = 0
    return comparison.result()


def _plus(before: LogprobDifferences, differences: NDArray[np.float64]) -> LogprobDifferences:
    """Return the statistics of some tokens, updated with the differences of further tokens."""
    if not differences.size:
        return before
    magnitudes = np.abs(differences)
    limited = np.clip(differences, -_LARGEST, _LARGEST)
    return LogprobDifferences(
        tokens=before.tokens + differences.size,
        total=before.total + float(differences.sum()),
        # Near 0 exp(d) - 1 - d would be a difference of almost equal numbers.
        k3=before.k3 + float((np.expm1(limited) - limited).sum()),
        largest=max(before.largest, float(magnitudes.max())),
        beyond=before.beyond + int(np.count_nonzero(magnitudes > BOUND)),
    )


class _Comparison:
    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._by_engine = defaultdict[str, LogprobDifferences](LogprobDifferences)
        self._by_position: list[LogprobDifferences] = []
        self._by_staleness = [LogprobDifferences()] * STALENESS_CLASSES
        self._skipped = 0
        self._not_finite = 0

    def add(self, rollout: Rollout, logprobs: NDArray[Any]) -> None:
        with np.errstate(invalid="ignore", over="ignore"):
            differences = logprobs.astype(np.float64) - rollout.logprobs
        finite = np.isfinite(differences)
        self._not_finite += int(np.count_nonzero(rollout.loss_mask & ~finite))
        usable = rollout.loss_mask & finite
        certain = rollout.versions_exact and not rollout.stale_keys
        for segment in rollout.segments:
            if segment.version == NO_VERSION:
                continue
            start, end = segment.start, segment.end
            staleness = self._batch.version - segment.version
            if not certain or staleness < 0:
                # Another client, not the trainer, loaded a newer version than the batch's.
                self._skipped += int(np.count_nonzero(usable[start:end]))
                continue
            here = differences[start:end][usable[start:end]]
            place = min(staleness, STALENESS_CLASSES - 1)
            self._by_staleness[place] = _plus(self._by_staleness[place], here)
            if staleness == 0:
                name = str(segment.engine)
                self._by_engine[name] = _plus(self._by_engine[name], here)
                self._add_by_position(differences, usable, start, end)

    def _add_by_position(
        self, differences: NDArray[np.float64], usable: NDArray[np.bool_], start: int, end: int
    ) -> None:
        for place in range((start + 1).bit_length() - 1, end.bit_length()):
            first, last = max(start, (1 << place) - 1), min(end, (2 << place) - 1)
            while len(self._by_position) <= place:
                self._by_position.append(LogprobDifferences())
            here = differences[first:last][usable[first:last]]
            self._by_position[place] = _plus(self._by_position[place], here)

    def result(self) -> LogprobComparison:
        return LogprobComparison(
            batch=self._batch.index,
            version=self._batch.version,
            bound=BOUND,
            by_engine=dict(sorted(self._by_engine.items())),
            by_position=tuple(self._by_position),
            by_staleness=tuple(self._by_staleness),
            skipped=self._skipped,
            not_finite=self._not_finite,
        )


def _rows(batch: Batch, logprobs: object) -> Iterator[tuple[Rollout, NDArray[Any]]]:
    """Each rollout with the trainer's log-probabilities of its response."""
    rollouts = list(batch.rollouts)
    whole = [len(rollout.prompt_ids) + len(rollout) for rollout in rollouts]
    if isinstance(logprobs, list | tuple):
        parts = [_array(part) for part in cast("Sequence[object]", logprobs)]
        if [part.shape for part in parts] != [(len(rollout),) for rollout in rollouts]:
            raise ConfigError(
                f"the {len(parts)} rows of log-probabilities do not have the lengths of the "
                f"batch's {len(rollouts)} responses; give one row for each rollout, in the order "
                "of batch.rollouts."
            )
        return zip(rollouts, parts, strict=True)
    longest = max(whole, default=0)
    array = _array(logprobs)
    if array.ndim == 2 and len(array) == len(rollouts) and array.shape[1] >= longest:
        rows: Sequence[NDArray[Any]] = list(array)
    elif array.shape == (sum(whole),):
        rows = np.split(array, np.cumsum(whole)[:-1])
    else:
        raise ConfigError(
            f"the log-probabilities have shape {array.shape}; give ({len(rollouts)}, {longest}) "
            f"or more columns as to_torch() has them, ({sum(whole)},) as to_torch(packed=True) "
            "has them, or a list with one row for each response."
        )
    return (
        (rollout, row[len(rollout.prompt_ids) : length])
        for rollout, row, length in zip(rollouts, rows, whole, strict=True)
    )


def _array(logprobs: object) -> NDArray[Any]:
    if not isinstance(logprobs, np.ndarray):
        detach = getattr(logprobs, "detach", None)
        if detach is None:
            raise ConfigError(
                f"the log-probabilities are of type {type(logprobs).__name__}; give a numpy array, "
                "a torch tensor, or a list of them."
            )
        # numpy has no bfloat16.
        logprobs = detach().float().cpu().numpy()
    array: NDArray[Any] = np.asarray(logprobs)
    if array.dtype.kind != "f":
        raise ConfigError(
            f"the log-probabilities are {array.dtype} values; give floating-point numbers."
        )
    return array
