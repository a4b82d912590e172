"""Records what a real vLLM server streams, for tests/unit/test_wire_fuzz.py.

``python -m tests.vllm.record_wire FOLDER`` starts a server with a tiny model in FOLDER, and writes
the files ``vllm-*.sse`` of ``tests/support/wire`` again: the streams of a few short responses.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp

from tests.sglang.server import write_model
from tests.vllm.server import VLLMServer, server_python

TARGET = Path(__file__).parents[1] / "support" / "wire"
Action = Callable[[aiohttp.ClientSession], Awaitable[None]]


async def post(session: aiohttp.ClientSession, path: str, **body: object) -> None:
    async with session.post(path, json=body) as answer:
        assert answer.status == 200, await answer.text()


async def abort(session: aiohttp.ClientSession) -> None:
    await post(session, "/abort_requests", request_ids=["generate-tokens-abort"])


async def refit(session: aiohttp.ClientSession) -> None:
    await post(session, "/pause?mode=keep")
    await post(session, "/update_weight_version", new_version="7")
    await post(session, "/resume")


async def record(
    session: aiohttp.ClientSession, name: str, tokens: int, prompt: int, action: Action | None
) -> None:
    """Write the stream of one response, running `action` after two events."""
    sampling = {
        "max_tokens": tokens,
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
        "stream_interval": 16,
    }
    body = {
        "request_id": name,
        "token_ids": [5] * prompt,
        "stream": True,
        "sampling_params": sampling,
    }
    content = b""
    async with session.post("/inference/v1/generate", json=body) as answer:
        async for data in answer.content.iter_any():
            content += data
            if action is not None and content.count(b"\n\n") >= 2:
                await action(session)
                action = None
    (TARGET / f"vllm-{name}.sse").write_bytes(content)


async def main(folder: Path) -> None:
    with VLLMServer(
        write_model(folder / "model", python=server_python()), folder / "log.txt"
    ) as server:
        await asyncio.to_thread(server.wait_ready)
        async with aiohttp.ClientSession(server.url) as session:
            await record(session, "length", 40, 3, None)
            await record(session, "one", 1, 3, None)
            await record(session, "refused", 40, 9000, None)
            await record(session, "abort", 4000, 3, abort)
            await record(session, "refit", 64, 3, refit)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
