"""Samples the GPUs and the engines of a run into samples.jsonl.

Invariant: the run never waits for the sampler. One task queries each engine, one thread queries
NVML, and another one writes the file. A source that fails is logged once, and left out.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from aprilsched.errors import ConfigError
from aprilsched.observe.sampling.engine_sampler import EngineLoads, HasEngines
from aprilsched.observe.sampling.nvml import GpuThread, Nvml
from aprilsched.observe.sampling.rates import TIME_DIGITS
from aprilsched.observe.sampling.sample_log import DeviceLine, EngineLine, GpuLine, SampleLog

log = logging.getLogger("aprilsched")


class Sampler:
    """Samples while its block runs.

    ::

        async with (
            RolloutScheduler(fleet, prompts, reward=score) as rollouts,
            Sampler(folder / "samples.jsonl", fleet),
        ):
            async for batch in rollouts:
                ...

    Enter it after the scheduler, so that the fleet is open. Engine figures come from the engines
    (``/v1/loads`` of SGLang, the exact state of the embedded engine), and GPU figures of this
    machine from NVML.
    :data:`~aprilsched.observe.sampling.labels.NVML_UTILIZATION` defines NVML's utilization.

    Args:
        path: the file; an existing file is appended to.
        fleet: the fleet whose engines are sampled; None samples no engine.
        interval: seconds between two samples: on the running loop's clock for engines, on the
            wall clock for GPUs.
        gpu: whether to sample by NVML. None does if NVML is available.
        clock: converts a time of the loop's clock to seconds since the start of the run
            (``EventLog.seconds``). Without it, times count from the start of the block.
        patient: wait for a slow disk instead of dropping samples, as on a virtual clock.

    Attributes:
        engines: the last sample of each engine, by name.
        devices: the last sample of each GPU, by NVML's index.

    Raises:
        ConfigError: if `interval` is not positive, or if `gpu` is True and NVML is unavailable.
    """

    def __init__(
        self,
        path: Path,
        fleet: HasEngines | None = None,
        *,
        interval: float = 1.0,
        gpu: bool | None = None,
        clock: Callable[[float], float] | None = None,
        patient: bool = False,
    ) -> None:
        if not (interval > 0 and math.isfinite(interval)):
            raise ConfigError(f"interval is {interval}; give a number of seconds above 0.")
        if gpu:
            Nvml().close()
        self.engines: dict[str, EngineLine] = {}
        self.devices: dict[int, GpuLine] = {}
        self._fleet = fleet
        self._interval = interval
        self._gpu = gpu
        self._clock = clock
        self._log = SampleLog(path, interval=interval, patient=patient)
        self._thread: GpuThread | None = None
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._began = 0.0

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._log.start(self._now())
        if self._gpu is not False:
            wanted = bool(self._gpu)
            self._thread = GpuThread(self._interval, self._now, self._take_gpus, wanted=wanted)
            self._thread.start()
        if self._fleet is not None:
            loads = EngineLoads(self._fleet, self._interval, self._now, self._take_engine)
            self._task = asyncio.create_task(loads.work(), name="samples of the engines")
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait([self._task])
                if not self._task.cancelled() and (error := self._task.exception()):
                    log.warning("the engines were not sampled to the end: %r", error)
        finally:
            if self._thread is not None:
                self._thread.stop()
            self._log.close()

    def _now(self) -> float:
        """Return the time on the run's clock, for any thread."""
        if self._loop is None:
            return 0.0
        now = self._loop.time()
        return round(now - self._began if self._clock is None else self._clock(now), TIME_DIGITS)

    def _take_engine(self, line: EngineLine) -> None:
        self.engines[line.engine] = line
        self._log.write([line])

    def _take_gpus(self, lines: Sequence[DeviceLine | GpuLine]) -> None:
        self.devices.update({line.device: line for line in lines if isinstance(line, GpuLine)})
        self._log.write(lines)
