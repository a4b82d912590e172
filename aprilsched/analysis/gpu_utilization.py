"""Reads how busy a run's GPUs were, with the sentence that says what this figure means.

The figures are NVML's if there are any, and otherwise the busy share from the event log. These are
two different things, so every use of the figure must show its label.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from aprilsched.analysis.samples import DeviceSamples, read_samples
from aprilsched.analysis.usage import usage_of
from aprilsched.telemetry.engine_time import BUSY, PART_INDEX
from aprilsched.telemetry.sampling.sample_log import EVENT_LOG_UTILIZATION, NVML_UTILIZATION

__all__ = ["BusyShare", "GpuUtilization", "gpu_utilization"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BusyShare:
    """The utilization of one GPU or engine: `t` float64 [n] in seconds of the run, `share` float64
    [n] from 0 to 1 or NaN."""

    t: NDArray[np.float64]
    share: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GpuUtilization:
    """The utilization of a run.

    Attributes:
        source: where the figures come from.
        label: what the figures mean; it must be shown with them.
        series: the figures by GPU ("0: NVIDIA H100 80GB HBM3") or by engine.
    """

    source: Literal["nvml", "event log"]
    label: str
    series: Mapping[str, BusyShare]


def gpu_utilization(folder: Path, *, bins: int = 200) -> GpuUtilization:
    """Read the utilization of the run in `folder`; from the event log in `bins` equal pieces of its
    time.

    Raises:
        RunFolderError: if a file is missing or cannot be understood.
    """
    devices = read_samples(folder).devices
    told = {
        _named(index, device): BusyShare(t=device.t, share=device.utilization)
        for index, device in devices.items()
        if not np.isnan(device.utilization).all()
    }
    if told:
        return GpuUtilization(source="nvml", label=NVML_UTILIZATION, series=told)
    return GpuUtilization(
        source="event log", label=EVENT_LOG_UTILIZATION, series=_from_events(folder, bins)
    )


def _from_events(folder: Path, bins: int) -> dict[str, BusyShare]:
    usage = usage_of(folder)
    seconds = usage.series(bins)
    edges = np.linspace(0.0, usage.wall, bins + 1)
    whole = seconds.sum(axis=2)
    busy = seconds[:, :, [PART_INDEX[part] for part in BUSY]].sum(axis=2)
    # An engine that has not joined yet has no time.
    share = np.divide(busy, whole, out=np.full_like(busy, np.nan), where=whole > 0)
    middle = (edges[:-1] + edges[1:]) / 2
    return {
        name: BusyShare(t=middle, share=share[:, index]) for index, name in enumerate(usage.engines)
    }


def _named(index: int, device: DeviceSamples) -> str:
    return f"{index}: {device.name}" if device.name else str(index)
