"""A fleet of simulated engines."""

from __future__ import annotations

from collections.abc import Sequence

from aprilsched.kernel.values.bounds import Bound, check_range
from aprilsched.planning.step_times.model import H200_QWEN3_4B, StepTimeModel
from aprilsched.simulation.engine.settings import Admission, RankRule, SimConfig
from aprilsched.simulation.engine.sim_engine import MOST_ENGINES, PAUSE_SECONDS, SimEngine


class SimFleet:
    """Engines "sim-0", "sim-1", … that need no GPU and no server.

    Args:
        engines: number of engines.
        time_scale: loop seconds for each modelled second (1.0 under a virtual clock).
        refit_seconds, pause_seconds: as in
            :class:`~aprilsched.simulation.engine.sim_engine.SimEngine`.

    The other arguments are those of :class:`~aprilsched.simulation.engine.settings.SimConfig`.

    Raises:
        ConfigError: if a number is out of its range.
    """

    def __init__(
        self,
        engines: int = 1,
        *,
        timing: StepTimeModel = H200_QWEN3_4B,
        dp_ranks: int = 1,
        rank_rule: RankRule = "prefix",
        max_running: int = 512,
        kv_tokens: int = 1_000_000,
        admission: Admission = "sglang",
        reserve_clip: int = 4096,
        conservativeness: float = 1.0,
        stream_interval: int = 64,
        time_scale: float = 1.0,
        vocab_size: int = 32_000,
        eos_token_id: int | None = None,
        refit_seconds: float = 0.0,
        pause_seconds: float = PAUSE_SECONDS,
        stream_at_pause: bool = True,
        prefix_cache: bool = False,
    ) -> None:
        check_range(
            Bound(least=1, most=MOST_ENGINES, words=f"1 to {MOST_ENGINES:,}"), engines=engines
        )
        config = SimConfig(
            timing=timing,
            dp_ranks=dp_ranks,
            rank_rule=rank_rule,
            max_running=max_running,
            kv_tokens=kv_tokens,
            admission=admission,
            reserve_clip=reserve_clip,
            conservativeness=conservativeness,
            stream_interval=stream_interval,
            vocab_size=vocab_size,
            eos_token_id=eos_token_id,
            stream_at_pause=stream_at_pause,
            prefix_cache=prefix_cache,
        )
        self.config = config
        self._engines = tuple(
            SimEngine(
                f"sim-{index}",
                config,
                time_scale=time_scale,
                refit_seconds=refit_seconds,
                pause_seconds=pause_seconds,
            )
            for index in range(engines)
        )

    @property
    def engines(self) -> Sequence[SimEngine]:
        return self._engines

    async def open(self) -> None:
        """Open every engine; this cannot fail."""
        for engine in self._engines:
            await engine.open()

    async def close(self) -> None:
        """Close every engine.

        See :meth:`~aprilsched.simulation.engine.sim_engine.SimEngine.close`.
        """
        for engine in self._engines:
            await engine.close()
