"""Opens and closes the optional listeners that export a run to other programs.

To add one, write a function that takes an :class:`_Exported` run, enters what it needs into its
stack and returns its listeners, and add it to :data:`_EXPORTERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from aprilsched.extras import extra
from aprilsched.runs.config_file import as_toml
from aprilsched.runs.setup import Setup
from aprilsched.telemetry.base import AnyListener
from aprilsched.telemetry.live_figures import LiveFigures
from aprilsched.telemetry.metrics import Metrics
from aprilsched.telemetry.trackers import StepTracker, begin_writer, tracker_names
from aprilsched.telemetry.worker import QueuedListener


@dataclass(frozen=True, kw_only=True, slots=True)
class _Exported:
    """A run that has not begun; `figures` get each event before any exporter."""

    setup: Setup
    folder: Path
    figures: LiveFigures
    stack: ExitStack


@contextmanager
def exporters(setup: Setup, folder: Path, figures: LiveFigures) -> Generator[list[AnyListener]]:
    """The exporters that the settings ask for, opened; by default there are none.

    They read `figures`, which must be an earlier listener of the run.

    Raises:
        ConfigError: if the package, the port or the user account of an exporter is not available.
    """
    with ExitStack() as stack:
        run = _Exported(setup=setup, folder=folder, figures=figures, stack=stack)
        yield [listener for export in _EXPORTERS for listener in export(run)]


def _metrics(run: _Exported) -> Sequence[AnyListener]:
    port = run.setup.settings.metrics_port
    if not port:
        return ()
    from aprilsched.telemetry.prometheus import serve_metrics

    metrics = Metrics(run.figures)
    run.stack.enter_context(serve_metrics(metrics, port))
    return (metrics,)


def _trackers(run: _Exported) -> Sequence[AnyListener]:
    config = as_toml(run.setup.settings)
    # Entered one at a time, so that the earlier ones are closed if the next one fails.
    return [
        run.stack.enter_context(StepTracker(begin_writer(name, run.folder, config), run.figures))
        for name in tracker_names(run.setup.settings.track)
    ]


def _spans(run: _Exported) -> Sequence[AnyListener]:
    if not run.setup.settings.otel:
        return ()
    with extra("otel"):
        from aprilsched.telemetry.spans import Spans, epoch_of_monotonic, otlp_tracer
    tracer = run.stack.enter_context(otlp_tracer())
    virtual = run.setup.clock == "virtual"
    spans = Spans(
        tracer,
        epoch_ns=None if virtual else epoch_of_monotonic(),
        attributes={"aprilsched.clock": run.setup.clock, "aprilsched.run.name": run.folder.name},
    )
    run.stack.enter_context(spans)
    return (run.stack.enter_context(QueuedListener(spans, kinds=spans.kinds)),)


_EXPORTERS: tuple[Callable[[_Exported], Sequence[AnyListener]], ...] = (_metrics, _trackers, _spans)
