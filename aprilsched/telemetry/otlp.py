"""Sends spans to an OpenTelemetry collector, as the environment (OTEL_…) says. Needs ``otel``."""

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
"""A batch's spans come all at once; the SDK's own 2048 would drop most of a large one."""


@contextmanager
def otlp_tracer() -> Generator[Tracer]:
    """A tracer whose spans go to OTEL_EXPORTER_OTLP_ENDPOINT (OTLP over HTTP; port 4318 of this
    machine unless set). The end of the block sends what is left. The process's own provider is
    left alone."""
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
