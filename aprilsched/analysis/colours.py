"""The colours of pictures and pages, for each part of the time of engines and of rollouts. It
does not need matplotlib."""

from __future__ import annotations

from aprilsched.telemetry.engine_time import Part
from aprilsched.telemetry.rollout_time import RolloutPart

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
"""Okabe and Ito, 2008: the eight-colour set without black."""
GREY = "#808080"
INK = "#767676"
"""The colour of text and axes. It can be read on white (contrast 4.5) and on near-black (4.1)."""

PART_COLOURS: dict[Part, str] = {
    "decode": "#0072B2",
    "prefill": "#56B4E9",
    "re_prefill": "#CC79A7",
    "tail": "#E69F00",
    "pause": "#D55E00",
    "refit": "#F0E442",
    "trainer": "#BBBBBB",
    "prompts": "#882255",
    "rewards": "#009E73",
    "environment": "#999933",
    "asleep": "#DDDDDD",
    "lost": "#6B6B6B",
}
"""Busy parts are blue, and parts that no schedule can avoid are grey. The others have colours of
Okabe and Ito, and two of Tol."""

ROLLOUT_COLOURS: dict[RolloutPart, str] = {
    "engine": "#0072B2",
    "paused": "#D55E00",
    "queue": "#CC79A7",
    "tools": "#999933",
    "agent": "#DDDDDD",
    "score": "#009E73",
    "batch": "#E69F00",
}
"""Colours of what a rollout is at; a part that engines have too has its colour."""

AGE_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#E69F00", "#D55E00")
"""Colours of tokens by their staleness, 0 versions first. The last one is for all older tokens."""


def ink_on(colour: str) -> str:
    """Black or white, whichever can be read better on `colour`, like ``#0072B2`` (by its luminance,
    as in WCAG)."""
    red, green, blue = [(part / 255) ** 2.2 for part in bytes.fromhex(colour[1:])]
    dark = 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.3
    return "#FFFFFF" if dark else "#000000"
