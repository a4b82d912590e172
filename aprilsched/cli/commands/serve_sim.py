"""``aprilsched serve-sim``: serves the embedded engine behind SGLang's HTTP API until a signal."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Literal

from aprilsched.cli import told_to_end
from aprilsched.cli.arguments import parsed
from aprilsched.cli.runs.keys import key_from
from aprilsched.cli.runs.settings import SimSettings, WorkloadSettings
from aprilsched.kernel.values.bounds import AT_LEAST_1, check_range
from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.testing import DrawnLengths, SimServer


@dataclass(frozen=True, kw_only=True)
class ServeSimCommand:
    """Serve the embedded engine behind SGLang's own HTTP API, for tests."""

    host: str = "127.0.0.1"
    """Address to listen at; any address but loopback lets other machines connect."""
    port: int = 30000
    """Port of the first engine; further engines (--sim.engines) use the next ports. 0 selects free
    ports."""
    admin_key_env: str | None = None
    """Name of the environment variable with a key that control calls must then carry."""
    time_scale: float = 1.0
    """Wall seconds for each modelled second: 0.1 is ten times faster than the modelled machine."""
    distribution: Literal["lognormal"] | None = None
    """Let responses end by themselves, at lengths drawn from this distribution. If not given, every
    response has max_new_tokens."""
    median: float = 700.0
    """Median of the lengths, in tokens."""
    sigma: float = 0.9
    """Standard deviation of the log length."""
    cap: int | None = None
    """Tokens of the longest response; 6,000 if not given, or the longest of --lengths."""
    lengths: str | None = None
    """A file of equally likely lengths, instead of --distribution."""
    seed: int = 0
    """Seed of the lengths."""
    vocab_size: int = 32_000
    """Number of token ids of the model; prompts with other ids are refused."""
    sim: SimSettings = field(default_factory=SimSettings)

    def drawn(self) -> DrawnLengths | None:
        """Return the lengths at which responses end, or None without a distribution.

        Raises:
            ConfigError: if a setting is wrong.
        """
        if self.distribution is None and self.lengths is None:
            return None
        workload = WorkloadSettings(
            median=self.median, sigma=self.sigma, cap=self.cap, lengths=self.lengths
        )
        return DrawnLengths(workload.checked(seed=self.seed, group_size=1))

    def servers(self) -> list[SimServer]:
        """Return the configured servers, not started yet.

        Raises:
            ConfigError: if a setting is wrong.
        """
        sim = replace(self.sim, rank_rule="round_robin")
        check_range(AT_LEAST_1, **{"sim.engines": sim.engines})
        config = SimConfig(**sim.of_engine, stream_at_pause=False, vocab_size=self.vocab_size)
        lengths = self.drawn()
        return [
            SimServer(
                config,
                host=self.host,
                port=self.port + index if self.port else 0,
                admin_key=key_from(self.admin_key_env, "admin_key_env"),
                time_scale=self.time_scale,
                refit_seconds=sim.refit_seconds,
                lengths=lengths,
            )
            for index in range(sim.engines)
        ]


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code, which is 0 after SIGTERM and 130 after Ctrl-C.

    Raises:
        AprilschedError: if it cannot listen at the address, or if a setting is wrong.
    """
    command = parsed(ServeSimCommand, arguments, "aprilsched serve-sim")
    return asyncio.run(_serve(command.servers()))


async def _serve(servers: Sequence[SimServer]) -> int:
    ended = told_to_end()
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server)
            print(f"the embedded engine listens at {server.url}", flush=True)
        return await ended
