"""Single gauges out of a Prometheus text page, without building the page in memory as objects.

A page of a busy server has thousands of lines, of which a handful are wanted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

__all__ = ["SERIES", "Over", "read_series"]

Over: TypeAlias = Literal["sum", "mean"]

SERIES: Mapping[str, Over] = {
    "num_running_reqs": "sum",
    "num_queue_reqs": "sum",
    "num_used_tokens": "sum",
    "token_usage": "mean",
    "gen_throughput": "sum",
    "cache_hit_rate": "mean",
    "utilization": "mean",
}
"""SGLang's gauges that are sampled, and how those of several ranks become one."""

_LINE = re.compile(rb"^sglang:([a-z_]+)(?:\{[^\n]*\})? ([^ \n]{1,32})(?: \d+)?$", re.MULTILINE)


def read_series(page: bytes, wanted: Mapping[str, Over] = SERIES) -> dict[str, float]:
    """The `wanted` gauges of a page; what is not there, or no finite number, is left out."""
    found: dict[str, list[float]] = {}
    for match in _LINE.finditer(page):
        name = match[1].decode()
        if name in wanted and (value := _finite(match[2])) is not None:
            found.setdefault(name, []).append(value)
    return {name: _over(wanted[name], values) for name, values in found.items()}


def _over(over: Over, values: Sequence[float]) -> float:
    total = math.fsum(values)
    return total if over == "sum" else total / len(values)


def _finite(text: bytes) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
