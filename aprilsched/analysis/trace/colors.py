"""Which policy version a slice shows, so that each viewer paints versions in their own colours.

Perfetto paints by the name of a slice and passes over the digits in it, so a name ends in letters
that change with the version; chrome://tracing takes the name of a colour.
"""

from __future__ import annotations

__all__ = ["color_of", "version_label"]

_ENDINGS = ("mn", "eg", "dr", "uk", "ri", "ir", "pa", "pf")
"""Behind "rollout v" these are blue, orange, green, pink, violet, lime, teal and red in the UI of
Perfetto 52; they mean nothing else."""
_COLORS = (
    "thread_state_running",
    "rail_response",
    "rail_animation",
    "rail_load",
    "cq_build_attempt_passed",
    "rail_idle",
    "thread_state_iowait",
    "startup",
)
_UNKNOWN = "v?"


def version_label(version: int | None) -> str:
    """``v3 uk``; versions that follow each other end in different letters."""
    if version is None:
        return _UNKNOWN
    return f"v{version} {_ENDINGS[version % len(_ENDINGS)]}"


def color_of(version: int | None) -> str:
    """For chrome://tracing."""
    return "" if version is None else _COLORS[version % len(_COLORS)]
