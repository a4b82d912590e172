"""The pictures that a command leaves in its folders; without matplotlib it says so and goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from aprilsched.analysis.run import read_run

__all__ = ["draw_comparison"]


def draw_comparison(
    root: Path, folders: Mapping[str, str], messages: Console, *, each: bool = True
) -> None:
    """comparison.png in `root`; with `each`, timeline.png, lengths.png and bias.png in the folder
    of each policy, which takes two seconds for each."""
    try:
        from aprilsched.analysis import bias_plots, plots
    except ImportError:
        messages.print("No pictures: matplotlib is missing (pip install 'aprilsched[plots]').")
        return
    runs = {name: read_run(root / folder) for name, folder in folders.items()}
    plots.save(plots.comparison(runs), root / "comparison.png")
    if not each:
        return
    for name, run in runs.items():
        folder = root / folders[name]
        plots.save(plots.timeline(run, title=name), folder / "timeline.png")
        plots.save(plots.lengths(run, title=name), folder / "lengths.png")
        plots.save(bias_plots.bias(run, title=name), folder / "bias.png")
