"""Writes a run as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

from aprilsched.analysis.trace.write import write_trace

__all__ = ["write_trace"]
