"""The lines of samples.jsonl, and what their fields mean: the file's first line says the latter.

``t`` is in seconds on the run's clock, as in events.jsonl. A field that nobody told is left out.
Lines of a former process that come after the time of a "resumed" line are void, as in
events.jsonl.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from aprilsched.telemetry.sampling.labels import NVML_UTILIZATION, STEP_SHARE

__all__ = [
    "FIELDS",
    "LABELS",
    "DescriptionLine",
    "DeviceLine",
    "EngineLine",
    "GpuLine",
    "ResumedLine",
    "SampleLine",
]

LABELS = {"utilization": NVML_UTILIZATION, "step_share": STEP_SHARE}

FIELDS: dict[str, dict[str, str]] = {
    "engine": {
        "engine": "its name",
        "running": "requests in the decoding batch",
        "queued": "requests that wait for a place in it",
        "max_running": "most requests that decode together",
        "kv_tokens": "tokens with a place in the KV pool",
        "kv_share": "of the KV pool, from 0 to 1",
        "tokens_per_s": "decoded since the sample before, or what an engine without counters says",
        "step_share": "of the time since the sample before in which it computed steps, 0 to 1",
        "cache_hit_rate": "of the prefix cache, from 0 to 1",
        "age_s": "how old the figures were when the engine told them; they stand still in a pause",
        "series": "gauges of the engine's own metrics endpoint",
        "error": "why it told nothing, once for each time that it began to",
    },
    "device": {
        "device": "NVML's index of the GPU",
        "name": "of the product",
        "uuid": "of the GPU",
        "memory_total": "bytes",
        "power_limit_w": "watts",
    },
    "nvml": {
        "device": "NVML's index of the GPU",
        "utilization": "share of NVML's sample period in which at least one kernel ran, 0 to 1",
        "memory_utilization": "share of it in which the GPU's memory was read or written, 0 to 1",
        "memory_used": "bytes",
        "power_w": "watts",
        "sm_clock_mhz": "of the multiprocessors",
        "temperature_c": "degrees Celsius",
        "processes": "bytes by process id, where NVML shows them",
    },
}
"""Of each source."""


class DescriptionLine(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="source", tag="description"
):
    """The first line."""

    t: float
    interval: float
    """Seconds between two samples."""
    labels: dict[str, str] = msgspec.field(default_factory=LABELS.copy)
    fields: dict[str, dict[str, str]] = msgspec.field(default_factory=FIELDS.copy)


class ResumedLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="source", tag="resumed"):
    """Another process goes on."""

    t: float


class EngineLine(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag_field="source",
    tag="engine",
):
    """One engine at one time; the fields are described in :data:`FIELDS`."""

    t: float
    engine: str
    running: int | None = None
    queued: int | None = None
    max_running: int | None = None
    kv_tokens: int | None = None
    kv_share: float | None = None
    tokens_per_s: float | None = None
    step_share: float | None = None
    cache_hit_rate: float | None = None
    age_s: float = 0.0
    series: dict[str, float] | None = None
    error: str | None = None


class DeviceLine(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag_field="source",
    tag="device",
):
    """A GPU that is sampled from here on."""

    t: float
    device: int
    name: str = ""
    uuid: str = ""
    memory_total: int | None = None
    power_limit_w: float | None = None


class GpuLine(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag_field="source",
    tag="nvml",
):
    """One GPU at one time; the fields are described in :data:`FIELDS`."""

    t: float
    device: int
    utilization: float | None = None
    memory_utilization: float | None = None
    memory_used: int | None = None
    power_w: float | None = None
    sm_clock_mhz: int | None = None
    temperature_c: int | None = None
    processes: dict[int, int] | None = None


SampleLine: TypeAlias = DescriptionLine | ResumedLine | EngineLine | DeviceLine | GpuLine
