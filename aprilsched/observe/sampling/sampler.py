"""Samples the GPUs and the engines of a run into samples.jsonl.

Invariant: the run never waits for it. A task asks each engine, one thread asks NVML, and another
one writes the file. What fails is said once in the log of the program, and left out.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, Self

from aprilsched.errors import ConfigError
from aprilsched.kernel.engines.base import EngineLoad, ReportsLoad
from aprilsched.observe.sampling.nvml import GpuThread, Nvml
from aprilsched.observe.sampling.sample_log import DeviceLine, EngineLine, GpuLine, SampleLog

log = logging.getLogger("aprilsched")

_TIME_DIGITS = 6


class Sampler:
    """Samples as long as its block lasts.

    ::

        async with (
            RolloutScheduler(fleet, prompts, reward=score) as rollouts,
            Sampler(folder / "samples.jsonl", fleet),
        ):
            async for batch in rollouts:
                ...

    Enter it after the scheduler, so that the fleet is open. Engines tell their own figures
    (``/v1/loads`` of SGLang, the exact state of the embedded engine), and NVML those of this
    machine's GPUs.
    :data:`~aprilsched.observe.sampling.sample_log.NVML_UTILIZATION` says what NVML's utilization
    means.

    Args:
        path: the file; an existing file is appended to.
        fleet: the fleet whose engines are asked; None asks no engine.
        interval: seconds between two samples: on the running loop's clock for engines, on the
            wall's for GPUs.
        gpu: whether to ask NVML. None asks it if it is there.
        clock: converts a time of the loop's clock to seconds since the run began
            (``EventLog.seconds``). Without it, times count from the begin of the block.
        patient: wait for a slow disk instead of dropping samples, as on a virtual clock.

    Attributes:
        engines: the last sample of each engine, by name.
        devices: the last sample of each GPU, by NVML's index.

    Raises:
        ConfigError: if `interval` is not positive, or if NVML is asked for and is not there.
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
        """The time on the run's clock, for any thread."""
        if self._loop is None:
            return 0.0
        now = self._loop.time()
        return round(now - self._began if self._clock is None else self._clock(now), _TIME_DIGITS)

    def _take_engine(self, line: EngineLine) -> None:
        self.engines[line.engine] = line
        self._log.write([line])

    def _take_gpus(self, lines: Sequence[DeviceLine | GpuLine]) -> None:
        self.devices.update({line.device: line for line in lines if isinstance(line, GpuLine)})
        self._log.write(lines)


# --- engines --------------------------------------------------------------------------------------

# Asks the engines of a fleet for their load at regular times, without waiting for any of them.
#
# Invariants: an engine has one open question at a time, so one that hangs is not asked again before
# it answers or its time is over. An engine that does not tell its load is named once, and is asked
# again.


_ANSWER_SECONDS = 10.0
"""More than the time that an engine allows itself."""
SERIES_SECONDS = 5.0
"""Seconds between two looks at a metrics endpoint. Its page is made for a scrape every few seconds,
by the same process that streams the responses."""


class HasEngines(Protocol):
    """A fleet, whose engines may change."""

    @property
    def engines(self) -> Sequence[object]: ...


class EngineLoads:
    """Asks the engines that tell their load (:class:`~aprilsched.kernel.engines.base.ReportsLoad`).

    Args:
        fleet: the fleet of the engines; it should be open.
        interval: seconds between two questions, on the running loop's clock.
        clock: gives the time of a sample.
        take: is called with each line.
    """

    def __init__(
        self,
        fleet: HasEngines,
        interval: float,
        clock: Callable[[], float],
        take: Callable[[EngineLine], None],
    ) -> None:
        self._fleet = fleet
        self._interval = interval
        self._clock = clock
        self._take = take
        self._rates: dict[str, Rates] = {}
        self._asked: set[str] = set()
        self._failing: set[str] = set()
        self._named: set[str] = set()

    async def work(self) -> None:
        """Ask until this is cancelled."""
        loop = asyncio.get_running_loop()
        due = series_due = loop.time()
        async with asyncio.TaskGroup() as tasks:
            while True:
                metrics = loop.time() >= series_due
                if metrics:
                    series_due = loop.time() + SERIES_SECONDS
                for engine in self._fleet.engines:
                    name = getattr(engine, "name", "")
                    if isinstance(engine, ReportsLoad) and name not in self._asked:
                        self._asked.add(name)
                        tasks.create_task(self._ask(name, engine, metrics))
                due = max(due + self._interval, loop.time())
                await asyncio.sleep(due - loop.time())

    async def _ask(self, name: str, engine: ReportsLoad, metrics: bool) -> None:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                load = await engine.load(metrics=metrics)
            self._take(self._rates.setdefault(name, Rates()).line(name, self._clock(), load))
            self._failing.discard(name)
        except Exception as error:
            self._fail(name, str(error) or type(error).__name__)
        finally:
            self._asked.discard(name)

    def _fail(self, name: str, why: str) -> None:
        if name not in self._failing:
            self._failing.add(name)
            self._take(EngineLine(t=self._clock(), engine=name, error=why))
        if name not in self._named:
            self._named.add(name)
            log.warning("the load of %s is not sampled for now, the run goes on: %s", name, why)


# --- rates ---------------------------------------------------------------------------------------

# Computes what an engine did between two samples, from its counters.

_DIGITS = 4


class Rates:
    """Makes the lines of one engine from its samples, which come in order.

    A rate is taken over the time between the moments at which two figures were true. If they were
    true at the same moment, as in a pause, there is no rate. An engine without requests publishes
    no new figures either, but its last ones remain true. Counters that went back are those of a
    server that was restarted.
    """

    def __init__(self) -> None:
        self._before: tuple[float, EngineLoad] | None = None

    def line(self, engine: str, t: float, load: EngineLoad) -> EngineLine:
        """The line of `load`, which arrived at `t` on the run's clock."""
        at = t - load.age_s if load.running or load.queued else t
        tokens, share = self._since_before(at, load)
        self._before = at, load
        kv = None if load.kv_tokens is None or not load.kv_capacity else load.kv_tokens
        return EngineLine(
            t=round(t, _TIME_DIGITS),
            engine=engine,
            running=load.running,
            queued=load.queued,
            max_running=load.max_running,
            kv_tokens=load.kv_tokens,
            kv_share=_rounded(None if kv is None else kv / (load.kv_capacity or 1)),
            tokens_per_s=_rounded(load.tokens_per_s if load.generated is None else tokens),
            step_share=_rounded(share),
            cache_hit_rate=_rounded(load.cache_hit_rate),
            age_s=round(load.age_s, _DIGITS),
            series=dict(load.series) or None,
        )

    def _since_before(self, at: float, load: EngineLoad) -> tuple[float | None, float | None]:
        if self._before is None:
            return None, None
        then, before = self._before
        seconds = at - then
        if seconds <= 0:
            return None, None
        generated = _grown(before.generated, load.generated)
        decoded = _grown(before.decode_seconds, load.decode_seconds)
        prefilled = _grown(before.prefill_seconds, load.prefill_seconds)
        tokens = None if generated is None else generated / seconds
        if decoded is None or prefilled is None:
            return tokens, None
        return tokens, min(1.0, (decoded + prefilled) / seconds)


def _grown(before: float | None, now: float | None) -> float | None:
    if before is None or now is None or now < before:
        return None
    return now - before


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)
