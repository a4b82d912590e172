"""Short forms of names and figures for the live view."""

from __future__ import annotations

from aprilsched.telemetry.usage.parts import Part

__all__ = ["CAUSES", "clock_time", "cut", "host", "percent", "plural", "thousands"]

CAUSES: dict[Part, str] = {
    "re_prefill": "re-prefill",
    "tail": "tail of the batch",
    "pause": "paused",
    "refit": "new weights",
    "trainer": "waiting for trainer",
    "prompts": "waiting for prompts",
    "rewards": "waiting for rewards",
    "environment": "tools of episodes",
    "asleep": "asleep",
    "lost": "out of use",
}
"""Names of the parts in which engines are not busy."""

_MINUTE, _HOUR = 60, 3600


def clock_time(seconds: float) -> str:
    """``m:ss`` or ``h:mm:ss``."""
    whole = int(seconds)
    minutes, rest = divmod(whole, _MINUTE)
    if whole < _HOUR:
        return f"{minutes}:{rest:02}"
    return f"{whole // _HOUR}:{minutes % _MINUTE:02}:{rest:02}"


def percent(share: float) -> str:
    """A percentage without decimals, except for small ones that would be 0 %."""
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def thousands(value: float) -> str:
    """At most four digits, with k or M for larger numbers."""
    if value < 9_999.5:
        return f"{value:,.0f}"
    return f"{value / 1e3:,.0f}k" if value < 999_500 else f"{value / 1e6:.1f}M"


def plural(count: int, noun: str) -> str:
    """``1 engine``, ``2 engines``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def cut(name: str, width: int) -> str:
    """The end of a name, because the end distinguishes it from its neighbours."""
    if len(name) <= width:
        return name
    return "" if width < 2 else "~" + name[len(name) - width + 1 :]


def host(engine: str) -> str:
    """An engine's name without the parts that all URLs have in common."""
    return engine.removeprefix("http://").removeprefix("https://")
