"""Samples the GPUs of this machine by NVML, the library of their driver (nvidia-ml-py).

A call may block, and a hung driver must not block the run. Therefore :class:`GpuThread` makes all
calls in a daemon thread. A figure that a GPU does not provide is None; for example, a MIG slice has
no utilization.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from importlib import import_module  # noqa: TID251 (pynvml)
from typing import Any, TypeVar

from aprilsched.errors import ConfigError
from aprilsched.kernel.values.extras import extra
from aprilsched.observe.sampling.sample_log import DeviceLine, GpuLine

log = logging.getLogger("aprilsched")

_T = TypeVar("_T")

_PERCENT = 100
_MILLI = 1000
_PROCESSES = 16
_STOP_SECONDS = 1.0


class Nvml:
    """Holds the library open until :meth:`close`.

    Raises:
        ConfigError: if the package or the driver is missing.
    """

    def __init__(self) -> None:
        with extra("gpu"):
            self._api: Any = import_module("pynvml")
        try:
            self._api.nvmlInit()
        except self._api.NVMLError as error:
            raise ConfigError(
                f"NVML does not answer ({error}); run where NVIDIA's driver is, or sample without "
                "it."
            ) from error
        # In a container, one GPU may be inaccessible while the others are accessible.
        found = {
            index: self._told(self._api.nvmlDeviceGetHandleByIndex, index)
            for index in range(self._api.nvmlDeviceGetCount())
        }
        self._handles = {index: handle for index, handle in found.items() if handle is not None}

    def close(self) -> None:
        """Close the library. Others in this process may still have it open."""
        self._told(self._api.nvmlShutdown)

    def devices(self, t: float) -> list[DeviceLine]:
        """Return a line for each GPU, with its description."""
        api = self._api
        return [
            DeviceLine(
                t=t,
                device=index,
                name=_text(self._told(api.nvmlDeviceGetName, handle)),
                uuid=_text(self._told(api.nvmlDeviceGetUUID, handle)),
                memory_total=_of(self._told(api.nvmlDeviceGetMemoryInfo, handle), "total"),
                power_limit_w=_over(
                    self._told(api.nvmlDeviceGetEnforcedPowerLimit, handle), _MILLI
                ),
            )
            for index, handle in self._handles.items()
        ]

    def sample(self, t: float) -> list[GpuLine]:
        """Return a line for each GPU, with its current figures.

        Raises:
            OSError: if no GPU reports anything.
        """
        lines = [self._line(t, index, handle) for index, handle in self._handles.items()]
        if lines and all(line == GpuLine(t=t, device=line.device) for line in lines):
            raise OSError("GPUs no longer answer NVML")
        return lines

    def _line(self, t: float, index: int, handle: object) -> GpuLine:
        api = self._api
        rates = self._told(api.nvmlDeviceGetUtilizationRates, handle)
        return GpuLine(
            t=t,
            device=index,
            utilization=_over(_of(rates, "gpu"), _PERCENT),
            memory_utilization=_over(_of(rates, "memory"), _PERCENT),
            memory_used=_of(self._told(api.nvmlDeviceGetMemoryInfo, handle), "used"),
            power_w=_over(self._told(api.nvmlDeviceGetPowerUsage, handle), _MILLI),
            sm_clock_mhz=self._told(api.nvmlDeviceGetClockInfo, handle, api.NVML_CLOCK_SM),
            temperature_c=self._told(
                api.nvmlDeviceGetTemperature, handle, api.NVML_TEMPERATURE_GPU
            ),
            processes=self._processes(handle),
        )

    def _processes(self, handle: object) -> dict[int, int] | None:
        found = self._told(self._api.nvmlDeviceGetComputeRunningProcesses, handle) or ()
        sizes = {p.pid: p.usedGpuMemory for p in found if p.usedGpuMemory is not None}
        largest = sorted(sizes.items(), key=lambda size: -size[1])[:_PROCESSES]
        return dict(largest) or None

    def _told(self, call: Callable[..., _T], *arguments: object) -> _T | None:
        """Return the result of the call, or None if this GPU does not support it."""
        try:
            return call(*arguments)
        except self._api.NVMLError:
            return None


def _of(struct: Any, name: str) -> int | None:
    return None if struct is None else int(getattr(struct, name))


def _over(value: float | None, parts: int) -> float | None:
    return None if value is None else value / parts


def _text(value: Any) -> str:
    """Return the text; older versions of the package return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


class GpuThread:
    """Samples the GPUs every `interval` seconds, from :meth:`start` to :meth:`stop`, in a separate
    thread. It is not a :class:`~aprilsched.observe.worker.Worker`, because it receives no calls: it
    follows the wall clock, and continues while the event loop is blocked.

    A failure is logged once, and the run continues.

    Args:
        interval: seconds between two samples.
        clock: returns the time of a sample; called in the thread.
        take: receives the lines; called in the thread.
        wanted: whether the user requested NVML, so that its absence is a warning.
    """

    def __init__(
        self,
        interval: float,
        clock: Callable[[], float],
        take: Callable[[Sequence[DeviceLine | GpuLine]], None],
        *,
        wanted: bool = False,
    ) -> None:
        self._interval = interval
        self._clock = clock
        self._take = take
        self._wanted = wanted
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="NVML", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; wait at most a second for a call in progress."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)

    def _work(self) -> None:
        try:
            nvml = Nvml()
        except ConfigError as error:
            log.log(logging.WARNING if self._wanted else logging.DEBUG, "%s", error)
            return
        try:
            self._take(nvml.devices(self._clock()))
            while not self._stopped.is_set():
                self._take(nvml.sample(self._clock()))
                self._stopped.wait(self._interval)
        except Exception as error:
            log.warning("GPUs are no longer sampled, the run continues: %s", error)
        finally:
            nvml.close()
