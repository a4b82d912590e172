"""One picture of what scheduling is about: runs over the same time, and where their time goes."""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from aprilsched.analysis.colours import PART_LABELS
from aprilsched.analysis.plots.usage_parts import TimeUnit, draw_causes, draw_where
from aprilsched.analysis.style import PART_COLOURS, finish, new_figure
from aprilsched.analysis.usage import RunUsage
from aprilsched.telemetry.engine_time import PARTS, Part

__all__ = ["first_look"]


def first_look(
    usages: Mapping[str, RunUsage],
    *,
    seconds: float,
    start: float = 0.0,
    unit: TimeUnit = "gpu_minutes_per_million",
    title: str = "",
) -> Figure:
    """The runs above each other from `start` on, and below one bar for each with where its
    engines' time goes."""
    count = len(usages)
    figure = new_figure(11, 1.6 * count + 0.5 * count + 2.2)
    *over_time, where = figure.subplots(
        count + 1, 1, height_ratios=[*([1.6] * count), 0.5 * count + 0.5]
    )
    shown: set[Part] = set()
    for axes, (name, usage) in zip(over_time, usages.items(), strict=True):
        shown.update(draw_causes(axes, usage, start=start, end=start + seconds))
        axes.set_yticks([0, 0.5, 1])
        finish(axes, title=name, x="", y="slots")
    over_time[-1].set_xlabel("seconds", fontsize=10)
    # A name may go on after a colon; beside a bar there is no room for that.
    draw_where(where, {name.split(":")[0]: u for name, u in usages.items()}, unit=unit)
    finish(where, title="What a million tokens cost in GPU-minutes", x="", y="")
    where.set_xticks([])
    where.spines["bottom"].set_visible(False)
    parts: list[Part] = [part for part in PARTS if part in shown]
    figure.legend(
        handles=[Patch(color=PART_COLOURS[part], label=PART_LABELS[part]) for part in parts],
        loc="outside lower center", ncols=min(4, len(parts)), frameon=False, fontsize=10,
    )  # fmt: skip
    if title:
        figure.suptitle(title, fontsize=13, x=0.01, horizontalalignment="left")
    return figure
