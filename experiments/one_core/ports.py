"""The stand-in of client_cost behind many ports of one process, as many engines.

It also takes updates: each port has the label of its weights. The arguments are the tokens of an
answer, the tokens of an event, and the number of ports, which are printed on one line.
"""

from __future__ import annotations

import asyncio
import resource
import sys
from pathlib import Path

from aiohttp import web

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "client_cost"))

import server as client_cost  # noqa: E402


class Server(client_cost.Server):
    """The endpoints; an engine is the port that was called."""

    def __init__(self, tokens: int, event_tokens: int) -> None:
        super().__init__(tokens, event_tokens)
        self._labels: dict[int, str] = {}

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_post("/update_weights_from_disk", self.update)
        return app

    async def update(self, request: web.Request) -> web.Response:
        """Take new weights."""
        self._labels[_port(request)] = (await request.json())["weight_version"]
        return web.json_response({"success": True, "message": ""})

    async def model_info(self, request: web.Request) -> web.Response:
        label = self._labels.get(_port(request), "0")
        return web.json_response({"model_path": "canned", "weight_version": label})


def _port(request: web.Request) -> int:
    assert request.transport is not None
    return request.transport.get_extra_info("sockname")[1]


async def main(tokens: int, event_tokens: int, ports: int) -> None:
    """Serve until the standard input ends."""
    runner = web.AppRunner(Server(tokens, event_tokens).app(), access_log=None)
    await runner.setup()
    for _ in range(ports):
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=8192).start()
    print(*(port for _, port in runner.addresses), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(main(*map(int, sys.argv[1:])))
