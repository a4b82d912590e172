"""Draws policies as points and bars: the frontier of speed and staleness, and the results of
replays."""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aprilsched.analysis.style import GREY, PALETTE, finish, new_figure

__all__ = ["Figures", "frontier", "what_if"]


class Figures(Protocol):
    """The figures of a policy that are drawn; rows of ``aprilsched simulate`` and ``replay`` have
    them."""

    @property
    def policy(self) -> str: ...
    @property
    def efficiency(self) -> float | None: ...
    @property
    def off_policy_share(self) -> float | None: ...
    @property
    def seconds_a_batch(self) -> float | None: ...


def frontier(
    line: Mapping[str, Figures],
    others: Mapping[str, Figures] | None = None,
    *,
    name: str = "",
    title: str = "",
) -> Figure:
    """Draw speed against staleness: one family of policies as a line, others as points with
    labels."""
    figure = new_figure(9, 5)
    axes = figure.subplots()
    places = [place for row in line.values() if (place := _place(row)) is not None]
    axes.plot(
        [share for share, _ in places], [speed for _, speed in places],
        color=PALETTE[0], marker="o", markersize=7, linewidth=2, label=name,
    )  # fmt: skip
    for label, row in line.items():
        _mark(axes, label, row, PALETTE[0], above=False)
    for place, (label, row) in enumerate((others or {}).items()):
        colour = PALETTE[(5, 2, 3)[place % 3]]
        if (spot := _place(row)) is not None:
            axes.scatter(*spot, s=150, marker="D", color=colour, zorder=3, label=label)
        _mark(axes, label, row, colour, above=True)
    axes.axhline(1, color=GREY, linewidth=1, linestyle=":")
    axes.annotate(
        "what no schedule can pass", (0.99, 0.985), xycoords=("axes fraction", "data"),
        fontsize=10, color=GREY, horizontalalignment="right", verticalalignment="top",
    )  # fmt: skip
    axes.set_xlim(-0.03, 1.0)
    axes.set_ylim(0, 1.04)
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.grid(alpha=0.25)
    if name:
        axes.legend(frameon=False, fontsize=10, loc="lower right")
    finish(
        axes,
        title=title,
        x="price: share of tokens that an older policy sampled",
        y="speed: best possible time / time",
    )
    return figure


def what_if(
    recorded: Figures,
    replayed: Sequence[Figures],
    *,
    run: Figures | None = None,
    title: str = "",
) -> Figure:
    """Draw the seconds a batch of a run, as recorded and as replayed under other policies.

    Args:
        run: a run under the policy of the last replay, which the replay has not used.
    """
    rows: list[tuple[str, Figures, str]] = [("the run as it was", recorded, GREY)]
    rows += [(f"replayed: {row.policy}", row, PALETTE[0]) for row in replayed]
    if run is not None:
        rows.append((f"run: {run.policy}", run, PALETTE[2]))
    figure = new_figure(9, 1.2 + 0.5 * len(rows))
    axes = figure.subplots()
    seconds = [row.seconds_a_batch or 0.0 for _, row, _ in rows]
    drawn = axes.barh(
        [name for name, _, _ in rows], seconds, color=[colour for _, _, colour in rows], height=0.66
    )
    labels = [
        f"{value:.1f} s"
        + ("" if row.off_policy_share is None else f", {row.off_policy_share:.0%} off-policy")
        for value, (_, row, _) in zip(seconds, rows, strict=True)
    ]
    axes.bar_label(drawn, labels=labels, padding=5, fontsize=11)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max([*seconds, 1e-9]))
    finish(axes, title=title, x="seconds a batch, without the trainer's", y="")
    return figure


def _place(row: Figures) -> tuple[float, float] | None:
    if row.efficiency is None or row.off_policy_share is None:
        return None
    return row.off_policy_share, row.efficiency


def _mark(axes: Axes, label: str, row: Figures, colour: str, *, above: bool) -> None:
    place = _place(row)
    if place is not None:
        axes.annotate(
            label, place, xytext=(0, 10 if above else -18), textcoords="offset points",
            fontsize=11, color=colour, horizontalalignment="left" if place[0] < 0.05 else "center",
            fontweight="bold" if above else "normal",
        )  # fmt: skip
