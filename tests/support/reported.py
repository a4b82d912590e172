"""A run whose trainer reported its log-probabilities, from one whose trainer did not."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

__all__ = ["with_reports"]


def with_reports(folder: Path, into: Path, *, engines: dict[str, float]) -> Path:
    """A copy of the run in `folder`, to be summed up again, in which the trainer's log-probability
    of each token of these engines differs by so much. Older tokens differ by 0.1 more for each
    version, and later positions by more."""
    into.mkdir()
    shutil.copy(folder / "config.toml", into)
    lines: list[str] = []
    for line in (folder / "events.jsonl").read_text().splitlines():
        lines.append(line)
        fact = json.loads(line)
        if fact["fact"] == "BatchDelivered":
            comparison = _comparison(fact["batch"], fact["version"], engines)
            lines.append(
                json.dumps({"t": fact["t"], "fact": "LogprobsCompared", "comparison": comparison})
            )
    (into / "events.jsonl").write_text("\n".join(lines) + "\n")
    return into


def _comparison(batch: int, version: int, engines: dict[str, float]) -> dict[str, Any]:
    off = sum(engines.values()) / len(engines)
    return {
        "batch": batch,
        "version": version,
        "bound": 0.1,
        "by_engine": {name: _differences(100, each) for name, each in engines.items()},
        "by_position": [_differences(100 - i, off * (1 + i / 4)) for i in range(9)],
        "by_staleness": [_differences(100 * len(engines), off + 0.1 * age) for age in range(4)]
        + [{}] * 2,
    }


def _differences(tokens: int, each: float) -> dict[str, Any]:
    return {
        "tokens": tokens,
        "total": tokens * each,
        "k3": tokens * (math.exp(each) - 1 - each),
        "largest": abs(each),
        "beyond": tokens * (abs(each) > 0.1),
    }
