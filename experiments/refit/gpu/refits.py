"""Times one refit step by step and checks it: pause, flush, publish, resume, ask the server.

The server really has the weights if its greedy answer is the one that their seed always gives, and
not the other seed's, whichever way the weights came. The server's own checksum is recorded too.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import aclosing
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import aiohttp
import numpy as np

# Only the adapter and the publishers are measured: the package's own __init__ would import the
# whole scheduler, and this machine need not have what that needs.
if "aprilsched" not in sys.modules:
    _found = util.find_spec("aprilsched")
    assert _found is not None
    assert _found.submodule_search_locations is not None
    _package = ModuleType("aprilsched")
    _package.__path__ = list(_found.submodule_search_locations)
    sys.modules["aprilsched"] = _package

from aprilsched.kernel.engines.base import GenerationRequest
from aprilsched.kernel.engines.http import HttpLimits
from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.types import SamplingParams

__all__ = ["SEEDS", "Refitter", "open_engine"]

SEEDS = (11, 22)
_PROMPT = np.arange(3, 67, dtype=np.int32)
_TOKENS = 24


class _Publisher(Protocol):
    async def prepare(self, version: int) -> None: ...

    async def publish(
        self, version: int, engines: Sequence[SGLangEngine]
    ) -> Mapping[str, Exception | None]: ...


async def open_engine(url: str) -> SGLangEngine:
    """The adapter as a run uses it, with short bounds."""
    limits = HttpLimits(control_timeout=20.0, flush_timeout=8.0, update_timeout=120.0)
    engine = SGLangEngine(url, limits=limits)
    await engine.open()
    return engine


async def answer(engine: SGLangEngine) -> list[int]:
    """The greedy continuation of a fixed prompt, without KV of earlier weights."""
    request = GenerationRequest(
        request_id=uuid.uuid4().hex,
        input_ids=_PROMPT,
        sampling=SamplingParams(max_new_tokens=_TOKENS, temperature=0.0, ignore_eos=True),
        cache_key=uuid.uuid4().hex,
    )
    ids: list[int] = []
    async with aclosing(engine.generate(request)) as chunks:
        async for chunk in chunks:
            ids += chunk.token_ids.tolist()
    return ids


class Refitter:
    """Refits one engine again and again, by turns with two policies.

    `known` holds each seed's greedy answer, learnt from the first refit with it; it is a file's
    content, so that all ways of refitting are held against the same answers.
    """

    def __init__(self, engine: SGLangEngine, url: str, known: dict[str, Any]) -> None:
        self._engine = engine
        self._url = url
        self._known = known
        self._checksum_seconds = 0.0

    async def once(
        self, publisher: _Publisher, version: int, seed: int, size: int
    ) -> dict[str, Any]:
        """One refit; the row says how long each step took and whether the weights arrived."""
        row: dict[str, Any] = {"version": version, "seed": seed, "bytes": size}
        row["prepare_s"] = await _timed(publisher.prepare(version))
        try:
            row["pause_s"] = await _timed(self._engine.pause("retract"))
            row["flush_s"] = await _timed(self._engine.flush())
            started = time.perf_counter()
            outcomes = await publisher.publish(version, [self._engine])
            row["publish_s"] = time.perf_counter() - started
        finally:
            row["resume_s"] = await _timed(self._engine.resume())
        failures = [str(error) for error in outcomes.values() if error is not None]
        if failures:
            raise RuntimeError(f"the engine did not take the weights: {failures[0]}")
        row["gb_s"] = size / row["publish_s"] / 1e9
        row["stopped_s"] = sum(row[f"{step}_s"] for step in ("pause", "flush", "publish", "resume"))
        row.update(await self._check(version, seed))
        return row

    async def _check(self, version: int, seed: int) -> dict[str, Any]:
        label = await self._engine.version()
        ids = await answer(self._engine)
        mine = self._known.setdefault(str(seed), {"ids": ids})
        others = [value["ids"] for key, value in self._known.items() if key != str(seed)]
        found: dict[str, Any] = {
            "label_ok": label == version,
            "answer_ok": ids == mine["ids"] and ids not in others,
        }
        # On a GPU the checksum of all weights is cheap; without one SGLang cannot make it.
        if self._checksum_seconds < 3.0:
            started = time.perf_counter()
            checksum = await self._checksum()
            self._checksum_seconds = time.perf_counter() - started
            if checksum is not None:
                found["checksum_ok"] = mine.setdefault("checksum", checksum) == checksum
                found["checksum"] = checksum[:16]
        found["verified"] = all(value for key, value in found.items() if key.endswith("_ok"))
        return found

    async def _checksum(self) -> str | None:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as session,
            session.post(f"{self._url}/weights_checker", json={"action": "checksum"}) as response,
        ):
            if response.status != 200:
                return None
            ranks = (await response.json()).get("ranks") or [{}]
            return ranks[0].get("per_gpu_checksum")


async def _timed(work: Awaitable[object]) -> float:
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


def known_answers(path: Path) -> dict[str, Any]:
    """What earlier phases learnt."""
    import json

    return json.loads(path.read_text()) if path.exists() else {}
