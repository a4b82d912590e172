"""The pictures of ``aprilsched simulate`` (policies side by side) and ``aprilsched frontier``."""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import cycle, product
from textwrap import fill

import numpy as np
from numpy.typing import NDArray

from aprilsched.kernel.values.extras import extra
from aprilsched.observe.log.over_time import in_flight, window_end
from aprilsched.observe.log.run import Run
from aprilsched.simulation.side_by_side import PolicyRow, compare

with extra("plots"):
    from matplotlib.axes import Axes
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure
    from matplotlib.path import Path
    from matplotlib.text import Text
    from matplotlib.ticker import MaxNLocator

    from aprilsched.observe.report.style import GREY, INK, PALETTE, finish, new_figure

SHOWN_BATCHES = 5
COLOURS = (*PALETTE[:6], GREY, "#CC0044", "#A679D2", "#267359", "#C9AB9C", "#D400FF")
"""Twelve colours that differ for colour-blind readers too (simulated as by Machado and others,
2009), and are visible on white and on near-black; yellow is not visible on white."""
MARKERS = "os^D*vPXp<>hd"
"""Shapes that distinguish lines in grey. With the colours they distinguish 156 lines."""
_DIRECTIONS = [each for each in product((0, 1, -1, 0.5, -0.5), repeat=2) if 1 in np.abs(each)]
"""The directions from a point in which a place for its label is tried, in this order."""
_DISTANCES = (6, 7.5, 9, 14, 20, 28, 38, 50)
"""The distances of these places from the point, in typographic points."""
_LEADER = 14
"""Labels at this distance or farther get a line to their point."""
_RADIUS = 5
"""The room of a marker, from its centre to its edge in typographic points, with a margin."""
_KV = {"in_place": "KV kept", "retract": "KV recomputed", "abort": "KV recomputed"}
"""What happens to the KV of unfinished responses at an update, by the straggler rule."""


def comparison(runs: Mapping[str, Run], rows: Sequence[PolicyRow] = ()) -> Figure:
    """Draw policies side by side: speed, mean staleness, engine activity, and delivered lengths.
    Names of runs with stale tokens are followed by what happened to their KV at updates.

    Args:
        runs: the runs by policy.
        rows: figures as in comparison.json; policies without a run are counted in the title. If
            these are means over seeds, they are drawn with bars from the smallest to the largest
            seed; activity and lengths are of `runs`.
    """
    figure = new_figure(12, 8)
    (speed, price), (activity, mean) = figure.subplots(2, 2)
    colours = dict(zip(runs, cycle(COLOURS), strict=False))
    rows = rows or compare({name: run.summary for name, run in runs.items()}).policies
    by_name = {row.policy: row for row in rows}
    _draw_speed(speed, runs, by_name, colours)
    _draw_activity(activity, runs, colours)
    _draw_mean_lengths(mean, runs, colours)
    spots = _draw_price(price, by_name, colours)
    if (seeds := rows[0].seeds) > 1:
        means = f"means and range of {seeds} seeds"
        for axes in (speed, price, activity, mean):
            note = means if axes in (speed, price) else "first seed"
            axes.set_xlabel(f"{axes.get_xlabel()} ({note})")
    if len(runs) < len(rows):
        figure.suptitle(f"The {len(runs)} fastest of {len(rows)} policies")
    _legend(activity, figure, 10)
    _label(price, spots, 10)
    return figure


def _title(name: str, run: Run) -> str:
    """Return the name of a run, and whether responses keep their KV over updates."""
    if not run.summary.off_policy_token_share:
        return name
    kv = _KV.get(str(run.config.get("scheduler", {}).get("straggler")))
    return f"{name} ({kv})" if kv else name


def frontier(
    points: Sequence[PolicyRow],
    *,
    width: float = 9,
    height: float | None = None,
    title: str = "",
) -> Figure:
    """Draw speed against staleness, with a line that joins the ratios of each family of arms.

    Numbers are over-provisioning ratios, "auto" is not joined, and bars are the smallest and the
    largest of several seeds. The point that is nearest to a label is its own, unless a line leads
    from the label to its point; a label is left out if it would cover another label, a point or a
    line at every place. The legend has the names of families without the modules of your own
    rules, and leaves out a single point that its label names.

    Args:
        points: the arms, by names such as "wave@2" or "wave@2 max_staleness=4". Those with the same
            rule and settings are a family; the ratio is the label, or else the whole name.
        width: in inches. Text has 8 points below 8 inches and 10 from there on, so draw the picture
            in the size in which it is shown: 3.3 for a column of two.
        height: in inches; None for half of the width, and the rows of a legend below the axes.
        title: a title; none if empty, as in papers.
    """
    size = 8 if width < 8 else 10
    figure = new_figure(width, height or max(2.4, width / 2))
    axes = figure.subplots()
    families, spots = dict[str, list[tuple[str, PolicyRow]]](), list[_Spot]()
    for point in points:
        rule, _, rest = point.policy.partition("@")
        ratio, _, settings = rest.partition(" ")
        families.setdefault(f"{rule} {settings}".strip(), []).append((ratio or rule, point))
    siblings = {name: family[0][1].siblings for name, family in families.items()}
    styles = dict(zip(families, zip(cycle(COLOURS), cycle(MARKERS), strict=False), strict=False))
    for name, (colour, marker) in sorted(styles.items(), key=lambda s: siblings[s[0]] is not None):
        labels, own = zip(*sorted(families[name], key=lambda p: _staleness(p[1])), strict=True)
        x, y = np.array([*map(_staleness, own)]), np.array([*map(_speed, own)])
        joined = np.array(labels) != "auto"
        axes.plot(
            x[joined], y[joined], color=colour, marker=marker, markersize=size - 3, linewidth=1.6,
            label="" if labels == (name,) else fill(_legend_name(name, siblings[name]), 27),
        )  # fmt: skip
        axes.errorbar(
            x, y, color=colour, fmt=marker, ms=size - 3, elinewidth=1, capsize=3, zorder=1,
            xerr=_around(x, [p.staleness_mean_range for p in own]),
            yerr=_around(y, [p.delivered_tokens_per_s_range for p in own]),
        )  # fmt: skip
        spots += zip(labels, zip(x, y, strict=True), cycle([colour]), strict=False)
    axes.margins(x=0.06)
    ends = [p.delivered_tokens_per_s_range or (0.0, _speed(p)) for p in points]
    axes.set_ylim(0, 1.1 * max(most for _, most in ends))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.25)
    unit = "mean staleness of delivered tokens, updates"
    finish(axes, title=title, x=unit, y="delivered tokens/s", size=size)
    legend_height = _legend(axes, figure, size)
    figure.set_size_inches(width, height or figure.get_figheight() + legend_height)
    _label(axes, spots, size)
    return figure


def _legend_name(family: str, siblings: int | None) -> str:
    """Return the unit of delivery and the rule; a rule of the user is named without its module."""
    unit = "whole groups" if siblings is None else f"single samples, {siblings} siblings"
    rule = re.sub(r"^(groups$|samples(:\d+)?(\+| |$))?((\w+\.)+(?=[A-Za-z_]))?", "", family)
    return f"{unit}, {rule}" if rule else unit


def _legend(axes: Axes, figure: Figure, size: int) -> float:
    """Add a legend in the lower right corner of the axes if it covers nothing there, or else below
    them with as many columns as fit; return the height that it needs below, in inches."""
    figure.draw_without_rendering()  # lays the axes out
    covered = _covered(axes, figure.dpi / 72)
    for columns in (0, 6, 5, 4, 3, 2, 1):
        legend = figure.legend(
            *axes.get_legend_handles_labels(), frameon=False, fontsize=size, columnspacing=1,
            handlelength=1.6, labelspacing=0.25, handletextpad=0.5, borderpad=0,
            ncols=columns or 1, loc="outside lower center" if columns else "lower right",
            bbox_to_anchor=None if columns else (1, 0), bbox_transform=axes.transAxes,
        )  # fmt: skip
        box = legend.get_window_extent()
        fits = columns == 1 or box.width <= (figure if columns else axes).bbox.width
        if fits and (columns or not _overlap(box.get_points()[None], covered)):
            return box.height / figure.dpi if columns else 0.0
        legend.remove()
    raise AssertionError


def _speed(row: PolicyRow) -> float:
    return row.delivered_tokens_per_s or 0.0


def _staleness(row: PolicyRow) -> float:
    return row.staleness_mean or 0.0


def _around(
    values: Sequence[float] | NDArray[np.float64], ranges: Sequence[tuple[float, float] | None]
) -> NDArray[np.float64]:
    """Return the distances from the values to the ends of their ranges, float64 [2, n]."""
    ends = [each or (value, value) for value, each in zip(values, ranges, strict=True)]
    return np.abs(np.transpose(ends) - np.array(values))


_Spot = tuple[str, tuple[float, float], str]
"""The label of a point, its place in data, and the colour of the label."""
_Pixels = NDArray[np.float64]


def _label(axes: Axes, spots: Sequence[_Spot], size: int) -> None:
    """Label each point at the nearest place where the label covers nothing and is not nearer to
    another point, in letters of `size`; if possible, not across a line of another colour. The
    figure must be finished otherwise."""
    figure = axes.get_figure(root=True)
    assert figure is not None  # noqa: S101 - `axes` were made by a figure
    figure.draw_without_rendering()  # lays the axes out, so that places in pixels are known
    unit, inside = figure.dpi / 72, axes.get_window_extent().get_points()
    legends = [legend.get_window_extent().get_points()[None] for legend in figure.legends]
    taken, labels = np.concatenate([_covered(axes, unit), *legends]), np.empty((0, 2, 2))
    places = np.array([spot for _, spot, _ in spots], float).reshape(-1, 2)  # may be empty
    at: _Pixels = axes.transData.transform(places)
    apart = _distances(at, at)
    np.fill_diagonal(apart, np.inf)
    lines = [
        (line.get_color(), line.get_transform().transform_path(line.get_path()))
        for line in axes.lines
        if line.get_linestyle() != "None"
    ]
    crowded_first = np.argsort(apart.min(axis=1, initial=np.inf), kind="stable")
    for index in map(int, crowded_first):
        name, where, colour = spots[index]
        spot: _Pixels = at[index]
        others: _Pixels = np.delete(at, index, 0)
        # A line may leave a marker that another one covers, on the other side.
        room = np.minimum(_RADIUS * unit, 0.9 * np.delete(apart[index], index))
        text = axes.annotate(
            name, where, (0, 0), textcoords="offset points", fontsize=size, color=colour,
            ha="center", va="center", multialignment="center",
            arrowprops={
                "arrowstyle": "-", "color": colour, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 4,
            },
        )  # fmt: skip
        text.set_in_layout(False)  # the places below hold for the present layout
        half = np.array(Text.get_window_extent(text).size) / 2 + unit  # without the line
        foreign = [path for other, path in lines if other != colour]
        found: list[tuple[bool, float, _Pixels]] = []
        for distance, direction in product(_DISTANCES, np.array(_DIRECTIONS)):
            place = spot + direction * (half + distance * unit)
            box = np.array([[place - half, place + half]])
            if (box[0, 0] < inside[0]).any() or (box[0, 1] > inside[1]).any():
                continue
            line = _along(place, spot)
            if distance < _LEADER:
                misread = (_gaps(place, half, others) < 1.25 * _gaps(place, half, spot)).any()
            else:
                near = _distances(others, line).min(axis=1, initial=np.inf) < room
                misread = near.any() or _overlap(_boxes(line, unit), labels)
            if not misread and not _overlap(box, taken):
                end = spot + _RADIUS * unit * (place - spot) / np.linalg.norm(place - spot)
                way = Path([place, end])
                crosses = any(way.intersects_path(each, filled=False) for each in foreign)
                found.append((crosses, distance, place))
        if not found:
            text.remove()
            continue
        _, distance, place = min(found, key=lambda each: each[:2])
        text.set_position(tuple((place - spot) / unit))
        box = np.array([[place - half, place + half]])
        labels, taken = np.concatenate([labels, box]), np.concatenate([taken, box])
        if distance >= _LEADER:
            taken = np.concatenate([taken, _boxes(_along(place, spot), unit)])
        elif text.arrow_patch is not None:
            text.arrow_patch.set_visible(False)


def _distances(points: _Pixels, others: _Pixels) -> _Pixels:
    return np.linalg.norm(points[:, None] - others, axis=-1)


def _gaps(place: _Pixels, half: _Pixels, points: _Pixels) -> _Pixels:
    """Return the distances of points from a box, by its centre and half of its size."""
    return np.linalg.norm(np.maximum(np.abs(points - place) - half, 0), axis=-1)


def _covered(axes: Axes, unit: float) -> _Pixels:
    """Return boxes around all lines, markers and bars; `unit` is a typographic point in pixels."""
    found = [np.empty((0, 2, 2))]
    for line in axes.lines:
        corners: _Pixels = line.get_transform().transform(line.get_xydata())
        if line.get_linestyle() != "None":
            found.append(_boxes_along(corners, unit))
        if line.get_marker() != "None":
            found.append(_boxes(corners, _RADIUS * unit))
    for bars in axes.collections:
        if isinstance(bars, LineCollection):
            ends = map(axes.transData.transform, bars.get_segments())
            found += [_boxes_along(each, unit) for each in ends]
    return np.concatenate(found)


def _boxes_along(corners: _Pixels, radius: float) -> _Pixels:
    """Return squares around many points of a line through the corners, float64 [n, 2]."""
    return _boxes(_along(corners[:-1], corners[1:]).reshape(-1, 2), radius)


def _along(start: _Pixels, end: _Pixels) -> _Pixels:
    return np.linspace(start, end, 40)


def _boxes(at: _Pixels, radius: float) -> _Pixels:
    """Return squares around points as their lowest and highest corners, float64 [n, 2, 2]."""
    return np.stack([at - radius, at + radius], axis=1)


def _overlap(boxes: _Pixels, others: _Pixels) -> bool:
    low, high = boxes[:, None, 0], boxes[:, None, 1]
    return bool(((low < others[:, 1]) & (high > others[:, 0])).all(axis=-1).any())


def _draw_speed(
    axes: Axes, runs: Mapping[str, Run], rows: Mapping[str, PolicyRow], colours: Mapping[str, str]
) -> None:
    rates = [_speed(rows[name]) for name in runs]
    ranges = [rows[name].delivered_tokens_per_s_range for name in runs]
    names = [fill(_title(name, run), 24, break_long_words=False) for name, run in runs.items()]
    drawn = axes.barh(
        names, rates, color=list(colours.values()), height=0.6,
        xerr=_around(rates, ranges) if all(ranges) else None,
        error_kw={"ecolor": "black", "elinewidth": 1, "capsize": 3},
    )  # fmt: skip
    gains = [f"  ({rate / rates[0] - 1:+.0%})" if rates[0] else "" for rate in rates]
    labels = [f"{rate:,.0f}{gain}" for rate, gain in zip(rates, ["", *gains[1:]], strict=True)]
    axes.bar_label(drawn, labels=labels, padding=4, fontsize=11)
    axes.invert_yaxis()
    axes.set_xlim(0, max([*rates, 1.0]) * 1.4)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    burn_in = max(run.summary.steady_state.burn_in for run in runs.values())
    title = f"Speed once it is steady (after {burn_in} batches)"
    finish(axes, title=title, x="delivered tokens per second", y="")


def _draw_price(
    axes: Axes, rows: Mapping[str, PolicyRow], colours: Mapping[str, str]
) -> Sequence[_Spot]:
    """Draw the points, and return them with their labels."""
    spots: list[_Spot] = []
    for (name, colour), marker in zip(colours.items(), cycle(MARKERS), strict=False):
        row = rows[name]
        staleness, speed = row.staleness_mean, row.delivered_tokens_per_s
        if staleness is None or speed is None:
            continue
        axes.plot(
            staleness, speed, color=colour, marker=marker, markersize=9, zorder=3, clip_on=False
        )
        if row.staleness_mean_range is not None:
            axes.errorbar(
                staleness, speed, color=colour, elinewidth=1, capsize=3,
                xerr=_around([staleness], [row.staleness_mean_range]),
                yerr=_around([speed], [row.delivered_tokens_per_s_range]),
            )  # fmt: skip
        spots.append((fill(name, 24, break_long_words=False), (staleness, speed), INK))
    axes.margins(x=0.08)
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])  # room for labels above the points
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.25)
    title = "Its price: up and to the left is better"
    finish(axes, title=title, x="price: mean staleness, updates", y="delivered tokens/s")
    return spots


def _draw_activity(axes: Axes, runs: Mapping[str, Run], colours: Mapping[str, str]) -> None:
    end = min(window_end(run, SHOWN_BATCHES) for run in runs.values())
    most = 1.0
    for name, run in runs.items():
        times, counts = in_flight(run, end)
        label = _title(name, run)
        axes.step(times, counts, where="post", color=colours[name], linewidth=1.6, label=label)
        most = max(most, 1.05 * float(counts.max()))
    axes.set_xlim(0, end)
    axes.set_ylim(0, most)
    finish(axes, title="Engine activity: low is idle", x="seconds", y="responses in flight")


def _draw_mean_lengths(axes: Axes, runs: Mapping[str, Run], colours: Mapping[str, str]) -> None:
    for name, run in runs.items():
        means = run.summary.bias.delivered_mean_length_by_batch
        batches = np.arange(1, len(means) + 1)
        values = np.cumsum(means) / batches
        axes.plot(batches, values, color=colours[name], linewidth=2.2)
    mean = next(iter(runs.values())).summary.bias.workload_mean_length
    if mean is not None:
        axes.axhline(mean, color=GREY, linewidth=1, linestyle=":")
        axes.annotate(
            "dotted: the workload's mean", (0.99, 0.03), xycoords="axes fraction",
            fontsize=10, color=GREY, horizontalalignment="right",
        )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    title = "Delivered lengths: short ones come first"
    finish(axes, title=title, x="batch", y="mean length of all so far")
