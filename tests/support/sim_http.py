"""Serves the embedded engine for tests, and makes HTTP calls to it without the adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.testing import SimServer
from aprilsched.testing.contract import PROMPT

INTERVAL = 16
SCALE = 0.5
CONFIG = SimConfig(stream_interval=INTERVAL, vocab_size=512, stream_at_pause=False)


def served(
    *, admin_key: str | None = None, config: SimConfig = CONFIG, refit_seconds: float = 0.0
) -> SimServer:
    """A server on a free loopback port, in scaled wall time."""
    return SimServer(config, admin_key=admin_key, time_scale=SCALE, refit_seconds=refit_seconds)


def two_weights(folder: Path) -> tuple[Path, Path]:
    """Two checkpoints with different files. The toy model uses nothing else of them."""
    found = folder / "first", folder / "second"
    for path in found:
        path.mkdir()
        (path / "config.json").write_text("{}")
        (path / "model.safetensors").write_text(path.name)
    return found


def asked(tokens: int, *, rid: str | None = None, **body: Any) -> dict[str, Any]:
    """The body of a greedy generation."""
    params = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    named = {} if rid is None else {"rid": rid}
    return {"input_ids": PROMPT.tolist(), "sampling_params": params, **named, **body}


class Raw:
    """Makes HTTP calls without the adapter; an async context manager."""

    def __init__(self, url: str, key: str | None = None) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.session = aiohttp.ClientSession(url, headers=headers)

    async def __aenter__(self) -> Raw:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON (or text) of the answer to a GET."""
        async with self.session.get(path) as answer:
            return answer.status, _content(await answer.read())

    async def post(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Status and JSON (or text) of the answer to a POST; None sends no body."""
        data = None if body is None else msgspec.json.encode(body)
        kind = {} if data is None else {"Content-Type": "application/json"}
        async with self.session.post(path, data=data, headers=kind) as answer:
            return answer.status, _content(await answer.read())

    async def done(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer to a POST that succeeds."""
        status, answer = await self.post(path, body)
        assert status == 200, answer
        return answer

    async def refused(self, path: str, body: dict[str, Any] | None, status: int = 400) -> str:
        """The message in the answer to a POST that is refused."""
        found, answer = await self.post(path, body)
        assert found == status, answer
        return answer.get("message") or answer["error"]["message"]

    async def events(self, body: dict[str, Any]) -> list[Any]:
        """All events of a streamed generation."""
        async with self.session.post("/generate", json={**body, "stream": True}) as answer:
            assert answer.status == 200
            assert answer.content_type == "text/event-stream"
            lines = (await answer.read()).split(b"\n\n")
        assert lines[-2:] == [b"data: [DONE]", b""]
        return [msgspec.json.decode(line.removeprefix(b"data: ")) for line in lines[:-2]]


def _content(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode()
