"""Serves the metrics over HTTP for Prometheus, from a thread of its own.

It does not use the run's event loop, because a trainer that computes in the loop's thread stops the
loop for minutes, and the metrics must stay available meanwhile.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from aprilsched.errors import ConfigError
from aprilsched.extras import extra
from aprilsched.telemetry.metrics.listener import Metrics

__all__ = ["MetricsServer", "serve_metrics"]

_HIGHEST_PORT = 65_535


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
def serve_metrics(
    metrics: Metrics | Mapping[str, Metrics], port: int, host: str = "127.0.0.1"
) -> Generator[MetricsServer]:
    """Serve `metrics` while the block runs (needs the extra ``metrics``).

    There is no authentication, so the default `host` is the loopback interface of this machine.

    Args:
        metrics: the metrics of a run; or those of the shards of a run by their names, which every
            metric then has as its label ``shard``.
        port: the port; 0 takes a free one.

    Raises:
        ConfigError: if prometheus-client is not installed, or the port cannot be opened.
    """
    if not 0 <= port <= _HIGHEST_PORT:
        raise ConfigError(f"the metrics' port is {port}; give one from 0 to {_HIGHEST_PORT}.")
    with extra("metrics"):
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.process_collector import ProcessCollector

        from aprilsched.telemetry.metrics.exposition import MetricsCollector
    registry = CollectorRegistry()
    registry.register(MetricsCollector(metrics))
    ProcessCollector(registry=registry)
    try:
        server, thread = start_http_server(port, host, registry)
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
