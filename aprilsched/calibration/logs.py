"""Reading SGLang's server logs, and tables of their lines.

SGLang writes "Decode batch" lines (every ``--decode-log-interval`` steps, 40 unless set) and
"Prefill batch" lines; the fields that are read are the same from 0.5.17 to 0.5.21, whatever
stands between them. Lines of data-parallel ranks are told apart by "DP3" in their prefix.

A table is a CSV with a header; it needs running_requests, kv_tokens and decode_tokens_per_s, and
may have run, time, prefill_batches_since and prefill_tokens_since.

Invariant: a file is read line by line, a bounded piece of each, and at most :data:`MAX_LINES`
decode lines are kept, so no file fills the memory.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TextIO

from aprilsched.calibration.records import LogLine
from aprilsched.errors import ConfigError

__all__ = ["MAX_LINES", "read_log"]

MAX_LINES = 500_000
_MAX_CHARACTERS = 4096

_PREFIX = re.compile(
    r"\[(?:\d{4}-\d{2}-\d{2} )?(\d{2}:\d{2}:\d{2})[^\]]*?(?: (DP\d+))?(?: [^\]]*)?\]"
)
_RUNNING = re.compile(r"#running-req: (\d+)")
_KV = re.compile(r"#(?:full )?token: (\d+)")
_RATE = re.compile(r"gen throughput \(token/s\): ([\d.]+)")
_NEW = re.compile(r"#new-token: (\d+)")
_NEEDED = ("running_requests", "kv_tokens", "decode_tokens_per_s")


def read_log(path: Path) -> list[LogLine]:
    """The decode lines of a server's log or of a table of them, in their order.

    Raises:
        ConfigError: if the file cannot be read, or is neither, or has too many lines.
    """
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            first = file.readline(_MAX_CHARACTERS)
            file.seek(0)
            table = all(name in first for name in _NEEDED)
            found = list(islice(_table(file) if table else _log(file), MAX_LINES + 1))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); name a log file.") from None
    if not found:
        raise ConfigError(f"{path} has no decode lines; give the log of an SGLang server.")
    if len(found) > MAX_LINES:
        raise ConfigError(f"{path} has more than {MAX_LINES:,} decode lines; cut it.")
    return found


def _pieces(file: TextIO) -> Iterator[str]:
    """The start of each line."""
    whole = True
    while piece := file.readline(_MAX_CHARACTERS):
        if whole:
            yield piece
        whole = piece.endswith("\n")


def _log(file: TextIO) -> Iterator[LogLine]:
    since: dict[str, tuple[int, int]] = {}
    for piece in _pieces(file):
        prefix = _PREFIX.search(piece)
        engine = (prefix and prefix[2]) or ""
        passes, prefilled = since.get(engine, (0, 0))
        if "Prefill batch" in piece and (new := _NEW.search(piece)):
            since[engine] = (passes + 1, prefilled + int(new[1]))
        elif line := _decode_line(piece, engine, prefix[1] if prefix else ""):
            yield replace(line, passes=passes, prefilled=prefilled)
            since[engine] = (0, 0)


def _decode_line(piece: str, engine: str, time: str) -> LogLine | None:
    if "Decode batch" not in piece:
        return None
    running, kv, rate = (field.search(piece) for field in (_RUNNING, _KV, _RATE))
    if running is None or kv is None or rate is None:
        return None
    return LogLine(
        engine=engine,
        time=time,
        running=int(running[1]),
        kv=int(kv[1]),
        tokens_per_s=float(rate[1]),
    )


def _table(file: TextIO) -> Iterator[LogLine]:
    for number, row in enumerate(csv.DictReader(_pieces(file)), start=2):
        try:
            yield LogLine(
                engine=row.get("run") or "",
                time=row.get("time") or "",
                running=int(row["running_requests"]),
                kv=int(row["kv_tokens"]),
                tokens_per_s=float(row["decode_tokens_per_s"]),
                passes=int(row.get("prefill_batches_since") or 0),
                prefilled=int(row.get("prefill_tokens_since") or 0),
            )
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"Line {number} of the table is not in order; mend it.") from None
