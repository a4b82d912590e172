"""Tests the real adapter with every kind of fault: it reports them, and never gives a wrong token.

The sockets are real and the clock is virtual. On loopback, sent data has arrived at once, so that
virtual time waits for it.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from tenacity import wait_fixed

from aprilsched.__main__ import main
from aprilsched.engines import http
from aprilsched.engines.base import Chunk
from aprilsched.engines.http import ConnectionDropped, HttpLimits, retry_after_s
from aprilsched.engines.sglang import SGLangEngine
from aprilsched.engines.sim import run_virtual
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
from aprilsched.testing import SimServer
from aprilsched.testing.contract import greedy, until
from aprilsched.testing.faults import FaultScript, faults_of
from aprilsched.testing.faults.kinds import KINDS
from aprilsched.types import VersionSpan
from tests.support.sim_http import CONFIG, INTERVAL, Raw, asked, two_weights

pytestmark = pytest.mark.virtual_time

T = TypeVar("T")
Table = dict[str, Any]

TOKENS = 200
NEVER = 3600.0
LIMITS = HttpLimits(max_answer_bytes=2**20, flush_timeout=20.0)
SECOND = {"after": 2}
"""The second call of /generate: the adapter makes the first when it opens."""


@dataclass
class Seen:
    """The tokens of one response, as the adapter gave them."""

    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    last: Chunk | None = None
    error: BaseException | None = None
    seconds: float = 0.0
    longest_gap: float = 0.0

    @property
    def finish(self) -> str | None:
        return None if self.last is None else self.last.finish


def script(*faults: Table) -> FaultScript:
    return faults_of({"fault": list(faults)})


class Setting:
    """A server with faults and the adapter that uses it; an async context manager."""

    def __init__(self, *faults: Table) -> None:
        self.server = SimServer(CONFIG, faults=script(*faults))

    async def __aenter__(self) -> Setting:
        await self.server.start()
        self.engine = SGLangEngine(self.server.url, stream_interval=INTERVAL, limits=LIMITS)
        await self.engine.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()
        await self.server.stop()

    @property
    def fired(self) -> Table:
        return dict(self.server.faults.fired)


async def read(engine: SGLangEngine) -> Seen:
    """Read one response to its end or its error; only a hang fails the test."""
    loop, seen = asyncio.get_running_loop(), Seen()
    begun = before = loop.time()
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
    seen.seconds = loop.time() - begun
    return seen


async def failure(call: Coroutine[Any, Any, object]) -> AprilschedError:
    """The error that `call` ends with."""
    with pytest.raises(AprilschedError) as raised:
        async with asyncio.timeout(NEVER):
            await call
    return raised.value


@cache
def reference() -> Seen:
    """The response of an engine without faults."""

    async def main() -> Seen:
        async with Setting() as setting:
            return await read(setting.engine)

    seen = run_virtual(main())
    assert seen.error is None
    assert len(seen.ids) == TOKENS
    return seen


@pytest.fixture(autouse=True)
def _reference_is_known() -> None:  # pyright: ignore[reportUnusedFunction]
    """Make the reference before a test's clock runs, because virtual clocks do not nest."""
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


# -- streams ------------------------------------------------------------------------------------

BROKEN: list[tuple[Table, type[AprilschedError], str]] = [
    ({"kind": "drop"}, EngineError, "the stream ended after"),
    ({"kind": "reset"}, ConnectionDropped, "the connection broke"),
    ({"kind": "error-event", "message": "out of memory"}, EngineRejected, "out of memory"),
    ({"kind": "truncate", **SECOND}, EngineProtocolError, "cannot be read"),
    ({"kind": "garbage", **SECOND}, EngineProtocolError, "cannot be read"),
    ({"kind": "garbage", "raw": True, **SECOND}, EngineProtocolError, "every token needs one"),
    ({"kind": "few-logprobs"}, EngineProtocolError, "every token needs one"),
    ({"kind": "few-logprobs", "missing": 100}, EngineProtocolError, "every token needs one"),
    ({"kind": "no-logprobs"}, EngineProtocolError, "every token needs one"),
    ({"kind": "nan-logprob"}, EngineProtocolError, "cannot be read"),
    ({"kind": "nan-logprob", "value": "NaN"}, EngineProtocolError, "cannot be read"),
    ({"kind": "nan-logprob", "value": "Infinity"}, EngineProtocolError, "cannot be read"),
    ({"kind": "nan-logprob", "value": "1e999"}, EngineProtocolError, "cannot be read"),
    ({"kind": "nan-logprob", "value": '"-0.5"'}, EngineProtocolError, "cannot be read"),
    ({"kind": "other-ids"}, EngineProtocolError, "not the tokens of its logprobs"),
    ({"kind": "out-of-order"}, EngineProtocolError, "every token needs one"),
    ({"kind": "flood-event"}, EngineProtocolError, "bytes"),
    ({"kind": "flood-comments"}, EngineProtocolError, "bytes"),
]


@pytest.mark.parametrize("after_tokens", [0, 1, 100])
@pytest.mark.parametrize(
    ("fault", "error", "message"), BROKEN, ids=lambda value: str(value) if value else ""
)
async def test_a_broken_stream_gives_right_tokens_and_then_an_error(
    fault: Table, error: type[AprilschedError], message: str, after_tokens: int
):
    spoiled = {**fault, "after_tokens": after_tokens, "times": 1}
    async with Setting(spoiled) as setting:
        seen = await read(setting.engine)
        assert setting.fired == {fault["kind"]: 1}
        assert type(seen.error) is error
        assert message in str(seen.error)
        check(seen, whole=False)
        assert after_tokens <= len(seen.ids) < TOKENS
        after = await read(setting.engine)
        check(after, whole=True)
        assert setting.server.engine.batcher.running == 0, "nothing decodes unseen"


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "duplicate-events"},
        {"kind": "duplicate-events", "after_tokens": 100},
        {"kind": "duplicate-finish"},
    ],
    ids=str,
)
async def test_repeated_events_are_read_once(fault: Table):
    async with Setting(fault) as setting:
        for number in (1, 2):
            check(await read(setting.engine), whole=True)
            assert setting.fired == {fault["kind"]: number}


@pytest.mark.parametrize(
    ("fault", "gap", "total"),
    [
        ({"kind": "delay", "seconds": 7, **SECOND}, 7, 7),
        ({"kind": "delay", "seconds": 7, "every_event": True, **SECOND}, 7, 12 * 7),
        ({"kind": "stall", "seconds": 50, "after_tokens": 100}, 50, 50),
        ({"kind": "slow-loris", "seconds": 0.5, "bytes": 64, **SECOND}, 7.5, 50),
        ({"kind": "silence", "seconds": 20, "routes": ["/generate"], **SECOND}, 20, 20),
        ({"kind": "hang", "at": 0.3, "seconds": 30}, 30, 30),
    ],
    ids=str,
)
async def test_a_late_stream_is_waited_for(fault: Table, gap: float, total: float):
    async with Setting(fault) as setting:
        seen = await read(setting.engine)
        check(seen, whole=True)
        assert setting.fired == {fault["kind"]: 1}
        assert seen.longest_gap >= gap
        assert seen.seconds >= total


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "stall", "after_tokens": 100},
        {"kind": "stall"},
        {"kind": "silence", "routes": ["/generate"], **SECOND},
        {"kind": "hang", "seconds": 1e6, "routes": ["/generate"], "times": 1, **SECOND},
    ],
    ids=str,
)
async def test_a_silent_stream_can_be_left_in_bounded_time(fault: Table):
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
        assert setting.fired == {fault["kind"]: 1}
        if fault["kind"] != "hang":
            await until(lambda: setting.server.engine.batcher.running == 0)


def test_a_stream_that_gives_too_much_is_broken_off_at_what_was_asked_for():
    async def main(tokens: int) -> None:
        async with Setting({"kind": "flood-tokens", "tokens": tokens, "times": 1}) as setting:
            seen = await read(setting.engine)
            check(seen, whole=False)
            assert type(seen.error) is EngineProtocolError
            assert "asked for" in str(seen.error)
            assert setting.fired == {"flood-tokens": 1}
            check(await read(setting.engine), whole=True)

    for tokens in (1, 64, 10**9):
        run_virtual(main(tokens))


async def test_several_faults_happen_to_one_stream():
    late = {"kind": "delay", "seconds": 5, "every_event": True, "after": 2}
    faults = [late, {"kind": "duplicate-events"}, {"kind": "drop", "after_tokens": 60}]
    async with Setting(*faults) as setting:
        seen = await read(setting.engine)
        check(seen, whole=False)
        assert setting.fired == {"delay": 1, "duplicate-events": 1, "drop": 1}
        assert seen.seconds >= 15


# -- whole answers ------------------------------------------------------------------------------


async def test_a_busy_server_says_when_it_may_be_asked_again():
    fault = {"kind": "status", "status": 429, "retry_after": 12.5, "times": 1, **SECOND}
    async with Setting(fault) as setting:
        error = (await read(setting.engine)).error
        assert isinstance(error, EngineBusy)
        assert error.retry_after_s == 12.5


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        *[(None, None), ("", None), ("0", 0), (" 7 ", 7), ("1.5", 1.5), ("-1", None)],
        *[("nan", None), ("1e9", None), ("soon", None), ("9" * 99, None), ("\u0663", None)],
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
        ("Wed, 99 Oct 2015 07:28:00 GMT", None),
    ],
)
def test_a_retry_after_is_a_number_or_a_date(header: str | None, seconds: float | None):
    assert retry_after_s(header) == seconds


def test_a_date_in_the_future_is_waited_for():
    assert (retry_after_s("Fri, 31 Dec 2899 23:59:59 GMT") or 0) > 1e9


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 502, 503])
async def test_a_status_is_a_rejection_with_the_servers_message(status: int):
    fault = {"kind": "status", "status": status, "message": "not today", "times": 1, **SECOND}
    async with Setting(fault) as setting:
        seen = await read(setting.engine)
        check(seen, whole=False)
        busy = status in (429, 503)
        assert type(seen.error) is (EngineBusy if busy else EngineRejected)
        assert seen.error.status == status
        assert "not today" in str(seen.error)
        check(await read(setting.engine), whole=True)


async def test_the_body_of_a_status_is_sent_as_it_is():
    fault = {"kind": "status", "status": 502, "body": "<html>Bad Gateway</html>"}
    async with SimServer(CONFIG, faults=script(fault)) as server, Raw(server.url) as raw:
        assert await raw.post("/generate", asked(5)) == (502, "<html>Bad Gateway</html>")


def test_a_reset_before_the_answer_breaks_the_connection():
    async def main(carried_out: bool) -> tuple[int, int]:
        fault = {"kind": "reset", "routes": ["/pause_generation"], "carried_out": carried_out}
        async with Setting({**fault, "times": 1}) as setting:
            await setting.engine.pause("retract")  # harmless to repeat, so it was
            paused_once = setting.server.engine.counters.paused_seconds
            await setting.engine.resume()
        async with Setting(fault) as setting:
            error = await failure(setting.engine.pause("retract"))
            assert type(error) is ConnectionDropped
            paused = setting.server.engine.batcher.paused
            assert paused == ("retract" if carried_out else None)
            return setting.fired["reset"], int(paused_once)

    assert run_virtual(main(False)) == (3, 0)
    assert run_virtual(main(True)) == (3, 0)


async def test_a_generation_whose_connection_was_reset_is_not_sent_twice():
    async with Setting({"kind": "reset", **SECOND}) as setting:
        seen = await read(setting.engine)
        assert type(seen.error) is ConnectionDropped
        assert not seen.ids
        assert setting.fired == {"reset": 1}


async def test_a_call_whose_engine_is_closed_before_it_is_repeated_ends_with_an_error_of_ours(
    monkeypatch: pytest.MonkeyPatch,
):
    # The wait is drawn from [0, 0.1 s]: a short one was over before the engine was closed.
    def fixed(**_: float) -> wait_fixed:
        return wait_fixed(5.0)

    monkeypatch.setattr(http, "wait_random_exponential", fixed)

    async with Setting({"kind": "reset", "routes": ["/abort_request"], "after": 2}) as setting:
        call = asyncio.create_task(failure(setting.engine.abort("0" * 32)))
        await until(lambda: setting.fired == {"reset": 1})
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
@pytest.mark.parametrize("route", CALLS)
async def test_a_control_call_that_never_answers_ends_in_its_time(route: str, carried_out: bool):
    loop = asyncio.get_running_loop()
    fault = {"kind": "silence", "routes": [route], "carried_out": carried_out, "at": 5}
    async with Setting(fault) as setting:
        await asyncio.sleep(5)
        begun = loop.time()
        error = await failure(_call(setting.engine, route))
        assert type(error) is ControlTimeout
        assert loop.time() - begun == pytest.approx(
            20 if route == "/flush_cache" else LIMITS.control_timeout
        )
        assert setting.fired == {"silence": 1}
        if route == "/pause_generation":
            assert (setting.server.engine.batcher.paused is not None) == carried_out


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ({"kind": "truncate"}, EngineProtocolError),
        ({"kind": "garbage"}, EngineProtocolError),
        ({"kind": "flood-answer", "bytes": 2**24}, EngineProtocolError),
        ({"kind": "status", "status": 503}, EngineBusy),
    ],
    ids=str,
)
async def test_an_answer_that_tells_nothing_is_an_error(fault: Table, error: type[AprilschedError]):
    async with Setting({**fault, "routes": ["info"], "at": 5, "times": 1}) as setting:
        await asyncio.sleep(5)
        found = await failure(setting.engine.version())
        assert type(found) is error
        assert await setting.engine.version() == 0
        assert setting.fired == {fault["kind"]: 1}


def test_a_server_whose_answers_are_spoilt_cannot_be_opened():
    async def main(fault: Table) -> AprilschedError:
        async with SimServer(CONFIG, faults=script({**fault, "routes": ["info"]})) as server:
            engine = SGLangEngine(server.url, limits=LIMITS)
            return await failure(engine.open())

    for kind in ("truncate", "garbage", "flood-answer"):
        assert type(run_virtual(main({"kind": kind}))) is EngineProtocolError
    assert type(run_virtual(main({"kind": "silence"}))) is ControlTimeout
    assert type(run_virtual(main({"kind": "reset"}))) is ConnectionDropped


async def test_an_ignored_abort_aborts_nothing():
    async with Setting({"kind": "ignored-abort", "at": 0.1}) as setting:
        task = asyncio.create_task(read(setting.engine))
        request = await _begun(setting, 50)
        await setting.engine.abort(request)
        check(await task, whole=True)
        assert setting.fired == {"ignored-abort": 1}


# -- weights ------------------------------------------------------------------------------------


def test_a_refit_that_fails_leaves_inconsistent_weights_unless_none_was_loaded(tmp_path: Path):
    weights = two_weights(tmp_path)[0]

    async def main(**how: Any) -> tuple[AprilschedError, int | AprilschedError]:
        async with Setting({"kind": "refit-fails", "times": 1, **how}) as setting:
            error = await failure(setting.engine.update_from_disk(weights, 1))
            assert setting.server.engine.batcher.version == 0
            try:
                after: int | AprilschedError = await setting.engine.version()
            except AprilschedError as raised:
                after = raised
            await setting.engine.update_from_disk(weights, 2)
            assert await setting.engine.version() == 2
            return error, after

    for status in (200, 400):
        error, after = run_virtual(main(status=status))
        assert type(error) is EngineRejected
        assert "a fault of the script" in str(error)
        assert type(after) is InconsistentWeights
    error, after = run_virtual(main(status=500))
    assert (type(error), type(after)) == (EngineRejected, InconsistentWeights)
    _, after = run_virtual(main(message="Failed to get weights iterator: no such file"))
    assert after == 0


async def test_a_version_that_is_stuck_shows_in_the_label_and_in_the_spans(tmp_path: Path):
    weights = two_weights(tmp_path)[0]

    async with Setting({"kind": "stuck-version", "times": 1}) as setting:
        await setting.engine.update_from_disk(weights, 1)
        assert setting.fired == {"stuck-version": 1}
        assert await setting.engine.version() == 0
        check(await read(setting.engine), whole=True)
        await setting.engine.update_from_disk(weights, 2)
        assert await setting.engine.version() == 2


# -- the whole engine ---------------------------------------------------------------------------


async def test_a_hanging_engine_accepts_connections_and_answers_nothing():
    loop = asyncio.get_running_loop()
    async with Setting({"kind": "hang", "at": 1, "seconds": 200}) as setting:
        await asyncio.sleep(1)
        for route in CALLS:
            assert type(await failure(_call(setting.engine, route))) is ControlTimeout
        generated = setting.server.engine.counters.generated
        waiting = asyncio.create_task(read(setting.engine))
        await asyncio.sleep(1)
        assert setting.server.engine.counters.generated == generated
        seen = await waiting
        check(seen, whole=True)
        assert 201 <= loop.time() < 205
        assert await setting.engine.version() == 0
        assert setting.fired == {"hang": 1}


def test_a_slow_engine_decodes_at_its_factor_for_its_time():
    usual = reference().seconds

    async def main(factor: float, seconds: float) -> float:
        async with Setting({"kind": "slow", "factor": factor, "seconds": seconds}) as setting:
            await asyncio.sleep(0.001)
            seen = await read(setting.engine)
            check(seen, whole=True)
            assert setting.fired == {"slow": 1}
            return seen.seconds

    assert run_virtual(main(0.1, 1000)) == pytest.approx(10 * usual, rel=0.02)
    assert run_virtual(main(0.5, 1000)) == pytest.approx(2 * usual, rel=0.02)
    assert run_virtual(main(0.1, 2.0)) == pytest.approx(1.8 + usual, rel=0.02)


@pytest.mark.parametrize("keeps", [False, True])
async def test_an_engine_that_dies_comes_back_at_the_same_address(tmp_path: Path, keeps: bool):
    weights = two_weights(tmp_path)[0]

    death = {"kind": "die", "at": 5.2, "seconds": 30, "keeps_weights": keeps}
    async with Setting(death) as setting:
        await setting.engine.update_from_disk(weights, 3)
        before = await read(setting.engine)
        await asyncio.sleep(5 - asyncio.get_running_loop().time())
        seen = await read(setting.engine)
        assert type(seen.error) is ConnectionDropped
        assert 0 < len(seen.ids) < TOKENS
        assert seen.ids == before.ids[: len(seen.ids)]
        for route in CALLS:
            assert type(await failure(_call(setting.engine, route))) is EngineUnreachable
        unsent = await read(setting.engine)
        assert type(unsent.error) is EngineUnreachable
        await asyncio.sleep(30)
        assert setting.server.engine.counters.generated == 0, "a new process"
        assert await setting.engine.version() == (3 if keeps else 0)
        after = await read(setting.engine)
        assert after.ids == (before.ids if keeps else reference().ids)
        assert setting.fired == {"die": 1}


async def test_an_engine_can_die_of_a_call(tmp_path: Path):
    death = {"kind": "die", "seconds": 10, "routes": ["updates"], "times": 1}
    async with Setting(death) as setting:
        await setting.engine.pause("retract")
        weights = two_weights(tmp_path)[0]
        error = await failure(setting.engine.update_from_disk(weights, 1))
        assert type(error) is ConnectionDropped
        await asyncio.sleep(20)
        assert setting.server.engine.batcher.paused is None, "a new process"
        await setting.engine.update_from_disk(weights, 1)
        assert setting.server.engine.batcher.version == 1


async def test_a_dead_engine_can_be_stopped_and_one_that_dies_for_good_stays_away():
    async with Setting({"kind": "die", "at": 1}) as setting:
        assert setting.server.listening
        await asyncio.sleep(10**6)
        assert not setting.server.listening
        assert type(await failure(setting.engine.version())) is EngineUnreachable


# -- the command --------------------------------------------------------------------------------


@pytest.mark.virtual_time(False)
async def test_the_command_carries_a_script_out_and_tells_what_happened(tmp_path: Path):
    path = tmp_path / "chaos.toml"
    path.write_text(
        "[[fault]]\nkind = 'status'\nstatus = 503\nroutes = ['/model_info']\ntimes = 2\n"
        "[[fault]]\nkind = 'status'\nstatus = 418\nroutes = ['/server_info']\nengines = [1]\n"
    )
    arguments = ["serve-sim", "--port", "0", "--sim.engines", "2", "--faults", str(path)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *("-m", "aprilsched", *arguments), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    first, second = [(await process.stdout.readline()).decode().split()[-1] for _ in range(2)]
    async with Raw(first) as raw:
        assert [(await raw.get("/model_info"))[0] for _ in range(3)] == [503, 503, 200]
        assert (await raw.get("/server_info"))[0] == 200
    async with Raw(second) as raw:
        assert (await raw.get("/server_info"))[0] == 418
    process.send_signal(signal.SIGTERM)
    told = (await process.stdout.read()).decode().splitlines()
    assert told == [
        f"{first}: faults that happened: status 2",
        f"{second}: faults that happened: status 1",
    ]
    assert await process.wait() == 0


def test_the_command_refuses_a_script_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "chaos.toml"
    assert main(["serve-sim", "--faults", str(path)]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err
    path.write_bytes(b"\xff")
    assert main(["serve-sim", "--faults", str(path)]) == 2
    assert "is no TOML" in capsys.readouterr().err
    path.write_text("[[fault]]\nkind = 'drip'")
    assert main(["serve-sim", "--faults", str(path)]) == 2
    assert "fault 1 has the unknown kind 'drip'; the nearest one is" in capsys.readouterr().err


def test_every_kind_is_tried_here():
    source = Path(__file__).read_text(encoding="utf-8")
    assert [kind for kind in KINDS if f'"{kind}"' not in source] == []


async def _call(engine: SGLangEngine, route: str) -> None:
    await CALLS[route](engine)


async def _begun(setting: Setting, tokens: int) -> str:
    """Wait until the one running request has `tokens` tokens; returns its id."""
    await until(lambda: setting.server.engine.counters.generated >= tokens)
    (request,) = setting.engine._calls  # pyright: ignore[reportPrivateUsage]
    return request


@pytest.mark.parametrize("lost", [False, True], ids=["the server goes on", "the server is lost"])
async def test_a_connection_that_breaks_after_our_abort_ends_the_aborted_response(lost: bool):
    """SGLang broke one once, and every token had arrived. A lost server has failed all the same."""
    silence = {"kind": "silence", "routes": ["/abort_request"], "after": 2}
    broken = {"kind": "reset", "after_tokens": 100, "times": 1}
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
                        await until(lambda: "silence" in setting.fired)
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
