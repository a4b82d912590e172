"""Reads what a server logs about decoding, and makes windows of decode steps from it."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import TextIO, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from aprilsched.errors import ConfigError
from aprilsched.kernel.values.bounds import MAX_WHOLE
from aprilsched.kernel.values.files import open_regular

Floats: TypeAlias = NDArray[np.float64]
N = TypeVar("N", int, float)

MAX_CHANGE = 0.15
"""Largest change of a batch within a window, as a share of the larger batch at its ends. Responses
that end change a batch by a few per cent in a window; a new wave or an abort changes it at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLine:
    """One log line about decoding, with the prefill passes since the line before.

    Attributes:
        engine: the engine of the line: a run's name, or what its process writes before the time,
            and its rank.
        time: time of day, as the line has it.
        running: number of requests in the batch.
        kv: number of context tokens in use.
        tokens_per_s: decoding rate since the line before, pauses included.
        passes: number of prefill passes since the line before.
        prefilled: number of tokens that those passes computed.
        accepted: tokens that a step gives to a sequence; above 1 with speculative decoding.
    """

    engine: str
    time: str
    running: int
    kv: int
    tokens_per_s: float
    passes: int = 0
    prefilled: int = 0
    accepted: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Windows of decode steps; the columns have equal lengths, one entry for each window.

    Attributes:
        engine: the engine, as in :class:`LogLine`.
        running: mean batch.
        kv: mean number of context tokens that a step reads.
        seconds: duration of the window.
        passes: number of prefill passes in the window.
        prefilled: number of tokens that those passes computed.
        change: change of the batch, as a share of the larger batch.
        steps: number of tokens that a sequence got in the window: its decode steps, times the
            tokens of a step with speculative decoding.
        accepted: number of tokens that a step gave each sequence.
    """

    engine: NDArray[np.str_]
    running: Floats
    kv: Floats
    seconds: Floats
    passes: Floats
    prefilled: Floats
    change: Floats
    steps: Floats
    accepted: Floats

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def steady(self) -> NDArray[np.bool_]:
        """Mask of the windows of decoding only."""
        return (self.passes == 0) & (self.change <= MAX_CHANGE)

    @property
    def stalled(self) -> NDArray[np.bool_]:
        """Mask of the windows with prefill passes."""
        return (self.passes > 0) & (self.change <= MAX_CHANGE)

    def where(self, chosen: NDArray[np.bool_] | NDArray[np.intp]) -> Windows:
        """Return the windows that `chosen` selects: a mask, or indices, which may repeat."""
        return Windows(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})


def windows_of(lines: Sequence[LogLine], *, steps: int = 40) -> Windows:
    """Return the windows between the lines of each engine, in order; each has `steps` decode steps.

    A line without throughput or context (of an engine that has just emptied) ends no window.

    Raises:
        ConfigError: if the windows take longer than the time between their lines, because the lines
            of several engines are mixed up or `steps` is wrong.
    """
    before: dict[str, LogLine] = {}
    pairs: list[tuple[LogLine, LogLine]] = []
    for line in lines:
        last = before.get(line.engine)
        before[line.engine] = line
        if last is not None and line.tokens_per_s > 0 and line.kv > 0 and line.running > 0:
            pairs.append((last, line))
    rows = np.array([_row(old, new, steps) for old, new in pairs]).reshape(-1, 7)
    running, kv, seconds, passes, prefilled, change, tokens = rows.T
    _check_time(pairs, float(seconds.sum()), steps)
    return Windows(
        engine=np.array([new.engine for _, new in pairs], dtype=np.str_),
        running=running,
        kv=kv,
        seconds=seconds,
        passes=passes,
        prefilled=prefilled,
        change=change,
        steps=tokens,
        accepted=np.array([new.accepted for _, new in pairs], dtype=np.float64),
    )


def _row(old: LogLine, new: LogLine, steps: int) -> tuple[float, ...]:
    running = (old.running + new.running) / 2
    tokens = steps * new.accepted
    # An unchanged batch grows by one token a step; otherwise the mean of both lines is used.
    grown = new.kv - (tokens - 1) / 2 * new.running
    kv = grown if old.running == new.running and not new.passes else (old.kv + new.kv) / 2
    change = abs(new.running - old.running) / max(new.running, old.running)
    seconds = tokens * running / new.tokens_per_s
    return running, kv, seconds, float(new.passes), float(new.prefilled), change, tokens


def _check_time(pairs: Sequence[tuple[LogLine, LogLine]], seconds: float, steps: int) -> None:
    clocks = [(_second_of_day(old.time), _second_of_day(new.time)) for old, new in pairs]
    if not clocks or any(each is None for pair in clocks for each in pair):
        return
    # A step back in time is the start of another log in the file, unless it is midnight.
    forward = [(cast("int", new) - cast("int", old)) % _DAY_S for old, new in clocks]
    elapsed = sum(each for each in forward if each < _DAY_S / 2)
    if seconds > _MAX_EXCESS * elapsed + _STAMP_S:
        raise ConfigError(
            f"the decode steps of the log take {seconds:,.0f} s, and its lines are {elapsed:,} s "
            f"apart; give the log of each engine alone, or correct --steps (it is {steps})."
        )


def _second_of_day(time: str) -> int | None:
    parts = time.split(":")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        return None
    hours, minutes, seconds = map(int, parts)
    return 3600 * hours + 60 * minutes + seconds


_DAY_S = 86_400
_MAX_EXCESS = 1.3
"""Largest total time of windows, divided by the time between their log lines. It is at most 1 for
one engine, and 2 if the lines of two engines are mixed."""
_STAMP_S = 5
"""Error of that time, in seconds, because the stamps are whole seconds."""
MAX_LINES = 500_000
_MAX_CHARACTERS = 4096

_PREFIX = re.compile(r"\[(?:\d{4}-\d{2}-\d{2} )?(\d{2}:\d{2}:\d{2})[^\] ]*([^\]]*)\]")
"""The time of a line, and the ranks of the process behind it."""
_RANKS = re.compile(r"\b[DP]P\d+")
_LEFT_OUT = re.compile(r"(?:Decode|Prefill) batch.*\[repeated \d+x across cluster\]")
_NO_NAME = re.compile(
    # Colours, and the times that tools such as docker put first.
    r"\x1b\[[0-9;]*m|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*(?:Z|[+-]\d\d:?\d\d)?"
)
_RUNNING = re.compile(r"#running-req: (\d{1,15})\b")
_KV = re.compile(r"#(?:full )?token: (\d{1,15})\b")
_RATE = re.compile(r"gen throughput \(token/s\): (\d{1,15}(?:\.\d+)?)\b")
_ACCEPTED = re.compile(r"accept len: (\d{1,15}(?:\.\d+)?)\b")
_NEW = re.compile(r"#new-token: (\d{1,15})\b")
_NEEDED = ("running_requests", "kv_tokens", "decode_tokens_per_s")


def read_log(path: Path) -> list[LogLine]:
    """Read the decode lines of a server's log, or of a table of such lines, in their order.

    Raises:
        ConfigError: if the file cannot be read, has no decode lines, or has too many.
    """
    try:
        with TextIOWrapper(open_regular(path), "utf-8", errors="replace", newline="") as file:
            first = file.readline(_MAX_CHARACTERS)
            file.seek(0)
            table = all(name in first for name in _NEEDED)
            found = list(islice(_table(file) if table else _log(file), MAX_LINES + 1))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); name a log file.") from None
    if not found:
        raise ConfigError(f"{path} has no decode lines; give the log of an SGLang server.")
    if len(found) > MAX_LINES:
        raise ConfigError(f"{path} has more than {MAX_LINES:,} decode lines; shorten it.")
    return found


def _pieces(file: TextIO) -> Iterator[str]:
    """Yield the first characters of each line."""
    whole = True
    while piece := file.readline(_MAX_CHARACTERS):
        if whole:
            yield piece
        whole = piece.endswith("\n")


def _log(file: TextIO) -> Iterator[LogLine]:
    since: dict[str, tuple[int, int]] = {}
    for piece in _pieces(file):
        prefix = _PREFIX.search(piece)
        engine = "" if prefix is None else _engine(piece[: prefix.start()], prefix[2])
        passes, prefilled = since.get(engine, (0, 0))
        if _LEFT_OUT.search(piece):
            raise ConfigError(
                "Ray has left lines of other engines out of the log; set RAY_DEDUP_LOGS=0, or give "
                "the log of each engine."
            )
        if "Prefill batch" in piece and (new := _NEW.search(piece)):
            since[engine] = (passes + 1, prefilled + int(new[1]))
        elif line := _decode_line(piece, engine, prefix[1] if prefix else ""):
            yield replace(line, passes=passes, prefilled=prefilled)
            since[engine] = (0, 0)


def _engine(before: str, ranks: str) -> str:
    """Return the name of the process that wrote a line, from what is `before` the line's time."""
    return " ".join([*_NO_NAME.sub("", before).split(), *_RANKS.findall(ranks)])


def _decode_line(piece: str, engine: str, time: str) -> LogLine | None:
    if "Decode batch" not in piece:
        return None
    running, kv, rate = (field.search(piece) for field in (_RUNNING, _KV, _RATE))
    if running is None or kv is None or rate is None:
        return None
    accepted = _ACCEPTED.search(piece)
    return LogLine(
        engine=engine,
        time=time,
        running=int(running[1]),
        kv=int(kv[1]),
        tokens_per_s=float(rate[1]),
        accepted=max(1.0, float(accepted[1])) if accepted else 1.0,
    )


def _table(file: TextIO) -> Iterator[LogLine]:
    for number, row in enumerate(csv.DictReader(_pieces(file)), start=2):
        try:
            yield LogLine(
                engine=row.get("run") or "",
                time=row.get("time") or "",
                running=_bounded(int(row["running_requests"])),
                kv=_bounded(int(row["kv_tokens"])),
                tokens_per_s=_bounded(float(row["decode_tokens_per_s"])),
                passes=_bounded(int(row.get("prefill_batches_since") or 0)),
                prefilled=_bounded(int(row.get("prefill_tokens_since") or 0)),
                accepted=max(1.0, _bounded(float(row.get("accept_len") or 1))),
            )
        except (KeyError, TypeError, ValueError):
            raise ConfigError(
                f"Line {number} of the table has a missing or wrong value; correct it."
            ) from None


def _bounded(value: N) -> N:
    """Return `value`.

    Raises:
        ValueError: if no engine has such a number, which overflows floats or is none.
    """
    if not 0 <= value < MAX_WHOLE:
        raise ValueError(value)
    return value
