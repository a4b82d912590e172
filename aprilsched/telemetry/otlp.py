"""Sends spans to an OpenTelemetry collector that the environment names (OTEL_…). Needs ``otel``."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Tracer

__all__ = ["otlp_tracer"]

_MAX_PENDING_SPANS = 1 << 16
"""Number of spans that may wait. All spans of a batch come at once, and the SDK's own 2048 would
drop most of a large batch."""


@contextmanager
def otlp_tracer() -> Generator[Tracer]:
    """A tracer whose spans go to OTEL_EXPORTER_OTLP_ENDPOINT by OTLP over HTTP (by default port
    4318 of this machine).

    At the end of the block the remaining spans are sent. The provider of the process is not
    changed.
    """
    name = os.environ.get("OTEL_SERVICE_NAME", "aprilsched")
    provider = TracerProvider(
        resource=Resource.create({"service.name": name}), shutdown_on_exit=False
    )
    provider.add_span_processor(
        BatchSpanProcessor(OTLPSpanExporter(), max_queue_size=_MAX_PENDING_SPANS)
    )
    try:
        yield provider.get_tracer("aprilsched")
    finally:
        provider.shutdown()
