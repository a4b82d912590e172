"""``aprilsched gateway``: one address in front of a fleet, which speaks SGLang's HTTP API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from rich.console import Console

from aprilsched.agents.gateway import Gateway, GatewaySettings
from aprilsched.cli import told_to_end
from aprilsched.cli.arguments import made, values_of
from aprilsched.cli.runs.config_file import read_table, value_as
from aprilsched.cli.runs.keys import key_from
from aprilsched.cli.runs.settings_tables import refuse_unknown
from aprilsched.errors import ConfigError
from aprilsched.kernel.engines.addresses import fleet_at
from aprilsched.kernel.shell.listener import AnyListener
from aprilsched.observe.figures.live_figures import LiveFigures
from aprilsched.observe.live import LiveView, RunFacts

_STREAM_INTERVAL = 8
_WAIT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class GatewayCommand:
    """Serve one address in front of servers; requests survive pauses, new weights and servers that
    fail."""

    engine: tuple[str, ...]
    """URLs of the servers, such as http://127.0.0.1:30001; vllm+http://… for vLLM."""
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    """How the gateway listens, and its limits."""
    api_key_env: str | None = None
    """Name of the environment variable with the key that clients of the gateway need."""
    admin_key_env: str | None = None
    """Name of the environment variable with the key that control calls of the gateway need."""
    engine_api_key_env: str | None = None
    """Name of the environment variable that holds the servers' API key."""
    engine_admin_key_env: str | None = None
    """Name of the environment variable that holds the servers' admin API key."""
    stream_interval: int = _STREAM_INTERVAL
    """Tokens between two events of a stream from a server. A longer interval costs less, and a
    server that is lost loses the tokens of one interval."""
    wait_s: float = _WAIT_S
    """Seconds to wait at the start for servers that do not answer, for example because they load a
    model. The gateway then starts with the servers that answer, and the others join later; if no
    server answers, the gateway exits."""

    config: Path | None = None
    """A TOML file with the names of these settings as keys (max_requests = 100); flags override
    it."""
    live: bool = False
    """Draw the live view of the engines on this terminal while the gateway serves."""

    def view(self) -> LiveView | None:
        """Return the live view that the settings enable, or None.

        Raises:
            ConfigError: if the output is not a terminal.
        """
        console = Console(stderr=True)
        if not self.live:
            return None
        if not console.is_interactive:
            raise ConfigError("live needs a terminal to draw on; leave it out, and see /metrics.")
        where = f"{self.gateway.host}:{self.gateway.port}"
        facts = RunFacts(title="gateway", where=where, batches=0, batch_units=1)
        return LiveView(console, facts, LiveFigures())

    def made(self, listeners: Sequence[AnyListener] = ()) -> Gateway:
        """Return the configured gateway, not started yet; `listeners` receive the facts of its run.

        Raises:
            ConfigError: if a setting is wrong.
        """
        if not self.engine:
            raise ConfigError("No server is named; give the URL of one as --engine.")
        fleet = fleet_at(
            self.engine,
            admin_key=key_from(self.engine_admin_key_env, "engine_admin_key_env"),
            api_key=key_from(self.engine_api_key_env, "engine_api_key_env"),
            stream_interval=self.stream_interval,
            wait_s=self.wait_s,
        )
        return Gateway(
            fleet,
            settings=self.gateway,
            api_key=key_from(self.api_key_env, "api_key_env"),
            admin_key=key_from(self.admin_key_env, "admin_key_env"),
            listeners=listeners,
        )


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code, which is 0 after SIGTERM and 130 after Ctrl-C.

    Raises:
        AprilschedError: if a setting is wrong, if a server or the address cannot be used, or if the
            fleet is lost.
    """
    return asyncio.run(_serve(command_of(arguments)))


def command_of(arguments: Sequence[str]) -> GatewayCommand:
    """Return the command: flags override the config file, which overrides the defaults.

    Raises:
        ConfigError: if the arguments or the config file cannot be used.
    """
    values = values_of(GatewayCommand, arguments, "aprilsched gateway")
    path = values.get("config")
    return made(GatewayCommand if path is None else read_table(path, _configured), values)


def _configured(table: Mapping[str, Any]) -> GatewayCommand:
    """Return the command that a config file describes.

    Raises:
        ConfigError: if it contains an unknown name or a wrong value.
    """
    known = {**get_type_hints(GatewayCommand), **get_type_hints(GatewaySettings)}
    own = [name for name in get_type_hints(GatewayCommand) if name not in ("gateway", "config")]
    settings = [each.name for each in fields(GatewaySettings)]
    refuse_unknown(table, [*own, *settings], "")
    values: dict[str, Any] = {"engine": ()}
    values |= {name: value_as(known[name], name, value) for name, value in table.items()}
    gateway = GatewaySettings(**{name: values.pop(name) for name in settings if name in values})
    return GatewayCommand(**values, gateway=gateway)


def log_lines(level: int) -> None:
    """Write the log to stderr from `level` on, with time and level, as lines for a collector."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("aprilsched")
    logger.addHandler(handler)
    logger.setLevel(level)


async def _serve(command: GatewayCommand) -> int:
    ended = told_to_end()
    view = command.view()
    # A line for each request would tear the live view.
    log_lines(logging.INFO if view is None else logging.WARNING)
    gateway = command.made(() if view is None else view.listeners)
    starting = asyncio.create_task(gateway.start())
    await asyncio.wait([ended, starting], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():  # It may wait for its servers for minutes.
        starting.cancel()
        await asyncio.wait([starting])
        return ended.result()
    await starting
    try:
        print(f"the gateway listens at {gateway.url}", flush=True)
        failed = asyncio.create_task(gateway.wait_failed())
        with view or nullcontext():
            await asyncio.wait([ended, failed], return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            raise failed.result()
        failed.cancel()
        return ended.result()
    finally:
        await gateway.stop()
