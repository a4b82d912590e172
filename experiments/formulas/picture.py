"""Draws the errors of the formulas, one line for each: where they hold and where they fail."""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from pathlib import Path

from aprilsched.analysis.style import GREY, PALETTE, finish, new_figure, save
from experiments.formulas.check import PARTS, RESULT
from experiments.frontier.results import section

__all__ = ["main"]

_GREEN, _BLUE, _ORANGE, _RED = PALETTE[2], PALETTE[0], PALETTE[1], PALETTE[5]
_HOLDS = 0.05
_WIDEST = 0.75

_SHOWN = (
    (
        "pools, lone samples",
        _GREEN,
        {
            "steps of a pool, mu/rho": "steps of a batch",
            "re-prefill, pool (rho)": "tokens prefilled again",
            "KV, rho·N·(prompt + mu(1 + c^2)/2): mean": "KV in use",
            "staleness of a pool, rho·L_max/mu": "largest staleness",
        },
    ),
    (
        "waves, lone samples: as approximated",
        _ORANGE,
        {
            "steps of a wave, mu/(rho - 1/2)": "steps of a batch",
            "wave time": "time of a batch",
            "re-prefill, waves (rho - 1)": "tokens prefilled again",
            "staleness, (rho - 1/2)·L_max/mu": "largest staleness",
        },
    ),
    (
        "waves, lone samples: exact",
        _BLUE,
        {
            "steps of a wave, exact": "steps of a batch",
            "wave time, exact": "time of a batch",
            "re-prefill, waves, exact": "tokens prefilled again",
            "staleness, ends of waves within L_max": "largest staleness",
        },
    ),
    (
        "waves, whole groups: as approximated",
        _RED,
        {
            "wave time, whole groups": "time of a batch",
            "re-prefill, whole groups": "tokens prefilled again",
            "staleness, whole groups": "largest staleness",
        },
    ),
)
"""Kind of schedule, its colour, and its formulas with what each is about."""


def main() -> None:
    errors: dict[str, list[float]] = {}
    for part in PARTS:
        for row in section(part, RESULT):
            # A formula of pools is drawn for pools.
            if not (row["formula"].startswith("KV,") and row["where"].startswith("waves")):
                errors.setdefault(row["formula"], []).append(row["error"])
    figure = new_figure(10, 6.2)
    axes = figure.subplots()
    axes.axvspan(-_HOLDS, _HOLDS, color=GREY, alpha=0.15, linewidth=0)
    labels: dict[float, str] = {}
    place = 0.0
    for kind, colour, formulas in _SHOWN:
        axes.text(-_WIDEST, place, kind, color=colour, fontsize=10, fontweight="bold", va="center")
        for formula, label in formulas.items():
            place -= 1
            found = [max(-_WIDEST, min(_WIDEST, error)) for error in errors[formula]]
            axes.plot([min(found), max(found)], [place, place], color=colour, linewidth=1)
            axes.scatter(found, [place] * len(found), color=colour, s=34, zorder=3)
            labels[place] = label
        place -= 1.4
    axes.set_yticks(list(labels), list(labels.values()))
    axes.set(xlim=(-_WIDEST - 0.02, _WIDEST + 0.02), ylim=(place + 0.8, 0.9))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:+.0%}")
    finish(
        axes,
        title="Closed forms hold for pools, for waves only the exact ones, for groups none",
        x="error of the formula, a dot for each ratio (band: 5 %; beyond 75 % at the edge)",
        y="",
    )
    save(figure, Path(__file__).with_name("formulas.png"))


if __name__ == "__main__":
    main()
