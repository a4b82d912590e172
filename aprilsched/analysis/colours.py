"""One colour for each part of the engines' time, in every picture and page. No matplotlib here."""

from __future__ import annotations

from aprilsched.telemetry.usage.parts import Part

__all__ = ["PART_COLOURS"]

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
    "lost": "#444444",
}
"""Blues are busy, greys are nobody's fault; the others are Okabe and Ito's, and two of Tol's."""
