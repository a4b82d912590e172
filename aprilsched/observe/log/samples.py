"""Reads the samples of a run's engines and GPUs from its samples.jsonl, as arrays over time.

A figure that was not sampled is NaN. Samples of the prior run after the time of resumption are
void, as in events.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from aprilsched.errors import RunFolderError
from aprilsched.kernel.values.files import open_regular
from aprilsched.observe.log.line_format import Versioned, refuse_newer
from aprilsched.observe.log.run_folder import SAMPLES
from aprilsched.observe.sampling.sample_log import (
    SAMPLES_VERSION,
    DeviceLine,
    EngineLine,
    GpuLine,
    ResumedLine,
    SampleLine,
)

Float64Array = NDArray[np.float64]
_Line = TypeVar("_Line", EngineLine, GpuLine)
_RESUMED = b'"source":"resumed"'
"""Mark of the first line of each later process, which may run a newer release."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EngineSamples:
    """The samples of one engine; each array is float64 [samples]. The meaning of the figures is in
    :data:`~aprilsched.observe.sampling.sample_log.FIELDS`, under "engine"."""

    t: Float64Array
    running: Float64Array
    queued: Float64Array
    max_running: Float64Array
    kv_tokens: Float64Array
    kv_share: Float64Array
    tokens_per_s: Float64Array
    step_share: Float64Array
    cache_hit_rate: Float64Array
    age_s: Float64Array


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeviceSamples:
    """The samples of one GPU; each array is float64 [samples]. The figures are NVML's, under "nvml"
    in :data:`~aprilsched.observe.sampling.sample_log.FIELDS`. Wherever `utilization` is shown,
    it needs the label :data:`~aprilsched.observe.sampling.labels.NVML_UTILIZATION`."""

    name: str
    uuid: str
    memory_total: int | None
    power_limit_w: float | None
    t: Float64Array
    utilization: Float64Array
    memory_utilization: Float64Array
    memory_used: Float64Array
    power_w: Float64Array
    sm_clock_mhz: Float64Array
    temperature_c: Float64Array


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Samples:
    """The samples of a run: engines by name, GPUs by NVML's index."""

    engines: Mapping[str, EngineSamples]
    devices: Mapping[int, DeviceSamples]


def read_samples(folder: Path) -> Samples:
    """Read the samples of the run in `folder`; they are empty if it was not sampled.

    Raises:
        RunFolderError: if the file cannot be read, or if it is of a newer format.
    """
    engines: dict[str, list[EngineLine]] = {}
    gpus: dict[int, list[GpuLine]] = {}
    named: dict[int, DeviceLine] = {}
    for line in _valid(_lines(folder / SAMPLES)):
        match line:
            case EngineLine():
                engines.setdefault(line.engine, []).append(line)
            case GpuLine():
                gpus.setdefault(line.device, []).append(line)
            case DeviceLine():
                named[line.device] = line
            case _:
                pass
    return Samples(
        engines={name: EngineSamples(**_arrays(EngineSamples, of)) for name, of in engines.items()},
        devices={
            index: _device(named.get(index) or DeviceLine(t=0.0, device=index), of)
            for index, of in gpus.items()
        },
    )


def _device(line: DeviceLine, samples: Sequence[GpuLine]) -> DeviceSamples:
    return DeviceSamples(
        name=line.name,
        uuid=line.uuid,
        memory_total=line.memory_total,
        power_limit_w=line.power_limit_w,
        **_arrays(DeviceSamples, samples),
    )


def _arrays(kind: type[Any], lines: Sequence[_Line]) -> dict[str, Float64Array]:
    """Return the fields of `kind` that lines also have, as arrays over `lines`."""
    names = [field.name for field in fields(kind) if hasattr(lines[0], field.name)]
    # A missing figure (None) becomes NaN.
    return {n: np.array([getattr(line, n) for line in lines], dtype=np.float64) for n in names}


def _valid(lines: Iterator[SampleLine]) -> list[SampleLine]:
    kept: list[SampleLine] = []
    for line in lines:
        if isinstance(line, ResumedLine):
            kept = [before for before in kept if before.t <= line.t]
        kept.append(line)
    # The thread of the GPUs and the loop of the engines write at the same time, so lines are
    # sorted.
    return sorted(kept, key=lambda line: line.t)


def _lines(path: Path) -> Iterator[SampleLine]:
    decoder = msgspec.json.Decoder(SampleLine)
    try:
        with open_regular(path) as file:
            for number, raw in enumerate(file, start=1):
                if not raw.endswith(b"\n"):
                    return  # the last line of a process that was killed
                try:
                    if number == 1 or _RESUMED in raw:
                        version = msgspec.json.decode(raw, type=Versioned).version
                        refuse_newer(path, version, SAMPLES_VERSION)
                    yield decoder.decode(raw)
                except msgspec.ValidationError:
                    continue  # a line of a later version
                except msgspec.DecodeError as error:
                    raise RunFolderError(
                        f"{path} is damaged in line {number}; take that line out of it."
                    ) from error
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror or error}.") from error
