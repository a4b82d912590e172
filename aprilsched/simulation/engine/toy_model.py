"""The toy language model: its tokens depend on everything that a real model's tokens depend on.

The next token and its logprob are hashed from the whole context, the absolute position, the
weights key that samples it and the seed. The context enters through a rolling polynomial hash

    h[i + 1] = h[i] * P + mix(token[i], key[i])      (uint64, wrapping)

in which ``key[i]`` is the weights key under which the token's KV was computed.

Invariants:
- If one context token is lost, doubled or swapped, every later token changes (P is odd, so each
  position's coefficient is invertible). So a wrong splice of a response always shows.
- Context tokens whose KV is of older weights (an in-place refit) lead to other tokens than the same
  context prefilled again with the new weights (retract and flush), as on a real server.
- The last token of a context is never in the cache: the step that samples the next token
  computes its KV, with the weights of that step.
- The scalar and the vector path give identical bits.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from aprilsched.kernel.values.companions import Companion, Rows
from aprilsched.types import Float32Array, Int32Array, SamplingParams

UInt64Array: TypeAlias = NDArray[np.uint64]

_MASK = (1 << 64) - 1
_POLY = 0xD1342543DE82EF95  # odd, from Steele and Vigna's table of multipliers
_TOKEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: neighbouring ids end far apart
_PLACE = 0xA24BAED4963EE407
_MIX1 = 0xBF58476D1CE4E5B9  # splitmix64's finalizer
_MIX2 = 0x94D049BB133111EB
_LOGPROB_UNIT = -(2.0**-21)
_SCALAR_ROWS = 10  # below this many rows the scalar path is faster than numpy's call overhead


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MIX1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX2) & _MASK
    return x ^ (x >> 31)


def _mix_array(x: UInt64Array) -> UInt64Array:
    """Do the same as `_mix` for an array, in place."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(_MIX1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_MIX2)
    x ^= x >> np.uint64(31)
    return x


def weights_key_of_version(version: int) -> int:
    """Return a weights key for weights that have no files; every version has a different one."""
    return _mix((version * _TOKEN + 1) & _MASK)


def adapted_key(weights: int, adapter: int) -> int:
    """Return the weights key of a model with an adapter; `adapter` 0 means no adapter."""
    return weights if adapter == 0 else _mix((weights * _PLACE + adapter) & _MASK)


def sampling_key(sampling: SamplingParams, request_id: str) -> int:
    """Return the seed that decides a sample in addition to the context; 0 for greedy sampling.

    Without ``sampling_seed`` the request's id is the seed, so that runs can be repeated.
    """
    if sampling.temperature == 0:
        return 0
    if sampling.sampling_seed is not None:
        return _mix((sampling.sampling_seed * _PLACE + 1) & _MASK)
    return _mix(zlib.crc32(request_id.encode()) + (1 << 40))


@dataclass(slots=True, eq=False)
class ContextState:
    """A context of ``length`` tokens, ready for the next one.

    ``hash`` covers all tokens except the last one, which is ``last``. ``seed`` is the result of
    :func:`sampling_key`.
    """

    hash: int
    last: int
    length: int
    seed: int


class ToyModel:
    """Samples tokens in [0, vocab_size) with float32 logprobs in (-8, 0)."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 2:
            raise ValueError(f"vocab_size is {vocab_size}; a model needs at least 2 tokens.")
        self.vocab_size = vocab_size
        self._powers = np.ones(1, dtype=np.uint64)

    def absorb(self, state: int, tokens: Int32Array, key: int) -> int:
        """The hash after `state` when the KV of `tokens` (int32 [n]) is computed under `key`."""
        count = len(tokens)
        if count == 0:
            return state
        powers = self._powers_up_to(count)
        terms = tokens.astype(np.uint64) * np.uint64(_TOKEN) + np.uint64(_mix(key & _MASK))
        added = int((_mix_array(terms) * powers[count - 1 :: -1]).sum(dtype=np.uint64))
        return (state * pow(_POLY, count, 1 << 64) + added) & _MASK

    def _powers_up_to(self, count: int) -> UInt64Array:
        while len(self._powers) < count:
            half = self._powers
            step = np.uint64(pow(_POLY, len(half), 1 << 64))
            self._powers = np.concatenate((half, half * step))
        return self._powers

    def sample(
        self, states: Sequence[ContextState], counts: Sequence[int], key: int
    ) -> list[tuple[Int32Array, Float32Array]]:
        """Sample the next ``counts[i]`` tokens after ``states[i]`` under the weights `key`.

        Advances `states`, and returns for each of them token ids (int32) and logprobs (float32).
        Rows advance together, one vector step for each token, so the cost is that of the longest
        count.
        """
        if len(states) < _SCALAR_ROWS:
            return [self._sample_one(s, n, key) for s, n in zip(states, counts, strict=True)]
        return self._sample_rows(states, counts, key)

    def _sample_one(
        self, state: ContextState, count: int, key: int
    ) -> tuple[Int32Array, Float32Array]:
        weights = _mix(key & _MASK)
        vocab = self.vocab_size
        hashed, token, base = state.hash, state.last, weights + state.seed
        place = state.length * _PLACE
        tokens: list[int] = []
        units: list[int] = []
        for _ in range(count):
            hashed = (hashed * _POLY + _mix((token * _TOKEN + weights) & _MASK)) & _MASK
            drawn = _mix((hashed + place + base) & _MASK)
            token = (drawn & 0xFFFFFFFF) % vocab
            tokens.append(token)
            units.append(drawn >> 41 << 1 | 1)
            place += _PLACE
        state.hash, state.last, state.length = hashed, token, state.length + count
        logprobs = (np.array(units, dtype=np.float64) * _LOGPROB_UNIT).astype(np.float32)
        return np.array(tokens, dtype=np.int32), logprobs

    def _sample_rows(
        self, states: Sequence[ContextState], counts: Sequence[int], key: int
    ) -> list[tuple[Int32Array, Float32Array]]:
        # The longest rows come first: the rows that are active at a step are then a prefix, and
        # its slice is a view, so unequal counts cost nothing extra.
        order = sorted(range(len(states)), key=lambda i: -counts[i])
        rows, most = len(states), counts[order[0]]
        hashed = np.array([states[i].hash for i in order], dtype=np.uint64)
        token = np.array([states[i].last for i in order], dtype=np.uint64)
        weights = _mix(key & _MASK)
        place = np.array(
            [(states[i].length * _PLACE + states[i].seed + weights) & _MASK for i in order],
            dtype=np.uint64,
        )
        live = np.array([-counts[i] for i in order])
        active = np.searchsorted(live, -np.arange(most), side="left").tolist()
        tokens = np.empty((rows, most), dtype=np.int32)
        units = np.empty((rows, most), dtype=np.uint64)
        for step in range(most):
            m = active[step]
            h, t, p = hashed[:m], token[:m], place[:m]
            t *= np.uint64(_TOKEN)
            t += np.uint64(weights)
            h *= np.uint64(_POLY)
            h += _mix_array(t)
            drawn = _mix_array(h + p)
            units[:m, step] = drawn
            drawn &= np.uint64(0xFFFFFFFF)
            np.remainder(drawn, np.uint64(self.vocab_size), out=t)
            tokens[:m, step] = t
            p += np.uint64(_PLACE)
        logprobs = ((units >> np.uint64(41) << np.uint64(1)) | np.uint64(1)).astype(np.float32)
        logprobs *= np.float32(_LOGPROB_UNIT)
        results: list[tuple[Int32Array, Float32Array]] = [_NOTHING] * rows
        for row, i in enumerate(order):
            state, count = states[i], counts[i]
            state.hash, state.last = int(hashed[row]), int(token[row])
            state.length += count
            # These are copies: one response as a view would keep the whole block alive.
            results[i] = (tokens[row, :count].copy(), logprobs[row, :count].copy())
        return results


class KvTier:
    """Cached KV that survives flushes and restarts; engines with the same object share it.

    Like SGLang's storage it keeps whole pages of contexts, apart by cache key and adapter, and the
    KV that was computed first for a page stays.

    Args:
        page: number of tokens of a page.
    """

    def __init__(self, page: int = 16) -> None:
        self._page = page
        self._states: dict[bytes, int] = {}
        """The hash of a context up to the end of each page."""

    def absorb(self, model: ToyModel, tokens: Int32Array, key: int, *, found_under: str) -> int:
        """Return the hash of a context that starts with `tokens` (int32 [n]).

        KV that is there under the name `found_under` is used. The rest is computed under the
        weights `key`, and kept under that name.
        """
        state, done, finding = 0, 0, True
        name = found_under.encode()
        for end in range(self._page, len(tokens) + 1, self._page):
            name = hashlib.blake2b(name + tokens[done:end].tobytes(), digest_size=16).digest()
            known = self._states.get(name) if finding else None
            finding = known is not None
            if known is None:
                state = model.absorb(state, tokens[done:end], key)
                self._states.setdefault(name, state)
            else:
                state = known
            done = end
        return model.absorb(state, tokens[done:], key)


_NOTHING: tuple[Int32Array, Float32Array] = (
    np.empty(0, dtype=np.int32),
    np.empty(0, dtype=np.float32),
)


def toy_rows(companion: Companion, positions: NDArray[np.int64], keys: UInt64Array) -> Rows:
    """Return rows of a context companion at `positions`, each forwarded under one of `keys`.

    Rows of other positions or other weights differ, so a wrong join is detected.
    """
    values = np.arange(1, math.prod(companion.shape) + 1, dtype=np.uint64)
    mixed = _mix_array(
        keys[:, np.newaxis]
        + (positions.astype(np.uint64) * np.uint64(_PLACE))[:, np.newaxis]
        + values * np.uint64(_TOKEN)
    )
    most = min(np.iinfo(companion.dtype).max, np.iinfo(np.int32).max)
    rows = (mixed % np.uint64(most)).astype(companion.dtype)
    return Rows(rows.reshape(-1, *companion.shape))


def toy_top(companion: Companion, ids: Int32Array, logprobs: Float32Array) -> Rows:
    """Return the likeliest tokens at the position of each token.

    The token itself is first; each further token is one nat less likely.
    """
    places = np.arange(companion.shape[0])
    below, above = ids[:, np.newaxis] - places, ids[:, np.newaxis] + places
    found = np.where(below < 0, above, below)
    return Rows(np.stack((found, logprobs[:, np.newaxis] - places), axis=-1).astype(np.float32))


def toy_masks(companion: Companion, ids: Int32Array) -> Rows:
    """Return a sampling mask for each token: the token itself, and up to two more."""
    rows = [list(range(token, token + 1 + token % 3)) for token in ids.tolist()]
    return Rows.ragged(rows, companion.dtype)
