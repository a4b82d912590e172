"""Gives the metrics to prometheus_client, as a collector for any of its registries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from aprilsched.telemetry.metrics.histogram import Buckets
from aprilsched.telemetry.metrics.listener import Metrics
from aprilsched.telemetry.metrics.table import METRICS
from aprilsched.telemetry.metrics.table import Metric as Declared

__all__ = ["MetricsCollector"]


_Labels: TypeAlias = tuple[str, ...]


class MetricsCollector(Collector):
    """Reads `metrics` at each scrape: those of one run, or those of each shard of a run by its
    name, which becomes the first label."""

    def __init__(self, metrics: Metrics | Mapping[str, Metrics]) -> None:
        self._metrics: Mapping[_Labels, Metrics]
        if isinstance(metrics, Metrics):
            self._labels: _Labels = ()
            self._metrics = {(): metrics}
        else:
            self._labels = ("shard",)
            self._metrics = {(shard,): each for shard, each in metrics.items()}

    def describe(self) -> Iterator[Metric]:
        """The metrics without values; a registry uses their names to find conflicts."""
        for declared in METRICS.values():
            yield self._empty(declared)

    def collect(self) -> Iterator[Metric]:
        families = {name: self._empty(declared) for name, declared in METRICS.items()}
        for labels, metrics in self._metrics.items():
            scrape = metrics.scrape()
            for sample in scrape.samples:
                families[sample.name].add_metric((*labels, *sample.labels), sample.value)
            for name, held in scrape.histograms.items():
                families[name].add_metric(labels, _pairs(held), held.sum)
        yield from families.values()

    def _empty(self, declared: Declared) -> Any:
        """The metric without values. The families of the three kinds take different values."""
        kind = _FAMILIES[declared.kind]
        return kind(declared.name, declared.help, labels=(*self._labels, *declared.labels))


_FAMILIES: Mapping[str, Callable[..., Metric]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _pairs(held: Buckets) -> Sequence[tuple[str, float]]:
    edges = (*(str(edge) for edge in held.edges), "+Inf")
    return [(edge, float(count)) for edge, count in zip(edges, held.counts, strict=True)]
