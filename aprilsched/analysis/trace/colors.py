"""Which policy version a slice shows, so that each viewer paints versions in their own colours.

Perfetto paints by the name of a slice and passes over the digits in it, so a name ends in a letter
that changes with the version; chrome://tracing takes the name of a colour.
"""

from __future__ import annotations

__all__ = ["color_of", "version_label"]

_LETTERS = "abcdefgh"
_COLORS = (
    "thread_state_running",
    "rail_response",
    "rail_animation",
    "cq_build_failed",
    "thread_state_iowait",
    "rail_idle",
    "vsync_highlight_color",
    "cq_build_attempt_runnig",
)
_UNKNOWN = "v?"


def version_label(version: int | None) -> str:
    """``v3 d``; versions that follow each other have different letters."""
    if version is None:
        return _UNKNOWN
    return f"v{version} {_LETTERS[version % len(_LETTERS)]}"


def color_of(version: int | None) -> str:
    """For chrome://tracing."""
    return "" if version is None else _COLORS[version % len(_COLORS)]
