"""Tests what the adapter refuses, and how it reports a real server's refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from aprilsched import Prompt, RolloutScheduler, SamplingParams, SchedulerConfig, SGLangFleet, Turn
from aprilsched.errors import EngineError, EngineProtocolError, EngineRejected, TurnRefused
from aprilsched.kernel.engines.http import HttpLimits
from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.testing.contract import ENDLESS, PROMPT, Stream, greedy, whole
from tests.sglang.server import CpuServer


async def test_a_token_outside_of_the_vocabulary_is_refused_before_it_kills(
    engine: SGLangEngine,
) -> None:
    """SGLang looks it up in its embedding and crashes (0.5.21 and 0.5.23)."""
    for token, fine in ((511, True), (512, False), (2**31 - 1, False)):
        prompt = np.append(PROMPT, np.int32(token)).astype(np.int32)
        if fine:
            assert len(await whole(engine, greedy(3, prompt=prompt))) == 3
            continue
        with pytest.raises(EngineRejected, match="the model knows 512"):
            await whole(engine, greedy(3, prompt=prompt))


async def test_a_prompt_beyond_the_context_is_a_rejection_and_no_interruption(
    engine: SGLangEngine,
) -> None:
    """The error has the server's message, shortened. An abort would be sent again forever."""
    prompt = np.tile(PROMPT, 300)
    with pytest.raises(EngineRejected, match="longer than the model's context length") as caught:
        await whole(engine, greedy(3, prompt=prompt))
    assert caught.value.status == 400


async def test_a_turn_beyond_the_context_costs_one_answer(clean_server: CpuServer) -> None:
    refused: list[str] = []

    async def episode(turn: Turn, prompt: Prompt) -> float:
        output = await turn.generate(PROMPT)
        context = np.concatenate((PROMPT, output.token_ids))
        if turn.index:
            with pytest.raises(TurnRefused) as caught:
                await turn.generate(np.concatenate((context, np.tile(PROMPT, 300))))
            refused.append(str(caught.value))
        await turn.generate(np.concatenate((context, PROMPT)))
        return 1.0

    config = SchedulerConfig(
        batch_groups=1,
        group_size=3,
        over_provision=1.0,
        sampling=SamplingParams(max_new_tokens=4, ignore_eos=True),
    )
    fleet = SGLangFleet([clean_server.url])
    async with RolloutScheduler(
        fleet, [Prompt(input_ids=PROMPT)], episode=episode, config=config
    ) as rollouts:
        batch = await rollouts.next_batch()
        assert not rollouts.state.in_flight.ledger.total
    assert [rollout.turns for rollout in batch.rollouts] == [2, 2, 2]
    assert len(refused) == 2
    assert all("longer than the model's context length" in each for each in refused)


@pytest.mark.parametrize("unknown", [True, False])
async def test_a_request_that_cannot_be_served_leaves_those_of_its_body_alone(
    engine: SGLangEngine, unknown: bool
) -> None:
    """One is longer than the context, or has a parameter that SGLang does not know: it refuses the
    body, or answers with an empty stream."""
    bad = greedy(3, prompt=PROMPT if unknown else np.tile(PROMPT, 300))
    if unknown:
        sampling = replace(bad.sampling, extra={"no_such_parameter": 1})
        bad = msgspec.structs.replace(bad, sampling=sampling)
    streams = [Stream(engine, each).start() for each in (greedy(20), bad, greedy(30))]
    with pytest.raises(EngineError):
        await streams[1].end()
    for stream in (streams[0], streams[2]):
        await stream.end()
        assert len(stream) == stream.request.sampling.max_new_tokens


async def test_a_checkpoint_that_cannot_be_loaded_is_rejected_and_changes_nothing(
    engine: SGLangEngine, tmp_path: Path
) -> None:
    """The engine continues under its old version."""
    reference = await whole(engine, greedy(20))
    await engine.pause("retract")
    with pytest.raises(EngineRejected):
        await engine.update_from_disk(tmp_path / "nothing", 9)
    await engine.resume()
    assert await engine.version() == 0
    assert (await whole(engine, greedy(20))).ids == reference.ids


async def test_an_answer_over_the_limit_is_a_protocol_error(clean_server: CpuServer) -> None:
    """A faulty server cannot fill the memory."""
    engine = SGLangEngine(clean_server.url, limits=HttpLimits(max_answer_bytes=2000))
    with pytest.raises(EngineProtocolError, match="raise max_answer_bytes"):
        await engine.open()


async def test_closing_ends_what_is_being_read(clean_server: CpuServer) -> None:
    """A reader of a closed engine gets an error and does not wait forever."""
    engine = SGLangEngine(clean_server.url)
    await engine.open()
    stream = await Stream(engine, greedy(ENDLESS)).start().reach(1)
    await engine.close()
    with pytest.raises(EngineError, match="was closed while it generated"):
        await stream.end()
    with pytest.raises(EngineError, match="is not open"):
        await engine.pause("retract")
