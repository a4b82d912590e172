"""Companions: typed data that an engine returns in addition to token ids and log-probabilities.

A :class:`Companion` describes the rows of one kind of data, and which token each row belongs
to. There are two kinds:

- *context*: a row for each position of the context that the engine has forwarded, such as the
  experts to which a mixture of experts routed the position. The pass over position i samples token
  i + 1, so a rollout of P prompt and T response tokens has P + T - 1 rows, and response token t was
  sampled by the pass of row P + t - 1. An attempt that continues a response requests the rows from
  the first missing one on, so rows of the pass that sampled a token are never replaced by rows of
  a later pass over the same position.
- *token*: a row for each response token, such as the ids that top-k and top-p left to sample from.
  Tokens that an environment added have an empty row, or one of zeros, or of NaN.

Data passes through the scheduler unread. Nothing here imports more than NumPy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from aprilsched.errors import ConfigError

Per: TypeAlias = Literal["context", "token"]

KINDS: Mapping[str, Per] = {
    "routed_experts": "context",
    "indexer_topk": "context",
    "sampling_mask": "token",
    "top_logprobs": "token",
}
"""The unit that has one row, by the name of the companion."""
_RAGGED = frozenset({"sampling_mask"})
TOP = "top_logprobs"
MOST_KEPT = 4096
"""Largest number of ids in a sampling mask: the largest top-k with which SGLang returns it."""
_WRITTEN = re.compile(r"(?P<name>\w+)(=(?P<dtype>\w+)(\[(?P<shape>[\d, ]*)\])?)?(?P<required>!)?")
_ROW_BYTES = 1 << 20
"""Largest size of one row. 1,000 layers with 256 experts of 4 bytes each fit."""


@dataclass(frozen=True, slots=True)
class Companion:
    """The type and shape of one companion's rows.

    As a string, for flags and config files: ``"routed_experts=uint8[48,8]"``, ``"sampling_mask"``,
    with ``!`` at the end for `required`.

    Args:
        name: the engine's name for it: "routed_experts" (int [layers, experts per token]),
            "indexer_topk" (int [layers, positions]), "sampling_mask" (int32, the kept ids of each
            token, of any number) or "top_logprobs" (float32 [n, 2], the ids of the n likeliest
            tokens with their log-probabilities).
        dtype: NumPy's name of an integer type that holds every value, or float32 for
            "top_logprobs"; rows are stored in it.
        shape: shape of a row; it is not given for "sampling_mask".
        required: whether tokens without the row of the pass that sampled them are masked in the
            loss. Without it the rollout only records which tokens these are.

    Raises:
        ConfigError: if the companion is unknown, or if its type or shape cannot be used.
    """

    name: str
    dtype: str = "int32"
    shape: tuple[int, ...] = ()
    required: bool = False

    def __post_init__(self) -> None:
        if self.name not in KINDS:
            raise ConfigError(
                f"companion {self.name!r} is unknown; choose one of {', '.join(KINDS)}."
            )
        try:
            kind = np.dtype(self.dtype)
        except TypeError:
            kind = np.dtype(object)
        top = self.name == TOP
        if kind != np.float32 if top else kind.kind not in "iu":
            raise ConfigError(
                f"the companion {self.name} has the type {self.dtype!r}; give "
                + ("float32." if top else 'an integer type, such as "uint8".')
            )
        object.__setattr__(self, "dtype", kind.name)
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        wrong = top and (len(self.shape) != 2 or self.shape[1] != 2)
        if wrong or self.ragged == bool(self.shape) or any(size < 1 for size in self.shape):
            what = "no shape" if self.ragged else "the shape of a row, such as (48, 8)"
            what = "the number of tokens and 2, such as (5, 2)" if top else what
            raise ConfigError(f"the companion {self.name} has the shape {self.shape}; give {what}.")
        if self.row_bytes > _ROW_BYTES:
            raise ConfigError(
                f"a row of the companion {self.name} has {self.row_bytes} bytes; give a shape and "
                f"a type of at most {_ROW_BYTES}."
            )

    @property
    def per(self) -> Per:
        """Whether there is a row for each position of the context, or for each response token."""
        return KINDS[self.name]

    @property
    def ragged(self) -> bool:
        """Whether rows have different numbers of values."""
        return self.name in _RAGGED

    @property
    def row_bytes(self) -> int:
        """Size of a row in bytes; 0 where rows differ."""
        return 0 if self.ragged else int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize

    @staticmethod
    def of(value: Companion | str | Mapping[str, Any]) -> Companion:
        """A companion from its string, or from a table of its fields.

        Raises:
            ConfigError: if it is neither.
        """
        if isinstance(value, Companion):
            return value
        if isinstance(value, Mapping):
            try:
                given: dict[str, Any] = {**value, "shape": tuple(value.get("shape", ()))}
                return Companion(**given)
            except TypeError as error:
                raise ConfigError(f"{dict(value)!r} is not a companion ({error}).") from error
        written = _WRITTEN.fullmatch(value)
        if written is None:
            raise ConfigError(
                f"{value!r} is not a companion; write its name, type and shape as in "
                '"routed_experts=uint8[48,8]".'
            )
        sizes = [int(size) for size in (written["shape"] or "").split(",") if size.strip()]
        return Companion(
            written["name"], written["dtype"] or "int32", tuple(sizes), bool(written["required"])
        )

    def blank(self, rows: int) -> Rows:
        """Rows of zeros or NaN, or without values if rows differ in length."""
        nothing = np.nan if self.name == TOP else 0
        values = np.full((0 if self.ragged else rows, *self.shape), nothing, dtype=self.dtype)
        return Rows(values, np.zeros(rows, dtype=np.int64) if self.ragged else None)


def of_prompt(companions: Sequence[Companion], names: Sequence[str] | None) -> list[Companion]:
    """Those of the run's companions that a prompt with these `names` has; None names all."""
    return [each for each in companions if names is None or each.name in names]


def routed_experts(
    *, layers: int, per_token: int, experts: int, required: bool = False
) -> Companion:
    """The experts of every token in the smallest type: [layers, per_token], of `experts` in all.

    Raises:
        ConfigError: if a number is below 1.
    """
    dtype = np.min_scalar_type(max(0, experts - 1)).name
    return Companion("routed_experts", dtype, (layers, per_token), required)


def top_logprobs(n: int) -> Companion:
    """The `n` likeliest tokens in the place of each token, with their log-probabilities.

    Raises:
        ConfigError: if `n` is below 1.
    """
    return Companion(TOP, "float32", (n, 2))


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Some rows of a companion, one after the other.

    Attributes:
        values: [n, \\*shape] of n rows of one shape, or all values of n ragged rows in one row.
        ends: int64 [n], where each ragged row ends in `values`; None for rows of one shape.
    """

    values: NDArray[Any]
    ends: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.values if self.ends is None else self.ends)

    @property
    def offsets(self) -> list[int]:
        """Where each row ends in `values`; for rows of one shape, the numbers from 1 on."""
        return list(range(1, len(self) + 1)) if self.ends is None else self.ends.tolist()

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return self.values.nbytes

    def part(self, start: int, end: int | None = None) -> Rows:
        """The rows `start` to `end`, without a copy of the values."""
        end = len(self) if end is None else end
        if self.ends is None:
            return Rows(self.values[start:end])
        at = int(self.ends[start - 1]) if start else 0
        upto = int(self.ends[end - 1]) if end > start else at
        return Rows(self.values[at:upto], self.ends[start:end] - at)

    def row(self, index: int) -> NDArray[Any]:
        """One row."""
        return self.values[index] if self.ends is None else self.part(index, index + 1).values

    @staticmethod
    def join(parts: Sequence[Rows]) -> Rows:
        """All rows of the parts, of which there is at least one; a copy."""
        values = np.concatenate([part.values for part in parts])
        if parts[0].ends is None:
            return Rows(values)
        ends: list[NDArray[np.int64]] = []
        at = 0
        for part in parts:
            ends.append(cast("NDArray[np.int64]", part.ends) + at)
            at += len(part.values)
        return Rows(values, np.concatenate(ends))

    @staticmethod
    def ragged(rows: Sequence[Sequence[int]], dtype: str) -> Rows:
        """Ragged rows from lists of whole numbers.

        Raises:
            OverflowError: if a number does not fit into the type.
        """
        ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        values = np.array([value for row in rows for value in row], dtype=np.int64)
        return Rows(fitting(values, dtype), ends)


def fitting(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Whole numbers in another type.

    Raises:
        OverflowError: if a number does not fit into the type.
    """
    limits = np.iinfo(dtype)
    if values.size and (values.min() < limits.min or values.max() > limits.max):
        raise OverflowError(f"values from {values.min()} to {values.max()} do not fit {dtype}")
    return values.astype(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class CompanionRows:
    """The rows of one companion of one rollout with P prompt and T response tokens.

    Attributes:
        companion: the type and shape of the rows.
        rows: P + T - 1 rows of a context companion, or T rows of a token companion. Missing rows
            are zeros, or empty.
        exact: bool [T], whether the row of the pass that sampled the token is there. It is False
            where the row was lost with a connection, or where the context was computed again under
            other weights before the engine gave the row. True for tokens of an environment.
    """

    companion: Companion
    rows: Rows
    exact: NDArray[np.bool_]

    def aligned(self, *, prompt: int) -> Rows:
        """One row for each of `prompt` prompt tokens and for each response token. The last token
        was not forwarded, and no prompt token was sampled: they have no row of their own and get a
        row of zeros or an empty one."""
        blank = self.companion.blank(prompt + len(self.exact) - len(self.rows))
        before = self.companion.per == "token"
        return Rows.join([blank, self.rows] if before else [self.rows, blank])


class CompanionLog:
    """The growing rows of one companion of one rollout."""

    __slots__ = ("_parts", "companion", "foreign", "held")

    def __init__(self, companion: Companion) -> None:
        self.companion = companion
        self.held = 0
        """Number of rows."""
        self.foreign: list[tuple[int, int]] = []
        """Response tokens, from the first to the one after the last, whose row is of another pass
        than the one that sampled them."""
        self._parts: list[Rows] = []

    def add(self, rows: Rows) -> None:
        """Add rows after those that are there."""
        if len(rows):
            self._parts.append(rows)
            self.held += len(rows)

    def forked(self, rows: int, tokens: int) -> CompanionLog:
        """Return a new log with the first `rows` rows of this one, for a response that shares its
        first `tokens` tokens."""
        log = CompanionLog(self.companion)
        log.add(self.since(0))
        log.foreign = list(self.foreign)
        log.truncate(max(0, rows), max(0, tokens))
        return log

    def takes(self, rows: Rows) -> bool:
        """Whether these are rows of this companion: a resumed run may ask for another type."""
        blank = self.companion.blank(0)
        return (
            rows.values.dtype == blank.values.dtype
            and rows.values.shape[1:] == blank.values.shape[1:]
            and (rows.ends is None) == (blank.ends is None)
        )

    def fill(self, rows: int) -> None:
        """Pad with blank rows up to `rows`."""
        if rows > self.held:
            self.add(self.companion.blank(rows - self.held))

    def mark(self, foreign: NDArray[np.bool_], start: int, end: int) -> None:
        """Note which of the response tokens from `start` to `end` are `foreign`, bool [T]."""
        edges = np.flatnonzero(np.diff(foreign[start:end], prepend=False, append=False)) + start
        self.foreign += zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)

    def since(self, start: int) -> Rows:
        """The rows from `start` on."""
        found: list[Rows] = [self.companion.blank(0)]
        at = 0
        for part in self._parts:
            if at + len(part) > start:
                found.append(part.part(max(0, start - at)))
            at += len(part)
        return Rows.join(found)

    def truncate(self, rows: int, tokens: int) -> None:
        """Drop the rows after the first `rows`, and the records of response tokens after the first
        `tokens`."""
        if rows < self.held:
            kept = self.since(0).part(0, max(0, rows))
            self._parts = [kept] if len(kept) else []
            self.held = len(kept)
        self.foreign = [(a, min(b, tokens)) for a, b in self.foreign if a < tokens]

    def whole(self, *, prompt: int, sampled: NDArray[np.bool_]) -> CompanionRows:
        """Return the rows of a rollout with `prompt` prompt tokens and T response tokens.

        `sampled`, bool [T], is True for each response token that a policy sampled."""
        tokens = len(sampled)
        per_context = self.companion.per == "context"
        wanted = max(0, prompt + tokens - 1) if per_context else tokens
        rows = self.since(0).part(0, min(wanted, self.held))
        if len(rows) < wanted:
            rows = Rows.join([rows, self.companion.blank(wanted - len(rows))])
        exact = np.ones(tokens, dtype=np.bool_)
        first = prompt - 1 if per_context else 0
        exact[max(0, self.held - first) :] = False
        for start, end in self.foreign:
            exact[start:end] = False
        exact |= ~sampled
        return CompanionRows(self.companion, rows, exact)
