"""Tests the real adapter with every kind of fault: it reports them, and returns no wrong token.

The sockets are real and the clock is virtual. On loopback, sent data has arrived at once, so that
virtual time waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from tenacity import wait_fixed

from aprilsched.errors import (
    AprilschedError,
    ControlTimeout,
    EngineBusy,
    EngineError,
    EngineProtocolError,
    EngineRejected,
    EngineUnreachable,
    InconsistentWeights,
)
from aprilsched.kernel.engines import transport
from aprilsched.kernel.engines.base import Chunk
from aprilsched.kernel.engines.failures import ConnectionDropped, retry_after_s
from aprilsched.kernel.engines.http import HttpLimits
from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.simulation.engine import run_virtual
from aprilsched.testing.contract import greedy, until
from aprilsched.types import VersionSpan
from tests.support import faults as kinds
from tests.support.faults import (
    Answer,
    Corrupt,
    Cut,
    Delay,
    Fault,
    FaultyServer,
    Garbage,
    Hang,
    LoseAnswer,
    Restart,
    failed_update,
)
from tests.support.sim_http import CONFIG, INTERVAL, two_weights

pytestmark = pytest.mark.virtual_time

T = TypeVar("T")
TOKENS = 200
NEVER = 3600.0
LIMITS = HttpLimits(max_answer_bytes=2**20, flush_timeout=20.0)


@dataclass
class Seen:
    """The tokens of one response, as the adapter returned them."""

    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    last: Chunk | None = None
    error: BaseException | None = None
    seconds: float = 0.0
    longest_gap: float = 0.0

    @property
    def finish(self) -> str | None:
        return None if self.last is None else self.last.finish


class Setting:
    """A server with faults and the adapter that uses it; an async context manager."""

    def __init__(self, *faults: Fault) -> None:
        self.server = FaultyServer(CONFIG, faults=faults)

    async def __aenter__(self) -> Setting:
        await self.server.start()
        self.engine = SGLangEngine(self.server.url, stream_interval=INTERVAL, limits=LIMITS)
        await self.engine.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()
        await self.server.stop()

    @property
    def fired(self) -> dict[str, int]:
        return dict(self.server.faults.fired)


async def read(engine: SGLangEngine) -> Seen:
    """Read one response to its end or its error; only a hang fails the test."""
    loop, seen = asyncio.get_running_loop(), Seen()
    opened = before = loop.time()
    try:
        async with asyncio.timeout(NEVER), aclosing(engine.generate(greedy(TOKENS))) as chunks:
            async for chunk in chunks:
                seen.ids += chunk.token_ids.tolist()
                seen.logprobs += chunk.logprobs.tolist()
                seen.last = chunk
                seen.longest_gap = max(seen.longest_gap, loop.time() - before)
                before = loop.time()
    except AprilschedError as error:
        seen.error = error
    seen.seconds = loop.time() - opened
    return seen


async def failure(call: Coroutine[Any, Any, object]) -> AprilschedError:
    """Return the error that `call` raises."""
    with pytest.raises(AprilschedError) as raised:
        async with asyncio.timeout(NEVER):
            await call
    return raised.value


@cache
def reference() -> Seen:
    """Return the response of an engine without faults."""

    async def main() -> Seen:
        async with Setting() as setting:
            return await read(setting.engine)

    seen = run_virtual(main())
    assert seen.error is None
    assert len(seen.ids) == TOKENS
    return seen


@pytest.fixture(autouse=True)
def _reference_is_known() -> None:  # pyright: ignore[reportUnusedFunction]
    """Compute the reference before a test's clock runs, because virtual clocks do not nest."""
    reference()


def check(seen: Seen, *, whole: bool) -> None:
    """Check that every delivered token is the right one, with its logprob and version."""
    right = reference()
    assert seen.ids == right.ids[: len(seen.ids)]
    np.testing.assert_array_equal(seen.logprobs, right.logprobs[: len(seen.ids)])
    assert (seen.finish == "length") == whole
    if whole:
        assert len(seen.ids) == TOKENS
        assert seen.last is not None
        assert seen.last.spans == (VersionSpan(version=0, start=0, end=TOKENS),)


BROKEN: list[tuple[Fault, type[AprilschedError], str]] = [
    (Cut(after_tokens=100), ConnectionDropped, "the connection broke"),
    (Cut(after_tokens=1, clean=True), EngineError, "the stream ended after"),
    (Answer(message="out of memory", after_tokens=0), EngineRejected, "out of memory"),
    (Garbage(after_tokens=100), EngineProtocolError, "cannot be read"),
    (Garbage(what="raw", after_tokens=0), EngineProtocolError, "every token needs one"),
    (Garbage(what="half", after_tokens=1), EngineProtocolError, "cannot be read"),
    (Garbage(what="endless", size=2**30, after_tokens=100), EngineProtocolError, "bytes"),
    (Garbage(what="comments", size=2**30, after_tokens=0), EngineProtocolError, "bytes"),
    (Corrupt(change=kinds.few_logprobs), EngineProtocolError, "every token needs one"),
    (
        Corrupt(change=kinds.no_logprobs, after_tokens=100),
        EngineProtocolError,
        "every token needs one",
    ),
    (Corrupt(change=kinds.strange_logprob("null")), EngineProtocolError, "cannot be read"),
    (Corrupt(change=kinds.other_ids), EngineProtocolError, "not the tokens of its logprobs"),
    (Corrupt(change=kinds.out_of_order), EngineProtocolError, "every token needs one"),
    (Corrupt(change=kinds.more_tokens(1)), EngineProtocolError, "asked for"),
    (Corrupt(change=kinds.more_tokens(10**9)), EngineProtocolError, "asked for"),
]


@pytest.mark.parametrize(("fault", "error", "message"), BROKEN)
async def test_a_broken_stream_gives_right_tokens_and_then_an_error(
    fault: Fault, error: type[AprilschedError], message: str
):
    async with Setting(replace(fault, times=1)) as setting:
        seen = await read(setting.engine)
        assert setting.fired == {fault.kind: 1}
        assert type(seen.error) is error
        assert message in str(seen.error)
        check(seen, whole=False)
        assert (fault.after_tokens or 0) <= len(seen.ids)
        check(await read(setting.engine), whole=True)
        assert setting.server.engine.batcher.running == 0, "the request still decodes"


@pytest.mark.parametrize("change", [kinds.twice, kinds.twice_at_the_finish])
async def test_repeated_events_are_read_once(change: Callable[..., Any]):
    async with Setting(Corrupt(change=change, after_tokens=100)) as setting:
        for number in (1, 2):
            check(await read(setting.engine), whole=True)
            assert setting.fired == {"corrupt": number}


@pytest.mark.parametrize(
    ("fault", "gap", "total"),
    [
        (Delay(seconds=7, after=2), 7, 7),
        (Delay(seconds=50, after_tokens=100), 50, 50),
        (Delay(seconds=0.5, piece=64, after_tokens=0), 7.5, 50),
        (Hang(at=0.3, seconds=30), 30, 30),
    ],
)
async def test_a_late_stream_is_waited_for(fault: Fault, gap: float, total: float):
    async with Setting(fault) as setting:
        seen = await read(setting.engine)
        check(seen, whole=True)
        assert setting.fired == {fault.kind: 1}
        assert seen.longest_gap >= gap
        assert seen.seconds >= total


@pytest.mark.parametrize(
    "fault",
    [
        Delay(after_tokens=100),
        Delay(after=2),
        Hang(seconds=1e6, routes=kinds.GENERATE, times=1, after=2),
    ],
)
async def test_a_silent_stream_can_be_left_in_bounded_time(fault: Fault):
    loop = asyncio.get_running_loop()
    async with Setting(fault) as setting:
        task = asyncio.create_task(read(setting.engine))
        await asyncio.sleep(600)
        assert not task.done(), "streams have no time limit of their own"
        left = loop.time()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert loop.time() - left <= LIMITS.abort_timeout
        assert setting.fired == {fault.kind: 1}
        if not isinstance(fault, Hang):
            await until(lambda: setting.server.engine.batcher.running == 0)


# -- whole answers ------------------------------------------------------------------------------


async def test_the_error_of_a_busy_server_has_retry_after():
    async with Setting(Answer(status=429, retry_after=12.5, times=1, after=2)) as setting:
        error = (await read(setting.engine)).error
        assert isinstance(error, EngineBusy)
        assert error.retry_after_s == 12.5


def test_a_retry_after_is_a_number_or_a_date():
    for header, seconds in [
        *[(None, None), ("", None), ("0", 0), (" 7 ", 7), ("1.5", 1.5), ("-1", None)],
        *[("nan", None), ("1e9", None), ("soon", None), ("9" * 99, None), ("\u0663", None)],
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
        ("Wed, 99 Oct 2015 07:28:00 GMT", None),
    ]:
        assert retry_after_s(header) == seconds, header
    assert (retry_after_s("Fri, 31 Dec 2899 23:59:59 GMT") or 0) > 1e9


@pytest.mark.parametrize("status", [401, 429, 500])
async def test_a_status_is_a_rejection_with_the_servers_message(status: int):
    async with Setting(Answer(status=status, message="not today", times=1, after=2)) as setting:
        seen = await read(setting.engine)
        check(seen, whole=False)
        assert type(seen.error) is (EngineBusy if status == 429 else EngineRejected)
        assert seen.error.status == status
        assert "not today" in str(seen.error)
        check(await read(setting.engine), whole=True)


def test_a_reset_before_the_answer_breaks_the_connection():
    async def main(fault: Fault, carried_out: bool) -> tuple[int, int]:
        fault = replace(fault, routes=("/pause_generation",))
        async with Setting(replace(fault, times=1)) as setting:
            await setting.engine.pause("retract")  # repeated, because that is harmless
            paused_once = setting.server.engine.counters.paused_seconds
            await setting.engine.resume()
        async with Setting(fault) as setting:
            error = await failure(setting.engine.pause("retract"))
            assert type(error) is ConnectionDropped
            paused = setting.server.engine.batcher.paused
            assert paused == ("retract" if carried_out else None)
            return setting.fired[fault.kind], int(paused_once)

    assert run_virtual(main(Cut(), False)) == (3, 0)
    assert run_virtual(main(LoseAnswer(), True)) == (3, 0)


async def test_a_reset_generation_is_not_sent_twice():
    async with Setting(Cut(after=2)) as setting:
        seen = await read(setting.engine)
        assert type(seen.error) is ConnectionDropped
        assert not seen.ids
        assert setting.fired == {"cut": 1}


async def test_a_retry_on_a_closed_engine_is_an_aprilsched_error(
    monkeypatch: pytest.MonkeyPatch,
):
    # The wait is drawn from [0, 0.1 s]; a short one would end before the engine is closed.
    def fixed(**_: float) -> wait_fixed:
        return wait_fixed(5.0)

    monkeypatch.setattr(transport, "wait_random_exponential", fixed)

    async with Setting(Cut(routes=kinds.ABORT, after=2)) as setting:
        call = asyncio.create_task(failure(setting.engine.abort("0" * 32)))
        await until(lambda: setting.fired == {"cut": 1})
        await setting.engine.close()
        assert "was closed" in str(await call)


CALLS: dict[str, Callable[[SGLangEngine], Awaitable[object]]] = {
    "/pause_generation": lambda engine: engine.pause("retract"),
    "/flush_cache": lambda engine: engine.flush(),
    "/continue_generation": lambda engine: engine.resume(),
    "/abort_request": lambda engine: engine.abort("0" * 32),
    "/model_info": lambda engine: engine.version(),
}


@pytest.mark.parametrize("carried_out", [False, True])
async def test_a_control_call_that_never_answers_ends_in_its_time(carried_out: bool):
    loop = asyncio.get_running_loop()
    routes = tuple(CALLS)
    silence = LoseAnswer(silent=True, routes=routes, at=5)
    fault = silence if carried_out else Delay(routes=routes, at=5)
    async with Setting(fault) as setting:
        await asyncio.sleep(5)
        for route, call in CALLS.items():
            started = loop.time()
            assert type(await failure(_called(call, setting.engine))) is ControlTimeout
            limit = 20 if route == "/flush_cache" else LIMITS.control_timeout
            assert loop.time() - started == pytest.approx(limit)
            if route == "/pause_generation":
                assert (setting.server.engine.batcher.paused is not None) == carried_out
        assert setting.fired == {fault.kind: len(CALLS)}


# -- weights ------------------------------------------------------------------------------------


def test_a_failed_refit_is_inconsistent_unless_nothing_loaded(tmp_path: Path):
    weights = two_weights(tmp_path)[0]

    async def main(fault: Fault) -> tuple[AprilschedError, int | AprilschedError]:
        async with Setting(replace(fault, times=1)) as setting:
            error = await failure(setting.engine.update_from_disk(weights, 1))
            assert setting.server.engine.batcher.version == 0
            try:
                after: int | AprilschedError = await setting.engine.version()
            except AprilschedError as raised:
                after = raised
            await setting.engine.update_from_disk(weights, 2)
            assert await setting.engine.version() == 2
            return error, after

    for status in (200, 400, 500):
        error, after = run_virtual(main(failed_update(status)))
        assert type(error) is EngineRejected
        assert "a fault of the test" in str(error) or status == 500
        assert type(after) is InconsistentWeights
    _, after = run_virtual(
        main(failed_update(message="Failed to get weights iterator: no such file"))
    )
    assert after == 0


async def test_a_stuck_version_shows_in_the_label_and_the_spans(tmp_path: Path):
    weights = two_weights(tmp_path)[0]
    done = {"success": True, "message": "Succeeded to update model weights."}
    async with Setting(Answer(status=200, content=done, routes=kinds.UPDATES, times=1)) as setting:
        await setting.engine.update_from_disk(weights, 1)
        assert setting.fired == {"answer": 1}
        assert await setting.engine.version() == 0
        check(await read(setting.engine), whole=True)
        await setting.engine.update_from_disk(weights, 2)
        assert await setting.engine.version() == 2


# -- the whole engine ---------------------------------------------------------------------------


async def test_a_hanging_engine_accepts_calls_and_never_answers():
    loop = asyncio.get_running_loop()
    async with Setting(Hang(at=1, seconds=200)) as setting:
        await asyncio.sleep(1)
        for call in CALLS.values():
            assert type(await failure(_called(call, setting.engine))) is ControlTimeout
        generated = setting.server.engine.counters.generated
        waiting = asyncio.create_task(read(setting.engine))
        await asyncio.sleep(1)
        assert setting.server.engine.counters.generated == generated
        seen = await waiting
        check(seen, whole=True)
        assert 201 <= loop.time() < 205
        assert await setting.engine.version() == 0
        assert setting.fired == {"hang": 1}


@pytest.mark.parametrize("keeps", [False, True])
async def test_an_engine_that_dies_comes_back_at_the_same_address(tmp_path: Path, keeps: bool):
    weights = two_weights(tmp_path)[0]

    async with Setting(Restart(at=5.2, seconds=30, keeps_weights=keeps)) as setting:
        await setting.engine.update_from_disk(weights, 3)
        before = await read(setting.engine)
        await asyncio.sleep(5 - asyncio.get_running_loop().time())
        seen = await read(setting.engine)
        assert type(seen.error) is ConnectionDropped
        assert 0 < len(seen.ids) < TOKENS
        assert seen.ids == before.ids[: len(seen.ids)]
        for call in CALLS.values():
            assert type(await failure(_called(call, setting.engine))) is EngineUnreachable
        unsent = await read(setting.engine)
        assert type(unsent.error) is EngineUnreachable
        await asyncio.sleep(30)
        assert setting.server.engine.counters.generated == 0, "a new process"
        assert await setting.engine.version() == (3 if keeps else 0)
        after = await read(setting.engine)
        assert after.ids == (before.ids if keeps else reference().ids)
        assert setting.fired == {"restart": 1}


async def _called(call: Callable[[SGLangEngine], Awaitable[object]], engine: SGLangEngine) -> None:
    await call(engine)


@pytest.mark.parametrize("lost", [False, True], ids=["the server continues", "the server is lost"])
async def test_a_connection_broken_after_our_abort_ends_the_response(lost: bool):
    """SGLang once broke one after all tokens had arrived. A lost server is still a failure."""
    silence = Delay(routes=kinds.ABORT, after=2)
    broken = Cut(after_tokens=100, times=1)
    async with Setting(silence, broken) as setting:
        request, seen = greedy(TOKENS), Seen()
        aborting: asyncio.Task[None] | None = None
        try:
            async with aclosing(setting.engine.generate(request)) as chunks:
                async for chunk in chunks:
                    seen.ids += chunk.token_ids.tolist()
                    seen.logprobs += chunk.logprobs.tolist()
                    seen.last = chunk
                    if aborting is None:
                        aborting = asyncio.create_task(setting.engine.abort(request.request_id))
                        await until(lambda: "delay" in setting.fired)
                        if lost:
                            await setting.server.stop()
        except AprilschedError as error:
            seen.error = error
        assert aborting is not None
        aborting.cancel()
        await asyncio.wait([aborting])
        check(seen, whole=False)
        if lost:
            assert isinstance(seen.error, EngineError)
            return
        assert seen.error is None
        assert seen.finish == "abort"
        assert len(seen.ids) >= 100
        assert seen.last is not None
        assert seen.last.spans is None
