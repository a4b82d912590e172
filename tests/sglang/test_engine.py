"""Tests a real SGLang server at its edge cases, with one test for each known hazard.

The numbers are those of the list in the engine's documentation. After every test the server must be
alive, idle and not paused; the fixtures check this.
"""

from __future__ import annotations

import asyncio
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

from aprilsched.errors import ControlTimeout, EngineRejected
from aprilsched.kernel.engines.http import HttpLimits
from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.testing.contract import ENDLESS, WAIT_SECONDS, Stream, greedy, until, whole
from tests.sglang.conftest import INTERVAL
from tests.sglang.helpers import settled_but
from tests.sglang.recorded import try_until
from tests.sglang.server import CpuServer

SETTLE_SECONDS = 0.3


async def test_hazard_01_an_abort_after_a_retract_loses_less_than_an_interval(
    engine: SGLangEngine,
) -> None:
    """An answer as a whole has only multiples of 50 tokens, while a stream has given the others
    before."""
    reference = await whole(engine, greedy(400))
    stream = await Stream(engine, greedy(ENDLESS)).start().reach(3 * INTERVAL)
    await engine.pause("retract")
    await asyncio.sleep(SETTLE_SECONDS)
    held = len(stream)
    await engine.abort(stream.request.request_id)
    await stream.end()
    assert stream.last.finish == "abort"
    assert len(stream) >= held >= 3 * INTERVAL
    assert stream.ids[:400] == reference.ids[: len(stream)]


async def test_hazard_02_ids_and_logprobs_stay_together_at_an_abort(engine: SGLangEngine) -> None:
    """The last event of an abort repeats an id, and tokens must stay with their logprobs. Requests
    are aborted while they run and while they are retracted, at many lengths."""
    reference = await whole(engine, greedy(800))
    for tokens in range(1, 12):
        retracted = tokens % 2 == 0
        stream = await Stream(engine, greedy(ENDLESS)).start().reach(tokens * 9)
        if retracted:
            await engine.pause("retract")
        await engine.abort(stream.request.request_id)
        await stream.end()
        if retracted:
            await engine.resume()
        known = min(len(stream), 800)
        assert len(stream.logprobs) == len(stream)
        assert stream.ids[:known] == reference.ids[:known]
        np.testing.assert_allclose(stream.logprobs[:known], reference.logprobs[:known], atol=1e-3)


async def test_hazard_03_a_refit_in_the_safe_order_spares_the_scheduler(
    engine: SGLangEngine, models: tuple[Path, Path]
) -> None:
    """A flush inside of an update kills the server if a request runs. In the safe order this never
    happens."""
    streams = [Stream(engine, greedy(ENDLESS)).start() for _ in range(4)]
    for version in (1, 2, 3):
        for stream in streams:
            await stream.reach(len(stream) + 20)
        await engine.pause("retract")
        await engine.flush()
        await engine.update_from_disk(models[version % 2], version)
        await engine.resume()
        assert await engine.version() == version
    for stream in streams:
        await stream.cut(len(stream) + 20)
        assert stream.last.spans is not None
        assert [span.version for span in stream.last.spans] == [0, 1, 2, 3]


async def test_hazard_04_a_held_request_is_aborted_for_good(
    engine: SGLangEngine, clean_server: CpuServer
) -> None:
    """SGLang loses an abort during the pause, and also every later abort of that request."""
    other = await Stream(engine, greedy(ENDLESS)).start().reach(1)
    await engine.pause("retract")
    aborted = Stream(engine, greedy(ENDLESS)).start()
    await asyncio.sleep(0)  # Asked for in one turn, they would share a body.
    kept = Stream(engine, greedy(30)).start()
    await asyncio.sleep(SETTLE_SECONDS)
    await engine.abort(aborted.request.request_id)
    await aborted.end()
    assert aborted.last.finish == "abort"
    assert len(aborted) == 0
    assert aborted.last.spans == ()
    assert not kept.chunks
    await engine.resume()
    assert len(await kept.end()) == 30
    await settled_but(clean_server.url, other)


async def test_hazard_05_an_abort_under_in_place_takes_effect_after_resume(
    engine: SGLangEngine, clean_server: CpuServer
) -> None:
    """The request waits in the paused batch. It ends at the next step and not before."""
    other = await Stream(engine, greedy(ENDLESS)).start().reach(1)
    stream = await Stream(engine, greedy(ENDLESS)).start().reach(20)
    await engine.pause("in_place")
    await engine.abort(stream.request.request_id)
    await asyncio.sleep(2 * SETTLE_SECONDS)
    assert not stream.done
    await engine.resume()
    await stream.end()
    assert stream.last.finish == "abort"
    await settled_but(clean_server.url, other)


async def test_hazard_06_a_paused_server_still_answers_us(
    engine: SGLangEngine, clean_server: CpuServer
) -> None:
    """`/health` hangs during a pause. The adapter never asks it, so opening and asking for the
    version work."""
    assert await engine.is_paused() is False
    await engine.pause("retract")
    assert await engine.is_paused() is True
    other = SGLangEngine(clean_server.url, limits=HttpLimits(control_timeout=WAIT_SECONDS))
    await other.open()
    assert other.capabilities == engine.capabilities
    assert await other.version() == 0
    await other.close()


async def test_hazard_08_an_update_outside_a_pause_waits_and_is_bounded(
    engine: SGLangEngine, clean_server: CpuServer, models: tuple[Path, Path]
) -> None:
    """The server lets the update wait for every running request, and the caller's timeout ends the
    wait."""
    hasty = SGLangEngine(clean_server.url, limits=HttpLimits(update_timeout=1.0))
    await hasty.open()
    stream = await Stream(engine, greedy(ENDLESS)).start().reach(1)
    with pytest.raises(ControlTimeout, match="update_weights_from_disk"):
        await hasty.update_from_disk(models[0], 5)
    assert not stream.done
    await engine.abort(stream.request.request_id)
    await stream.end()

    async def updated() -> bool:
        return await engine.version() == 5

    await until(updated)
    await hasty.close()


async def test_hazard_09_a_stream_that_is_left_leaves_no_zombie(
    engine: SGLangEngine, clean_server: CpuServer
) -> None:
    """A stream is cancelled once, or again while it aborts its request on the server. In both cases
    the server stops decoding."""
    other = await Stream(engine, greedy(ENDLESS)).start().reach(1)
    streams = [await Stream(engine, greedy(ENDLESS)).start().reach(1) for _ in range(4)]
    tasks = [stream.task for stream in streams if stream.task is not None]
    for task in tasks:
        task.cancel()
    await asyncio.sleep(0)
    for task in tasks[:2]:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    await settled_but(clean_server.url, other)


async def test_hazard_10_the_stream_is_incremental_at_our_interval(engine: SGLangEngine) -> None:
    """The cost of cumulative streams grows with the square of the length. The server's settings
    tell the form of its streams."""
    assert engine.facts.incremental is True
    total = 1 + 3 * INTERVAL + 5
    stream = await whole(engine, greedy(total))
    *ends, last = accumulate(len(chunk.token_ids) for chunk in stream.chunks)
    # The server sends the first token at once and then every interval. A busy one sends several of
    # these in one event, the first among them.
    assert {end % INTERVAL for end in ends} <= {1}
    assert last == total


async def test_hazard_11_a_duplicate_id_is_rejected_and_spares_the_first(
    engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rejected call must not abort the request that has this id. SGLang itself aborts it two
    seconds after the rejected answer has ended, if it still runs."""
    aborted: list[str] = []

    async def abort(request_id: str) -> None:
        aborted.append(request_id)

    stream = await Stream(engine, greedy(ENDLESS)).start().reach(1)
    with monkeypatch.context() as patched:
        patched.setattr(engine, "_abort_quietly", abort)
        with pytest.raises(EngineRejected, match="Duplicate request ID") as caught:
            await whole(engine, greedy(10, request_id=stream.request.request_id))
    assert caught.value.status == 400
    assert aborted == []
    await engine.abort(stream.request.request_id)
    await stream.end()


async def test_hazard_12_a_cancelled_call_can_be_repeated_and_a_left_pause_is_found(
    engine: SGLangEngine,
) -> None:
    """The state after a cancelled call can be seen, and one resume ends a pause that was left."""
    for call in (engine.pause("retract"), engine.resume()):
        task = asyncio.ensure_future(call)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await engine.pause("retract")
    assert await engine.is_paused() is True
    await engine.resume()
    assert await engine.is_paused() is False
    assert len(await whole(engine, greedy(10))) == 10


async def test_hazard_13_no_timeout_and_no_pool_stop_a_long_tail(
    clean_server: CpuServer,
) -> None:
    """The pause is longer than every control timeout, and there are more streams than the 100 of
    aiohttp's pool."""
    # A busy machine may need seconds for a call.
    seconds = 10.0
    limits = HttpLimits(control_timeout=seconds, connect_timeout=seconds)
    engine = SGLangEngine(clean_server.url, limits=limits)
    await engine.open()

    async def once(_: int) -> bool:
        """Whether the last stream was paused; on a busy machine it may end before the pause."""
        streams = [Stream(engine, greedy(60)).start() for _ in range(120)]
        await until(lambda: len(streams[0]) > 0)
        await engine.pause("retract")
        is_held = not streams[-1].done
        if is_held:
            await asyncio.sleep(1.2 * seconds)
        await engine.resume()
        assert [len(await stream.end()) for stream in streams] == [60] * 120
        return is_held

    await try_until(once, bool, "the last stream ended before the pause")
    await engine.close()
