"""Reads the samples of GPUs and engines for a report, if there are any."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aprilsched.analysis.gpu_utilization import gpu_utilization
from aprilsched.analysis.report.report_data import GpuLine
from aprilsched.analysis.samples import read_samples
from aprilsched.telemetry.sampling.sample_log import STEP_SHARE

__all__ = ["gpu_lines"]

_POINTS = 240
_LINES = 16


def gpu_lines(folder: Path) -> tuple[list[GpuLine], str]:
    """Read the samples as percent over time, one line for each GPU (by NVML) or otherwise for each
    engine (by its own counters), with a sentence that says what they mean. A run that was not
    sampled has no lines.

    Raises:
        RunFolderError: if the samples cannot be read.
    """
    samples = read_samples(folder)
    if samples.devices:
        found = gpu_utilization(folder, bins=_POINTS)
        return _lines({name: (s.t, s.share) for name, s in found.series.items()}), found.label
    told = {n: (e.t, e.step_share) for n, e in samples.engines.items()}
    lines = _lines(told)
    return lines, STEP_SHARE if lines else ""


def _lines(
    series: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]],
) -> list[GpuLine]:
    found: list[GpuLine] = []
    for name, (times, share) in series.items():
        known = np.isfinite(share)
        if not known.any() or len(found) == _LINES:
            continue
        t, percent = _means(times[known], 100 * share[known])
        found.append(GpuLine(name=name, times=t, percent=percent))
    return found


def _means(
    times: NDArray[np.float64], values: NDArray[np.float64]
) -> tuple[list[float], list[float]]:
    """Average neighbouring samples, so that there are no more than a screen shows."""
    pieces = np.array_split(np.arange(times.size), min(_POINTS, times.size))
    return (
        [round(float(times[piece].mean()), 3) for piece in pieces],
        [round(float(values[piece].mean()), 2) for piece in pieces],
    )
