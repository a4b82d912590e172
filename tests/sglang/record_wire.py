"""Records what a real server sends, byte for byte, for tests that have no server.

    python -m tests.sglang.record_wire

writes ``tests/support/wire`` again: the streams of a few short responses, in both forms and with
every kind of end.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from tests.sglang.server import CpuServer, write_model

FOLDER = Path(__file__).parents[1] / "support" / "wire"
TOKENS = 40
ENDLESS = 4000


class Cumulative(CpuServer):
    """A server that sends all tokens again with each event."""

    def _arguments(self) -> list[str]:
        return [a for a in super()._arguments() if a != "--incremental-streaming-output"]


class Recorder:
    """Sends requests to one server, and writes the answers to files."""

    def __init__(self, session: aiohttp.ClientSession, form: str) -> None:
        self._session = session
        self._form = form

    async def post(self, path: str, **body: Any) -> None:
        async with self._session.post(path, json=body) as answer:
            await answer.read()

    async def stream(
        self,
        name: str,
        tokens: int,
        midway: Callable[[str], Awaitable[None]] | None = None,
        **params: Any,
    ) -> None:
        """Record one response; `midway` is called when a part of it has arrived."""
        rid = f"recorded-{name}"
        sampling = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True, **params}
        body = {
            "rid": rid,
            "input_ids": list(range(3, 11)),
            "sampling_params": {**sampling, "stream_interval": 8},
            "stream": True,
            "return_logprob": True,
        }
        content = bytearray()
        async with self._session.post("/generate", json=body) as answer:
            async for data in answer.content.iter_any():
                content += data
                if midway is not None and content.count(b"\n\n") >= 3:
                    await midway(rid)
                    midway = None
        (FOLDER / f"{self._form}-{name}.sse").write_bytes(content)

    async def everything(self, other: Path) -> None:
        async def abort(rid: str) -> None:
            await self.post("/abort_request", rid=rid)

        async def abort_in_a_pause(rid: str) -> None:
            await self.post("/pause_generation", mode="retract")
            await abort(rid)
            await self.post("/continue_generation")

        async def refit(_: str) -> None:
            await self.post("/pause_generation", mode="retract")
            await self.post("/flush_cache")
            await self.post(
                "/update_weights_from_disk",
                model_path=str(other),
                weight_version="7",
                flush_cache=False,
            )
            await self.post("/continue_generation")

        await self.stream("length", TOKENS)
        await self.stream("one", 1)
        ends = list(range(0, 512, 16))
        await self.stream("stop", ENDLESS, stop_token_ids=ends, ignore_eos=False)
        await self.stream("abort", ENDLESS, abort)
        await self.stream("retract-abort", ENDLESS, abort_in_a_pause)
        await self.stream("refit", 64, refit)
        await self.stream("refused", TOKENS, temperature=-3.0)


async def record(server: CpuServer, form: str, other: Path) -> None:
    async with aiohttp.ClientSession(server.url) as session:
        await Recorder(session, form).everything(other)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        first, second = (write_model(folder / name, seed=seed) for seed, name in enumerate("ab"))
        for form, kind in (("cumulative", Cumulative), ("incremental", CpuServer)):
            with kind(first, folder / f"{form}.txt") as server:
                server.wait_ready()
                asyncio.run(record(server, form, second))
            print(form, file=sys.stderr)


if __name__ == "__main__":
    main()
