"""Remembers the lengths of each prompt's responses by the prompt's key, from epoch to epoch.

The level of a prompt is the expected log length of its responses. Over all prompts it is normal
around the distribution's mean, with the variance t that the responses of a group share. The policy
changes, so a level drifts: two observations of it, a versions apart, have the correlation r =
2**(-a / half_life). This is a stationary autoregressive process with noisy observations (Kalman,
1960). From n responses with mean log length m, with k = w n / (w n + 1 - w) for the distribution's
share w, the level now has

    mean = distribution + r k (m - distribution),  variance = t (1 - r**2 k)

so it shrinks toward the distribution with age. Responses of earlier epochs count r**2 as much as
new ones.

Keys may be wrong: a caller may use one key for many prompts, or the policy may change faster than
the half-life suggests. So r is multiplied by the regression coefficient of observed levels on
predicted ones (Mincer and Zarnowitz, 1969), with recent groups counting most. If the memory has no
predictive value, the coefficient is 0 and only the distribution remains.

The memory determines what runs when and where, so a wrong memory costs time. It never determines
whether a response is kept or how long it becomes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from aprilsched.kernel.core.lengths.log_lengths import Levels, LogLengths, observed_logs
from aprilsched.kernel.core.lengths.observed import GroupLengths

MOST_KEYS = 1 << 16
"""Number of remembered keys; the most recent ones are kept. An entry takes about 200 bytes."""
_HALF_LIFE = 1000
"""Versions after which the autocorrelation of a level is assumed to be one half. This affects only
the initial value of the regression coefficient, which is learned from the run."""
_BEGIN = 16.0
"""Weight of the coefficient's initial value, 1, as a number of predicted groups."""
_FORGETS = 1 - 1 / 512
"""Factor of earlier groups in the regression per new group: the last 512 count."""
_LONGEST_KEY = 64
"""Characters of the longest key that is stored as it is. A longer key is stored as its digest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remembered:
    """The record of one key.

    Attributes:
        key: the prompt's key, or the digest of a long one.
        responses: equivalent number of new responses; earlier epochs count for less.
        mean_log: mean of their log lengths.
        version: the version in force when the last of them was observed.
    """

    key: str | int
    responses: float
    mean_log: float
    version: int


class LengthMemory:
    """The records by key, and the quality of their predictions."""

    def __init__(self) -> None:
        self._records: dict[str | int, Remembered] = {}
        self.products = 0.0
        """Sum of predicted times observed deviations from the distribution, with recent groups
        counting most."""
        self.squares = 0.0
        """Sum of the squares of the predicted deviations, with the same weights."""

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._records)

    def knows(self, key: object) -> bool:
        """Return whether the key has a record."""
        return bool(self._records) and _name(key) in self._records

    def __iter__(self) -> Iterator[Remembered]:
        """Iterate over the records, the most recently updated one last."""
        return iter(self._records.values())

    def restore(self, records: Iterable[Remembered], products: float, squares: float) -> None:
        """Restore the saved records and sums."""
        for record in records:
            self._put(record)
        self.products, self.squares = products, squares

    def note(
        self, key: object, group: GroupLengths, dist: LogLengths, version: int
    ) -> Remembered | None:
        """Record the lengths of a group that has ended, and return the new record.

        The result is None if the prompt has no key that can be remembered (a string or an integer),
        or if no member has a token.
        """
        name = _name(key)
        known = group.tokens > 0
        count = int(known.sum())
        if name is None or not count:
            return None
        logs = observed_logs(group.tokens[known], group.finished[known], dist)
        mean, responses = float(logs.mean()), float(count)
        before = self._records.get(name)
        if before is not None:
            believed = self._correlation(before, version, dist) ** 2 * before.responses
            predicted = self._aged(before, version) * _weight(before.responses, dist)
            predicted *= before.mean_log - dist.mean
            self.products = self.products * _FORGETS + predicted * (mean - dist.mean)
            self.squares = self.squares * _FORGETS + predicted**2
            mean = (mean * responses + before.mean_log * believed) / (responses + believed)
            responses += believed
        record = Remembered(key=name, responses=responses, mean_log=mean, version=version)
        self._put(record)
        return record

    def levels(self, keys: Sequence[object], dist: LogLengths, version: int) -> Levels:
        """Return the level of each prompt before it has a token under `version`."""
        mean = np.full((len(keys), 1), dist.mean, dtype=np.float64)
        variance = np.full_like(mean, dist.shared * dist.deviation**2)
        if self._records:
            for row, key in enumerate(keys):
                name = _name(key)
                record = None if name is None else self._records.get(name)
                if record is not None:
                    r = self._correlation(record, version, dist)
                    weight = _weight(record.responses, dist)
                    mean[row] += r * weight * (record.mean_log - dist.mean)
                    variance[row] *= 1 - r * r * weight
        return Levels(mean=mean, variance=variance)

    def coefficient(self, dist: LogLengths) -> float:
        """Return the regression coefficient of observed on predicted levels, 0 or more."""
        prior = _BEGIN * dist.shared * dist.deviation**2
        return max(0.0, (self.products + prior) / (self.squares + prior))

    def _correlation(self, record: Remembered, version: int, dist: LogLengths) -> float:
        # Below 1, because at 1 a difference of a prompt's level could never be detected.
        return min(0.99, self.coefficient(dist) * self._aged(record, version))

    @staticmethod
    def _aged(record: Remembered, version: int) -> float:
        return math.exp2(-max(0, version - record.version) / _HALF_LIFE)

    def _put(self, record: Remembered) -> None:
        self._records.pop(record.key, None)
        self._records[record.key] = record
        if len(self._records) > MOST_KEYS:
            del self._records[next(iter(self._records))]


def _weight(responses: float, dist: LogLengths) -> float:
    """Return the share of the deviation of `responses` responses that belongs to their group."""
    return dist.shared * responses / (dist.shared * responses + 1 - dist.shared)


def _name(key: object) -> str | int | None:
    if type(key) is int and -(2**63) <= key < 2**63:
        return key
    if type(key) is not str:
        return None
    if len(key) <= _LONGEST_KEY and key.isascii():
        return key
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
