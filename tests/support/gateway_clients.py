"""Clients of a gateway who read, leave, abort and read slowly, at random, and check what they get.

A client asks again and again, in one of four ways: ``/generate`` as a whole or as a stream, a
streamed completion with up to three choices, a streamed chat. Every answer that a client reads to
its end must have all tokens, each with a version.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

__all__ = ["Tally", "held", "metric", "percentiles", "running", "trouble"]

KINDS = ("generate", "generate stream", "completions", "chat")
LEAVES, ABORTS, SLOW = 0.3, 0.05, 0.1
"""Shares of the requests whose client disconnects, aborts, or reads slowly."""
MEDIAN, LONGEST = 60, 800
"""Tokens of the responses, which are lognormal."""


@dataclass
class Tally:
    """What has become of the requests.

    Attributes:
        ended: number of requests by kind and end.
        tokens: number of tokens in the answers that were read to their end.
        first_s: seconds to the first event of each stream.
        all_s: seconds to the end of each answer.
        wrong: what was wrong with an answer, in words.
        versions: number of answers by the number of versions that sampled them.
    """

    ended: Counter[str] = field(default_factory=Counter[str])
    tokens: int = 0
    first_s: list[float] = field(default_factory=list[float])
    all_s: list[float] = field(default_factory=list[float])
    wrong: list[str] = field(default_factory=list[str])
    versions: Counter[int] = field(default_factory=Counter[int])


@dataclass
class _Request:
    """One request as its client sees it."""

    kind: str
    tokens: int
    choices: int
    rid: str
    texts: Counter[int] = field(default_factory=Counter[int])
    spans: dict[int, list[dict[str, Any]]] = field(default_factory=dict[int, list[dict[str, Any]]])
    reasons: dict[int, str] = field(default_factory=dict[int, str])

    def asked(self) -> tuple[str, dict[str, Any]]:
        """Path and body."""
        if self.kind.startswith("generate"):
            params = {"max_new_tokens": self.tokens, "ignore_eos": True}
            body: dict[str, Any] = {"input_ids": [5, 6, 7, 8], "sampling_params": params}
            return "/generate", {**body, "rid": self.rid, "stream": self.kind.endswith("stream")}
        body = {"model": "m", "max_tokens": self.tokens, "ignore_eos": True, "n": self.choices}
        body |= {"stream": True, "rid": self.rid, "return_token_ids": True}
        if self.kind == "chat":
            messages = [{"role": "user", "content": "How are you?"}]
            return "/v1/chat/completions", {**body, "messages": messages}
        return "/v1/completions", {**body, "prompt": "Once upon a time"}

    def take(self, event: dict[str, Any]) -> None:
        """Take an event of a stream, or a whole answer."""
        if "error" in event:
            raise ValueError(event["error"]["message"])
        if "meta_info" in event:
            meta = event["meta_info"]
            self.texts[0] += len(event["output_ids"])
            if meta["finish_reason"] is not None:
                self.reasons[0] = meta["finish_reason"]["type"]
                self.spans[0] = meta["weight_versions"]
            return
        for choice in event["choices"]:
            self.texts[choice["index"]] += len(choice.get("token_ids", ()))
            if choice["finish_reason"] is not None:
                self.reasons[choice["index"]] = choice["finish_reason"]
                self.spans[choice["index"]] = choice["weight_versions"]

    def check(self, *, aborted: bool) -> None:
        """Compare what has come with what was asked for."""
        for index in range(self.choices):
            given, reason = self.texts[index], self.reasons.get(index)
            whole = reason == "length" and given == self.tokens
            if not (whole or (aborted and reason == "abort" and given <= self.tokens)):
                raise ValueError(f"{given} of {self.tokens} tokens, {reason}")
            at = 0
            for span in self.spans[index]:
                if span["start"] != at:
                    raise ValueError(f"versions {self.spans[index]}")
                at = span["end"]
            if at != given:
                raise ValueError(f"{given} tokens and versions {self.spans[index]}")


async def running(
    url: str,
    clients: int,
    *,
    seed: int,
    until: float | None = None,
    requests: int | None = None,
    slow_s: float = 0.3,
) -> Tally:
    """Run clients until a time of the event loop's clock, or for a number of requests each.

    A slow reader waits up to `slow_s` seconds after each event.
    """
    tally = Tally()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session,
        asyncio.TaskGroup() as group,
    ):
        for number in range(clients):
            rng = random.Random(f"{seed}-{number}")
            group.create_task(_client(session, rng, number, tally, until, requests, slow_s))
    return tally


async def _client(
    session: aiohttp.ClientSession,
    rng: random.Random,
    number: int,
    tally: Tally,
    until: float | None,
    requests: int | None,
    slow_s: float,
) -> None:
    count = 0
    clock = asyncio.get_running_loop().time
    while (requests is None or count < requests) and (until is None or clock() < until):
        kind = rng.choice(KINDS)
        request = _Request(
            kind=kind,
            tokens=min(LONGEST, max(1, round(rng.lognormvariate(0, 0.8) * MEDIAN))),
            choices=rng.randint(1, 3) if kind in KINDS[2:] else 1,
            rid=f"client-{number}-{count}",
        )
        count += 1
        try:
            how = await _ask(session, rng, request, tally, slow_s)
        except (ValueError, KeyError, aiohttp.ClientError) as error:
            tally.wrong.append(f"{kind}: {type(error).__name__}: {error}")
            how = "wrong"
        tally.ended[f"{kind}, {how}"] += 1


async def _ask(
    session: aiohttp.ClientSession,
    rng: random.Random,
    request: _Request,
    tally: Tally,
    slow_s: float,
) -> str:
    """Ask once; returns how it ended."""
    path, body = request.asked()
    fate = rng.random()
    leaves_after = rng.randint(0, 12) if fate < LEAVES else None
    aborts_after = rng.randint(0, 5) if LEAVES <= fate < LEAVES + ABORTS else None
    slow = LEAVES + ABORTS <= fate < LEAVES + ABORTS + SLOW
    started_at, events = time.perf_counter(), 0
    if leaves_after is not None and not body["stream"]:
        try:
            async with asyncio.timeout(rng.uniform(0, 2)), session.post(path, json=body) as answer:
                await answer.read()
        except TimeoutError:
            return "left"
    async with session.post(path, json=body) as answer:
        if answer.status != 200:
            raise ValueError(f"{answer.status} {await answer.text()}")
        if not body["stream"]:
            request.take(await answer.json())
        else:
            async for line in answer.content:
                if leaves_after is not None and events >= leaves_after:
                    return "left"
                if not line.startswith(b"data: {"):
                    continue
                if not events:
                    tally.first_s.append(time.perf_counter() - started_at)
                events += 1
                request.take(json.loads(line.removeprefix(b"data: ")))
                if events == aborts_after:
                    async with session.post("/abort_request", json={"rid": request.rid}) as done:
                        await done.read()
                if slow:
                    await asyncio.sleep(rng.uniform(0, slow_s))
    request.check(aborted=aborts_after is not None)
    if not slow and aborts_after is None:
        tally.all_s.append(time.perf_counter() - started_at)
    tally.tokens += sum(request.texts.values())
    for spans in request.spans.values():
        tally.versions[len(spans)] += 1
    return "aborted" if "abort" in request.reasons.values() else "read"


async def held(url: str, streams: int, tokens: int) -> Tally:
    """Open `streams` streams of ``/generate`` at once, and read each to its end."""
    tally = Tally()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:

        async def one(number: int) -> None:
            request = _Request("generate stream", tokens, 1, rid=f"held-{number}")
            try:
                how = await _ask(session, _Stays(), request, tally, 0)
            except (ValueError, KeyError, aiohttp.ClientError) as error:
                tally.wrong.append(f"{type(error).__name__}: {error}")
                how = "wrong"
            tally.ended[how] += 1

        async with asyncio.TaskGroup() as group:
            for number in range(streams):
                group.create_task(one(number))
    return tally


class _Stays(random.Random):
    """The chance of a client that neither leaves, nor aborts, nor reads slowly."""

    def random(self) -> float:
        return 1.0


async def metric(url: str, name: str) -> float:
    """Return the value of a gateway's metric that has no labels."""
    async with aiohttp.ClientSession(url) as session, session.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return next(float(line.split()[1]) for line in lines if line.split()[0] == name)


async def trouble(url: str) -> list[str]:
    """What an idle gateway or server still has to do, in words."""
    async with aiohttp.ClientSession(url) as session, session.get("/v1/loads") as answer:
        loads: Sequence[dict[str, Any]] = (await answer.json())["loads"]
    found: list[str] = []
    for load in loads:
        for name in ("num_running_reqs", "num_waiting_reqs"):
            if load[name]:
                found.append(f"{name} is {load[name]}")
    return found


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The 50th, 90th and 99th percentile, and the largest."""
    ordered = sorted(values)
    if not ordered:
        return {}
    received = {
        f"p{q}": ordered[min(len(ordered) - 1, len(ordered) * q // 100)] for q in (50, 90, 99)
    }
    return {name: round(value, 4) for name, value in {**received, "max": ordered[-1]}.items()}
