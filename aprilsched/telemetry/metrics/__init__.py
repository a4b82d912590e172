"""Metrics of a run for Prometheus; exposing them needs the extra ``metrics``."""

from aprilsched.telemetry.metrics.listener import Metrics
from aprilsched.telemetry.metrics.serving import MetricsServer, serve_metrics

__all__ = ["Metrics", "MetricsServer", "serve_metrics"]
