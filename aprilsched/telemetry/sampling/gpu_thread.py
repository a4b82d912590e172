"""NVML in a thread of its own: its calls block, and a driver that hangs must hold nobody up.

Invariant: it ends when it is told to, with its process at the latest; what goes wrong is said once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from aprilsched.errors import ConfigError
from aprilsched.telemetry.sampling.nvml import Nvml
from aprilsched.telemetry.sampling.sample_lines import DeviceLine, GpuLine

__all__ = ["GpuThread"]

log = logging.getLogger("aprilsched")

_STOP_SECONDS = 1.0


class GpuThread:
    """Samples every `interval` seconds, from :meth:`start` to :meth:`stop`.

    Args:
        interval: seconds.
        clock: gives the time of a sample; called in the thread.
        take: takes the lines; called in the thread.
        wanted: NVML was asked for, so that its absence is worth a word.
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
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; waits for the call in progress, for a bounded time."""
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
            log.warning("the GPUs are not sampled any more, the run goes on: %s", error)
        finally:
            nvml.close()
