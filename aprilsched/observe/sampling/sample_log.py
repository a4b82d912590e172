"""Writes samples.jsonl in a worker thread, like the event log.

Invariant: no write error stops the run; it is logged once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from aprilsched.kernel.values.files import cut_off, open_regular
from aprilsched.observe.file_writer import FileWriter
from aprilsched.observe.sampling.labels import NVML_UTILIZATION, STEP_SHARE

_PENDING_BYTES = 1 << 22
_CLOSE_SECONDS = 5.0
_TAIL_BYTES = 1 << 16


class SampleLog:
    """Appends lines to a file, from any thread. A new file starts with their description.

    Args:
        path: the file.
        interval: seconds between two samples, for the description.
        patient: wait for a slow disk instead of dropping lines, as a run on a virtual clock should.
    """

    def __init__(self, path: Path, *, interval: float, patient: bool = False) -> None:
        self._path = path
        self._interval = interval
        self._encoder = msgspec.json.Encoder()
        self._closed = False
        self._writer = FileWriter(
            path, "ab", max_bytes=_PENDING_BYTES, close_seconds=_CLOSE_SECONDS, patient=patient
        )

    def start(self, t: float) -> None:
        """Write the first line of this process, at `t` on the run's clock."""
        there = False
        try:
            there = self._cut_to_whole_lines() > 0
        except OSError as error:
            self._writer.fail(error)
        self.write([ResumedLine(t=t) if there else DescriptionLine(t=t, interval=self._interval)])

    def write(self, lines: Sequence[SampleLine]) -> None:
        """Write `lines`. If the disk is too slow for them, they are dropped."""
        block = b"".join(self._encoder.encode(line) + b"\n" for line in lines)
        if block and not self._closed:
            self._writer.put(block)

    def close(self) -> None:
        """Write the remaining lines, in bounded time. Later lines are ignored."""
        self._closed = True
        self._writer.close()

    def _cut_to_whole_lines(self) -> int:
        """Cut off an incomplete line of a killed process; return the remaining bytes."""
        if not self._path.exists():
            return 0
        size = self._path.stat().st_size
        with open_regular(self._path) as file:
            file.seek(max(0, size - _TAIL_BYTES))
            tail = file.read()
        whole = tail.rfind(b"\n") + 1
        if not whole and len(tail) < size:
            raise OSError("it is damaged at its end")
        size += whole - len(tail)
        cut_off(self._path, size)
        return size


# The lines of samples.jsonl, and the meaning of their fields, which the first line contains.
#
# ``t`` is in seconds on the run's clock, as in events.jsonl. Unknown figures are omitted. If a
# process resumes the run, lines of the prior process with a later time than the "resumed" line are
# void, as in events.jsonl.

SAMPLES_VERSION = 1

LABELS = {"utilization": NVML_UTILIZATION, "step_share": STEP_SHARE}

FIELDS: dict[str, dict[str, str]] = {
    "engine": {
        "engine": "name of the engine",
        "running": "requests in the decoding batch",
        "queued": "requests that wait for a place in it",
        "max_running": "largest number of requests that decode together",
        "kv_tokens": "tokens with a place in the KV pool",
        "kv_share": "share of the KV pool that is used, from 0 to 1",
        "tokens_per_s": "tokens decoded a second since the sample before, or the engine's own rate "
        "if it has no counters",
        "step_share": "share of the time since the sample before with steps computed, from 0 to 1",
        "cache_hit_rate": "hit rate of the prefix cache, from 0 to 1",
        "age_s": "seconds since the engine took the figures; in a pause they do not change",
        "series": "gauges of the engine's own metrics endpoint",
        "error": "why the engine reported nothing, once for each series of failures",
    },
    "device": {
        "device": "NVML's index of the GPU",
        "name": "name of the product",
        "uuid": "unique id of the GPU",
        "memory_total": "memory of the GPU, in bytes",
        "power_limit_w": "limit of its power, in watts",
    },
    "nvml": {
        "device": "NVML's index of the GPU",
        "utilization": "share of NVML's sample period in which at least one kernel ran, 0 to 1",
        "memory_utilization": "share of it in which the GPU's memory was read or written, 0 to 1",
        "memory_used": "memory in use, in bytes",
        "power_w": "power, in watts",
        "sm_clock_mhz": "clock of the multiprocessors, in MHz",
        "temperature_c": "temperature, in degrees Celsius",
        "processes": "memory of each process in bytes, by process id, if NVML reports it",
    },
}
"""The meaning of each field, by the source of the line."""


class _Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="source"):
    t: float


class DescriptionLine(_Line, frozen=True, kw_only=True, omit_defaults=False, tag="description"):
    """The first line of the file. `interval` is the number of seconds between two samples, and
    `version` is the version of the format."""

    interval: float
    version: int = SAMPLES_VERSION
    labels: dict[str, str] = msgspec.field(default_factory=LABELS.copy)
    fields: dict[str, dict[str, str]] = msgspec.field(default_factory=FIELDS.copy)


class ResumedLine(_Line, frozen=True, kw_only=True, omit_defaults=False, tag="resumed"):
    """The first line of a process that resumes the run."""

    version: int = SAMPLES_VERSION


class EngineLine(_Line, frozen=True, kw_only=True, tag="engine"):
    """An engine at one time; :data:`FIELDS` describes the fields."""

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


class DeviceLine(_Line, frozen=True, kw_only=True, tag="device"):
    """A GPU that is sampled from now on."""

    device: int
    name: str = ""
    uuid: str = ""
    memory_total: int | None = None
    power_limit_w: float | None = None


class GpuLine(_Line, frozen=True, kw_only=True, tag="nvml"):
    """A GPU at one time; :data:`FIELDS` describes the fields."""

    device: int
    utilization: float | None = None
    memory_utilization: float | None = None
    memory_used: int | None = None
    power_w: float | None = None
    sm_clock_mhz: int | None = None
    temperature_c: int | None = None
    processes: dict[int, int] | None = None


SampleLine: TypeAlias = DescriptionLine | ResumedLine | EngineLine | DeviceLine | GpuLine
