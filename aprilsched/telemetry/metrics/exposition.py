"""Gives the metrics to prometheus_client, as a collector for any of its registries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from aprilsched.telemetry.metrics.histogram import Buckets
from aprilsched.telemetry.metrics.listener import Metrics, Sample
from aprilsched.telemetry.metrics.table import METRICS
from aprilsched.telemetry.metrics.table import Metric as Declared

__all__ = ["MetricsCollector"]


class MetricsCollector(Collector):
    """Reads `metrics` at each scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterator[Metric]:
        """The metrics without values; a registry uses their names to find conflicts."""
        for declared in METRICS.values():
            yield _simple(declared, ()) if declared.kind != "histogram" else _empty(declared)

    def collect(self) -> Iterator[Metric]:
        scrape = self._metrics.scrape()
        samples: dict[str, list[Sample]] = {name: [] for name in METRICS}
        for sample in scrape.samples:
            samples[sample.name].append(sample)
        for name, declared in METRICS.items():
            if declared.kind == "histogram":
                yield _histogram(declared, scrape.histograms[name])
            else:
                yield _simple(declared, samples[name])


def _simple(declared: Declared, samples: Sequence[Sample]) -> Metric:
    of = CounterMetricFamily if declared.kind == "counter" else GaugeMetricFamily
    family = of(declared.name, declared.help, labels=declared.labels)
    for sample in samples:
        family.add_metric(sample.labels, sample.value)
    return family


def _empty(declared: Declared) -> HistogramMetricFamily:
    return HistogramMetricFamily(declared.name, declared.help, labels=declared.labels)


def _histogram(declared: Declared, held: Buckets) -> Metric:
    family = _empty(declared)
    edges = (*(str(edge) for edge in held.edges), "+Inf")
    pairs = [(edge, float(count)) for edge, count in zip(edges, held.counts, strict=True)]
    family.add_metric((), pairs, held.sum)
    return family
