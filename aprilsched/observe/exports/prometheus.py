"""Exposes metrics to prometheus_client: a collector for any registry, and a server.

The server does not use the run's event loop: a trainer that computes in the loop's thread blocks
the loop for minutes, and the metrics must remain available while it does.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aprilsched.errors import ConfigError
from aprilsched.kernel.values.extras import extra
from aprilsched.observe.figures.figures import Figure, Kind
from aprilsched.observe.figures.metrics import Metrics
from aprilsched.observe.figures.table import FIGURES

with extra("metrics"):
    from prometheus_client import (
        CONTENT_TYPE_LATEST,
        CollectorRegistry,
        generate_latest,
        start_http_server,
    )
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.process_collector import ProcessCollector
    from prometheus_client.registry import Collector

_HIGHEST_PORT = 65_535


class MetricsCollector(Collector):
    """Reads the metrics of a run at each scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterator[Metric]:
        """Return the metrics without values; a registry checks their names for conflicts."""
        yield from self._families(FIGURES).values()

    def collect(self) -> Iterator[Metric]:
        scrape = self._metrics.scrape()
        families = self._families(scrape.values)
        for name, values in scrape.values.items():
            for labels, value in values.items():
                families[name].add_metric(labels, float(value))
        for name, held in scrape.histograms.items():
            families[name].add_metric((), held.counts, held.sum)
        yield from families.values()

    def _families(self, names: Iterable[str]) -> dict[str, Any]:
        """Return metrics without values. Families of the three kinds take different values."""
        return {name: self._empty(FIGURES[name]) for name in names if FIGURES[name].exposed}

    def _empty(self, figure: Figure) -> Metric:
        return _FAMILIES[figure.kind](figure.metric, figure.help, labels=figure.labels)


_FAMILIES: Mapping[Kind, Callable[..., Metric]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def exposition(metrics: Metrics) -> tuple[bytes, str]:
    """Return the metrics of the run and of the process in Prometheus' text format, and its content
    type, for an existing server."""
    return generate_latest(_registry(metrics)), CONTENT_TYPE_LATEST


def _registry(metrics: Metrics) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(MetricsCollector(metrics))
    ProcessCollector(registry=registry)
    return registry


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsServer:
    """Path of the metrics."""

    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"


@contextmanager
def serve_metrics(metrics: Metrics, port: int, host: str = "127.0.0.1") -> Generator[MetricsServer]:
    """Serve `metrics` while the block runs.

    The server has no authentication, so `host` defaults to the loopback interface.

    Args:
        metrics: the metrics of a run.
        port: the port; 0 selects a free one.

    Raises:
        ConfigError: if the port cannot be opened.
    """
    if not 0 <= port <= _HIGHEST_PORT:
        raise ConfigError(f"the metrics' port is {port}; give one from 0 to {_HIGHEST_PORT}.")
    try:
        server, thread = start_http_server(port, host, _registry(metrics))
    except OSError as error:
        raise ConfigError(
            f"metrics cannot be served on {host}:{port} ({error.strerror or error}); give another "
            "port."
        ) from error
    try:
        yield MetricsServer(host=host, port=server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
