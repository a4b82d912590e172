"""Tests NVML that is missing, refuses, loses a GPU or hangs, with a module that has its names.

docs/observe.md has what a real GPU showed.
"""

from __future__ import annotations

import logging
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from aprilsched.errors import ConfigError
from aprilsched.observe.sampling.nvml import GpuThread, Nvml
from aprilsched.observe.sampling.sample_log import DeviceLine, GpuLine
from aprilsched.observe.sampling.sampler import Sampler

SECONDS = 600.0
FIGURES = ("UtilizationRates", "MemoryInfo", "PowerUsage", "ClockInfo", "Temperature")


class NVMLError(Exception):
    """Like the error of nvidia-ml-py."""


class Faulty(types.ModuleType):
    """NVML with two GPUs. `broken` has the functions that raise, and for which GPU (None: all)."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0
    NVMLError = NVMLError

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.broken: dict[str, int | None] = {}
        self.sampled = threading.Event()
        self.hang: threading.Event | None = None
        self.open = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            device = arguments[0] if arguments else None
            if name in self.broken and self.broken[name] in (None, device):
                raise NVMLError(f"{name} is not supported")
            return self._answer(name, device)

        return call

    def _answer(self, name: str, device: Any) -> Any:
        match name:
            case "nvmlInit":
                self.open += 1
                return None
            case "nvmlShutdown":
                self.open -= 1
                return None
            case "nvmlDeviceGetCount":
                return 2
            case "nvmlDeviceGetHandleByIndex":
                return device
            case "nvmlDeviceGetName":
                return b"a GPU"
            case "nvmlDeviceGetUUID":
                return f"GPU-{device}"
            case "nvmlDeviceGetMemoryInfo":
                return types.SimpleNamespace(total=80, used=30)
            case "nvmlDeviceGetUtilizationRates":
                self.sampled.set()
                if self.hang is not None:
                    self.hang.wait(SECONDS)
                return types.SimpleNamespace(gpu=99, memory=12)
            case "nvmlDeviceGetComputeRunningProcesses":
                return [types.SimpleNamespace(pid=7, usedGpuMemory=None)]
            case _:
                return 1500


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Faulty:
    module = Faulty()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def sampled(
    nvml: Faulty, *, until: Callable[[list[DeviceLine | GpuLine]], bool], wanted: bool = False
) -> list[DeviceLine | GpuLine]:
    """The samples that a thread takes until the condition holds; the thread has ended then."""
    taken: list[DeviceLine | GpuLine] = []
    enough = threading.Event()

    def take(lines: Sequence[DeviceLine | GpuLine]) -> None:
        taken.extend(lines)
        if until(taken):
            enough.set()

    thread = GpuThread(0.001, lambda: 1.5, take, wanted=wanted)
    thread.start()
    assert enough.wait(SECONDS)
    thread.stop()
    assert not thread._thread.is_alive()
    return taken


def test_a_missing_package_is_refused_with_its_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[gpu\]'"):
        Nvml()


def test_a_machine_without_a_driver_is_refused_in_one_sentence(nvml: Faulty, tmp_path: Any):
    nvml.broken["nvmlInit"] = None
    with pytest.raises(ConfigError, match="run where NVIDIA's driver is"):
        Sampler(tmp_path / "samples.jsonl", gpu=True)


def test_figures_are_shares_bytes_and_watts(nvml: Faulty):
    taken = sampled(nvml, until=lambda lines: len(lines) >= 4)
    assert taken[0] == DeviceLine(
        t=1.5, device=0, name="a GPU", uuid="GPU-0", memory_total=80, power_limit_w=1.5
    )
    assert taken[3] == GpuLine(
        t=1.5,
        device=1,
        utilization=0.99,
        memory_utilization=0.12,
        memory_used=30,
        power_w=1.5,
        sm_clock_mhz=1500,
        temperature_c=1500,
    )
    assert nvml.open == 0


def test_what_a_gpu_does_not_report_is_left_out(nvml: Faulty):
    """A MIG slice has no utilization, and another GPU may not answer at all."""
    nvml.broken["nvmlDeviceGetUtilizationRates"] = 0
    reached = sampled(nvml, until=lambda lines: len(lines) >= 4)
    first = next(line for line in reached if isinstance(line, GpuLine) and line.device == 0)
    assert first.utilization is None
    assert first.power_w == 1.5
    nvml.broken = {"nvmlDeviceGetHandleByIndex": 0}
    assert {line.device for line in sampled(nvml, until=lambda lines: len(lines) >= 3)} == {1}


def test_lost_gpus_are_logged_once(nvml: Faulty, caplog: pytest.LogCaptureFixture):
    taken: list[DeviceLine | GpuLine] = []

    def take(lines: Sequence[DeviceLine | GpuLine]) -> None:
        taken.extend(lines)
        if len(taken) >= 4:
            for name in FIGURES:
                nvml.broken[f"nvmlDeviceGet{name}"] = None

    thread = GpuThread(0.001, lambda: 1.5, take)
    with caplog.at_level(logging.WARNING):
        thread.start()
        thread._thread.join(SECONDS)
    assert not thread._thread.is_alive()
    assert [record.getMessage() for record in caplog.records] == [
        "GPUs are no longer sampled, the run continues: GPUs no longer answer NVML"
    ]
    assert nvml.open == 0


@pytest.mark.parametrize("wanted", [False, True])
def test_a_driver_that_fails_later_is_said_to_whoever_asked(
    nvml: Faulty, caplog: pytest.LogCaptureFixture, wanted: bool
):
    nvml.broken["nvmlInit"] = None
    thread = GpuThread(1.0, lambda: 0.0, lambda _: None, wanted=wanted)
    with caplog.at_level(logging.WARNING):
        thread.start()
        thread._thread.join(SECONDS)
    assert len(caplog.records) == wanted


async def test_a_driver_that_hangs_blocks_no_caller(
    nvml: Faulty, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("aprilsched.observe.sampling.nvml._STOP_SECONDS", 0.01)
    nvml.hang = threading.Event()
    async with Sampler(tmp_path / "samples.jsonl", gpu=True, interval=0.01) as sampler:
        assert nvml.sampled.wait(SECONDS)
        thread = sampler._thread
    assert thread is not None
    assert thread._thread.is_alive()
    nvml.hang.set()
    thread._thread.join(SECONDS)
    assert not sampler.devices or sampler.devices[0].utilization == 0.99
