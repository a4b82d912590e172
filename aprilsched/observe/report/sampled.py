"""The samples of GPUs and engines in a report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aprilsched.observe.log.samples import read_samples
from aprilsched.observe.sampling.labels import NVML_UTILIZATION, STEP_SHARE

# Reads the samples of GPUs and engines for a report, if there are any.

_LINES = 16
_POINTS = 240
_Shares = Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]]


def gpu_lines(folder: Path) -> tuple[_Shares, str]:
    """Return the samples as shares over time, with a sentence that explains them.

    There is one line per GPU (from NVML), or else one per engine (from its own counters), and none
    if the run was not sampled.

    Raises:
        RunFolderError: if the samples cannot be read.
    """
    samples = read_samples(folder)
    label = STEP_SHARE
    found = {name: (each.t, each.step_share) for name, each in samples.engines.items()}
    if samples.devices:
        label = NVML_UTILIZATION
        found = {
            f"{index}: {gpu.name}": (gpu.t, gpu.utilization)
            for index, gpu in samples.devices.items()
        }
    shown = {
        name: _thinned(t, share) for name, (t, share) in found.items() if np.isfinite(share).any()
    }
    return dict(list(shown.items())[:_LINES]), label if shown else ""


def _thinned(
    times: NDArray[np.float64], share: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the means of neighbouring samples, so that there are no more than a screen shows."""
    known = np.flatnonzero(np.isfinite(share))
    pieces = np.array_split(known, min(_POINTS, known.size))
    means = [np.array([each[piece].mean() for piece in pieces]) for each in (times, share)]
    return means[0], means[1]
