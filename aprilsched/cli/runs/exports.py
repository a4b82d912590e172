"""Opens and closes the optional listeners that export a run to other programs."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from aprilsched.cli.runs.config_file import as_toml
from aprilsched.cli.runs.setup import Setup
from aprilsched.kernel.shell.listener import AnyListener
from aprilsched.observe.exports.tracker_writers import begin_writer, tracker_names
from aprilsched.observe.exports.trackers import StepTracker
from aprilsched.observe.figures.live_figures import LiveFigures
from aprilsched.observe.figures.metrics import Metrics


@contextmanager
def exporters(setup: Setup, folder: Path, figures: LiveFigures) -> Generator[list[AnyListener]]:
    """Open the configured exporters, by default none, and yield their listeners.

    They read `figures`, which must be an earlier listener of the run.

    Raises:
        ConfigError: if the package, the port or the user account of an exporter is not available.
    """
    settings, listeners = setup.settings, list[AnyListener]()
    with ExitStack() as stack:
        if settings.metrics_port:
            from aprilsched.observe.exports.prometheus import serve_metrics

            metrics = Metrics(figures)
            stack.enter_context(serve_metrics(metrics, settings.metrics_port))
            listeners.append(metrics)
        # Enter them one at a time, so that a failure closes the earlier ones.
        for name in tracker_names(settings.track):
            writer = begin_writer(name, folder, as_toml(settings))
            listeners.append(stack.enter_context(StepTracker(writer, figures)))
        yield listeners
