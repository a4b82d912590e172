"""Draws how each kind of knowledge of lengths moves the frontier, as one line for each."""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import NamedTuple

from aprilsched.analysis.style import GREY, PALETTE, finish, new_figure, save
from experiments.frontier.results import HERE, section

__all__ = ["main"]

_BLUE, _ORANGE, _GREEN, _PINK, _SKY, _RED, _ = PALETTE


class _Line(NamedTuple):
    """How one part of the trials is drawn; the label goes to point number `at`, so far off."""

    colour: str
    style: str
    label: str
    at: int
    x: float
    y: float
    side: str = "left"


_LINES = {
    "reference": _Line(_ORANGE, "-", "waves (APRIL is the last)", -1, -20, -28),
    "siblings only": _Line(_SKY, "-", "finished siblings only", -1, 8, -3),
    "probes 1 (production)": _Line(
        _GREEN, "-", "and one probe:\nbuckets, in production", -1, 8, -4
    ),
    "one earlier epoch": _Line(_BLUE, "-", "one earlier epoch", 0, -8, 2, "right"),
    "every length known": _Line(GREY, "-", "every length known", 1, -8, 4, "right"),
    "every length known, sorted and waited for": _Line(
        GREY, ":", "every length known: sorted\nin blocks, each batch waited for", 1, 10, -8
    ),
    "free prefill, waves": _Line(_ORANGE, "--", "waves, prefill\nat no cost", -1, 8, -6),
    "free prefill, buckets": _Line(_GREEN, "--", "buckets, prefill\nat no cost", 2, -8, 8, "right"),
}


def main() -> None:
    rows = section("knowledge")
    figure = new_figure(9.5, 6)
    axes = figure.subplots()
    for about, line in _LINES.items():
        points = [(r["off_policy"], r["efficiency"]) for r in rows if r["about"] == about]
        points.sort(key=lambda point: (point[0] > 0, point[0], point[1]))
        xs, ys = zip(*points, strict=True)
        axes.plot(
            xs, ys, color=line.colour, linestyle=line.style, marker="o", markersize=4.5, linewidth=2
        )
        axes.annotate(
            line.label,
            points[line.at],
            (line.x, line.y),
            textcoords="offset points",
            ha=line.side,
            color=line.colour,
            fontsize=10,
        )
    finish(
        axes,
        title="Knowing lengths takes staleness away; hiding prefill adds speed",
        x="off-policy share of the delivered tokens  (better: left)",
        y="efficiency, T_bound / T  (better: up)",
    )
    axes.set(xlim=(-0.02, 0.95), ylim=(0.54, 0.88))
    save(figure, HERE / "knowledge.png")


if __name__ == "__main__":
    main()
