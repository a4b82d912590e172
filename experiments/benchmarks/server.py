"""A stand-in for an SGLang server whose answers are encoded in advance.

It has the part of SGLang 0.5.21's API that the adapter needs: the probes, the control calls, and
``/generate`` as incremental server-sent events with ``[logprob, id, null]`` triples.
Every stream gives the same answer, one event every `pace` seconds, up to the event `limit`. Streams
of one body give their events one after the other. POST /bench sets both. It runs in a process of
its own, so that its CPU time is not measured.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import sys

from aiohttp import web

EVENT_TOKENS = 64
ANSWER_TOKENS = 256
VOCABULARY = 151_936
PROMPT_TOKENS = 128
_SEED = 7


def answer(tokens: int, event_tokens: int) -> list[bytes]:
    """The events of the one answer; the last one has the spans."""
    draw = random.Random(_SEED)
    ids = [draw.randrange(VOCABULARY) for _ in range(tokens)]
    logprobs = [-draw.expovariate(1.0) for _ in range(tokens)]
    return [
        _event(ids, logprobs, start, start + event_tokens)
        for start in range(0, tokens, event_tokens)
    ]


def _event(ids: list[int], logprobs: list[float], start: int, end: int) -> bytes:
    last = end == len(ids)
    meta: dict[str, object] = {
        "id": "0123456789ab-0000000001-0001",
        "finish_reason": {"type": "length", "length": end} if last else None,
        "prompt_tokens": PROMPT_TOKENS,
        "weight_version": "0",
        "total_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [[logprobs[i], ids[i], None] for i in range(start, end)],
        "output_token_logprobs_length": end,
        "completion_tokens": end,
        "cached_tokens": 0,
        "dp_rank": None,
    }
    if last:
        meta["weight_versions"] = [{"version": "0", "start": 0, "end": end}]
        meta["e2e_latency"] = 10.25
    body = json.dumps({"output_ids": ids[start:end], "meta_info": meta}, separators=(",", ":"))
    return b"data: " + body.encode() + b"\n\n"


class Server:
    """The endpoints."""

    def __init__(self, tokens: int, event_tokens: int) -> None:
        self._events = answer(tokens, event_tokens)
        self._pace = 0.0
        self._limit = len(self._events)
        self._held = 0
        self._changed = asyncio.Condition()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**24)
        app.router.add_get("/model_info", self.model_info)
        app.router.add_get("/server_info", self.server_info)
        app.router.add_get("/openapi.json", self.openapi)
        app.router.add_get("/v1/loads", self.loads)
        app.router.add_get("/ready", self.nothing)
        for call in ("abort_request", "continue_generation", "pause_generation", "flush_cache"):
            app.router.add_post(f"/{call}", self.nothing)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/bench", self.bench)
        return app

    async def model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": "canned", "weight_version": "0"})

    async def server_info(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.5.21", "incremental_streaming_output": True})

    async def openapi(self, _: web.Request) -> web.Response:
        return web.json_response({"components": {"schemas": {}}})

    async def loads(self, _: web.Request) -> web.Response:
        load = {
            "num_running_reqs": 512,
            "num_waiting_reqs": 0,
            "num_used_tokens": 262_144,
            "max_total_num_tokens": 1_048_576,
            "decode_moments": [1.0, 512.0, 1e4, 262_144.0, 5e6, 512.0],
            "total_prefill_busy_us": 0,
        }
        return web.json_response({"loads": [load]})

    async def nothing(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def bench(self, request: web.Request) -> web.Response:
        """Set `pace` and `limit`; answers how many streams wait at the limit."""
        wanted = await request.json()
        async with self._changed:
            self._pace = wanted.get("pace", self._pace)
            self._limit = wanted.get("limit", self._limit)
            self._changed.notify_all()
        return web.json_response({"held": self._held})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        wanted = await request.json()
        several = isinstance(wanted["input_ids"][0], list)
        if not several and "logit_bias" in wanted["sampling_params"]:
            message = f"logit_bias must have keys in [0, {VOCABULARY - 1}]."
            return web.json_response({"error": {"message": message}}, status=400)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await stream.prepare(request)
        streams = len(wanted["input_ids"]) if several else 1
        for index, event in enumerate(self._events):
            await asyncio.sleep(self._pace)
            if index >= self._limit:
                await self._hold(index, streams)
            if not several:
                await stream.write(event)
                continue
            # As SGLang does: each event has the index of its response behind everything else.
            body = event[: -len(b"}\n\n")]
            for place in range(streams):
                await stream.write(b'%b,"index":%d}\n\n' % (body, place))
        await stream.write(b"data: [DONE]\n\n")
        return stream

    async def _hold(self, index: int, streams: int) -> None:
        self._held += streams
        async with self._changed:
            await self._changed.wait_for(lambda: index < self._limit)
        self._held -= streams


async def main() -> None:
    """Serve on a free port, which is printed, until the standard input ends."""
    runner = web.AppRunner(Server(ANSWER_TOKENS, EVENT_TOKENS).app(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=8192)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(main())
