"""A fleet of simulated engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack

from aprilsched.kernel.values.bounds import Bound, check_range
from aprilsched.planning.step_times.model import StepTimeModel
from aprilsched.simulation.engine.settings import Admission, RankRule, SimConfig
from aprilsched.simulation.engine.sim_engine import MOST_ENGINES, PAUSE_SECONDS, SimEngine


class EngineSettings(TypedDict, total=False):
    """The settings of each engine of a fleet; see
    :class:`~aprilsched.simulation.engine.settings.SimConfig`."""

    timing: StepTimeModel
    dp_ranks: int
    rank_rule: RankRule
    max_running: int
    kv_tokens: int
    admission: Admission
    reserve_clip: int
    conservativeness: float
    stream_interval: int
    vocab_size: int
    eos_token_id: int | None
    stream_at_pause: bool
    prefix_cache: bool


class SimFleet:
    """Engines "sim-0", "sim-1", … that need no GPU and no server.

    Args:
        engines: number of engines.
        time_scale: loop seconds for each modelled second (1.0 under a virtual clock).
        refit_seconds, pause_seconds: as in
            :class:`~aprilsched.simulation.engine.sim_engine.SimEngine`.
        settings: those of each engine, with the defaults of
            :class:`~aprilsched.simulation.engine.settings.SimConfig`.

    Raises:
        ConfigError: if a number is out of its range.
    """

    def __init__(
        self,
        engines: int = 1,
        *,
        time_scale: float = 1.0,
        refit_seconds: float = 0.0,
        pause_seconds: float = PAUSE_SECONDS,
        **settings: Unpack[EngineSettings],
    ) -> None:
        check_range(
            Bound(least=1, most=MOST_ENGINES, words=f"1 to {MOST_ENGINES:,}"), engines=engines
        )
        self.config = SimConfig(**settings)
        self.engines: Sequence[SimEngine] = tuple(
            SimEngine(
                f"sim-{index}",
                self.config,
                time_scale=time_scale,
                refit_seconds=refit_seconds,
                pause_seconds=pause_seconds,
            )
            for index in range(engines)
        )

    async def open(self) -> None:
        """Open every engine; this cannot fail."""
        for engine in self.engines:
            await engine.open()

    async def close(self) -> None:
        """Close every engine.

        See :meth:`~aprilsched.simulation.engine.sim_engine.SimEngine.close`.
        """
        for engine in self.engines:
            await engine.close()
