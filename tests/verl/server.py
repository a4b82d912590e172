"""Servers in Ray actors, with the methods of verl's own and nothing else of verl."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from aprilsched.kernel.engines.base import Chunk, GenerationRequest
from aprilsched.kernel.values.companions import Rows
from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.simulation.engine.sim_engine import SimEngine
from aprilsched.testing.server import SimServer
from aprilsched.testing.threaded import ThreadedServer

VOCAB_SIZE = 256
EOS = 2
"""Ends one response in 256 at each token, so that there are a few very long ones."""
CONFIG = SimConfig(stream_at_pause=False, vocab_size=VOCAB_SIZE, eos_token_id=EOS)
TIME_SCALE = 2.0
"""Seconds for each second of an H200. A response of 1,000 tokens takes several steps of the
trainer."""
WEIGHTS = "APRILSCHED_TEST_WEIGHTS"
"""Variable with the folder of the weights, in which step-N has those of step N."""
HELD_ROW, HELD_STEP = 9, 1
"""First row of the data set, and last step of the weights, whose responses :class:`HoldingServer`
keeps. The two first batches are complete without these rows, and one of the rows fails."""


def is_held_row(prompt_ids: Sequence[int] | NDArray[np.int32]) -> bool:
    """Whether the prompt "<|im_start|> user wN …" is of a held row; w0 has the id 7."""
    return len(prompt_ids) > 2 and int(prompt_ids[2]) - 7 >= HELD_ROW


def without_last(rows: Mapping[str, Rows] | None) -> dict[str, Rows]:
    return {name: each.part(0, len(each) - 1) for name, each in (rows or {}).items()}


class HoldingEngine(SimEngine):
    """Keeps the last token of a response until the response is aborted."""

    holds = True

    def __init__(self, name: str, config: SimConfig, *, time_scale: float) -> None:
        super().__init__(name, config, time_scale=time_scale)
        self._held = dict[str, asyncio.Event]()

    async def generate(
        self, request: GenerationRequest, *, length: int | None = None
    ) -> AsyncGenerator[Chunk, None]:
        is_late = is_held_row(request.input_ids)
        tokens = 0
        async with aclosing(super().generate(request, length=length)) as chunks:
            async for chunk in chunks:
                tokens += len(chunk.token_ids)
                if is_late and self.holds and chunk.finish in ("stop", "length"):
                    break
                yield chunk
            else:
                return
        aborted = self._held[request.request_id] = asyncio.Event()
        ids, logprobs = chunk.token_ids[:-1], chunk.logprobs[:-1]
        spans = tuple(
            msgspec.structs.replace(span, end=min(span.end, tokens - 1))
            for span in chunk.spans or ()
            if span.start < tokens - 1 or not span.start
        )
        held = msgspec.structs.replace(
            chunk,
            token_ids=ids,
            logprobs=logprobs,
            finish=None,
            spans=None,
            token_rows=without_last(chunk.token_rows),
            context_rows=None,
        )
        try:
            yield held
            await aborted.wait()
        finally:
            del self._held[request.request_id]
        yield msgspec.structs.replace(
            chunk,
            token_ids=ids[:0],
            logprobs=logprobs[:0],
            finish="abort",
            spans=spans,
            token_rows=None,
            context_rows=without_last(chunk.context_rows),
        )

    async def abort(self, request_id: str) -> None:
        if (aborted := self._held.get(request_id)) is not None:
            aborted.set()
        await super().abort(request_id)


class Server:
    """A server as verl's actors have it, and the worker that loads its weights."""

    def __init__(self, weights: str) -> None:
        self._weights = Path(weights)
        self._server = ThreadedServer(self._make())
        self._server.start()
        self.global_steps: int | None = None

    def _make(self) -> SimServer:
        return SimServer(CONFIG, time_scale=TIME_SCALE)

    def get_server_address(self) -> tuple[str, int]:
        host, port = self._server.url.removeprefix("http://").split(":")
        return host, int(port)

    def abort_all_requests(self) -> None:
        self._post("pause_generation", mode="abort")

    def resume_generation(self) -> None:
        self._post("continue_generation")

    def release_kv_cache(self) -> None:
        self._post("release_memory_occupation", tags=["kv_cache"])

    def resume_kv_cache(self) -> None:
        self._post("resume_memory_occupation", tags=["kv_cache"])
        self._post("flush_cache")

    def execute_checkpoint_engine(self, method: str, *_: Any, **__: Any) -> None:
        """Take part in what the trainer does before and after the weights."""

    def update_weights(self, global_steps: int) -> None:
        self._post(
            "update_weights_from_disk",
            model_path=str(self._weights / f"step-{global_steps}"),
            flush_cache=True,
        )
        self.global_steps = global_steps

    def label(self) -> str:
        with urllib.request.urlopen(f"{self._server.url}/model_info") as answer:
            return json.load(answer)["weight_version"]

    def _post(self, path: str, **body: Any) -> None:
        _post(f"{self._server.url}/{path}", body)


class HoldingServer(Server):
    """No response to the row :data:`HELD_ROW` or a later one ends before the weights that follow
    step :data:`HELD_STEP`. With a slow trainer and fast servers, all might end between two
    updates."""

    def _make(self) -> SimServer:
        server = super()._make()
        server.engine = self._engine = HoldingEngine("sim-0", CONFIG, time_scale=TIME_SCALE)
        return server

    def update_weights(self, global_steps: int) -> None:
        super().update_weights(global_steps)
        self._engine.holds = global_steps <= HELD_STEP


class SGLangServer(Server):
    """A real server, which verl's SGLangHttpServer would have in its process; `models` are the
    weights of even and of odd steps."""

    def __init__(self, url: str, models: tuple[Path, Path]) -> None:
        self._url = url
        self._models = models
        self.global_steps = None

    def get_server_address(self) -> tuple[str, int]:
        host, port = self._url.removeprefix("http://").split(":")
        return host, int(port)

    def release_kv_cache(self) -> None:
        """As with ``free_cache_engine=False``."""

    def resume_kv_cache(self) -> None:
        """As with ``free_cache_engine=False``."""

    def update_weights(self, global_steps: int) -> None:
        folder = str(self._models[global_steps % 2])
        self._post("update_weights_from_disk", model_path=folder, flush_cache=False)
        # Of verl's ServerAdapter.
        self._post("flush_cache")
        self.global_steps = global_steps

    def label(self) -> str:
        return self._get("model_info")["weight_version"]

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self._url}/{path}") as answer:
            return json.load(answer)

    def _post(self, path: str, **body: Any) -> None:
        _post(f"{self._url}/{path}", body)


class VLLMServer(SGLangServer):
    """The same of verl's vLLMHttpServer."""

    def abort_all_requests(self) -> None:
        self._post("pause?mode=abort")

    def resume_generation(self) -> None:
        self._post("resume")

    def update_weights(self, global_steps: int) -> None:
        given = {"weights_path": str(self._models[global_steps % 2])}
        self._post("collective_rpc", method="reload_weights", kwargs=given)
        self._post("reset_prefix_cache")
        self.global_steps = global_steps

    def label(self) -> str:
        return self._get("weight_info")["weight_version"]


def _post(url: str, body: object) -> None:
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        answer.read()
