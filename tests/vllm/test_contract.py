"""Tests that a real vLLM server keeps the engine contract, and how it differs from SGLang."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from aprilsched import SamplingParams
from aprilsched.errors import EngineProtocolError, EngineRejected, InconsistentWeights
from aprilsched.kernel.engines.base import GenerationRequest
from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.kernel.engines.vllm import VLLMEngine
from aprilsched.testing.contract import (
    ALL_CHECKS,
    ENDLESS,
    PROMPT,
    Check,
    Stream,
    Subject,
    greedy,
    until,
    whole,
)
from tests.sglang.recorded import TOLERANCE, sequence_scores, try_until
from tests.vllm.conftest import KEY
from tests.vllm.server import VLLMServer


@pytest.fixture
async def vllm(engine: VLLMEngine, models: tuple[Path, Path]) -> Subject:
    """The adapter on a real server."""

    async def busy() -> int:
        load = await engine.load()
        return load.running + load.queued

    return Subject(engine=engine, weights=models, busy=busy)


@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__)
async def test_vllm(vllm: Subject, check: Check) -> None:
    """The real server keeps the engine contract."""
    await check(vllm)


async def test_the_facts(engine: VLLMEngine, models: tuple[Path, Path]) -> None:
    facts, able = engine.facts, engine.capabilities
    assert facts.model_path == str(models[0])
    assert facts.label == "default"
    assert (facts.vocab_size, facts.context_tokens) == (512, 8192)
    assert facts.logprobs_mode == "raw_logprobs"
    assert (able.max_running_requests, able.ranks, able.adapters) == (64, 1, False)
    assert re.fullmatch(r"vLLM 0\.3[23]\.\d+", able.server)
    assert able.companions == {"top_logprobs"}
    assert not able.media


async def test_a_response_ends_at_the_context_and_at_the_end_token(engine: VLLMEngine) -> None:
    long = await whole(engine, greedy(30, prompt=np.full(8180, 5, np.int32)))
    assert (len(long), long.last.finish) == (12, "length")
    first = (await whole(engine, greedy(8))).ids
    sampling = SamplingParams(
        max_new_tokens=40, temperature=0.0, ignore_eos=True, stop_token_ids=(first[3],)
    )
    stopped = await whole(
        engine, GenerationRequest(request_id="1" * 32, input_ids=PROMPT, sampling=sampling)
    )
    assert stopped.ids == first[: first.index(first[3]) + 1]
    assert stopped.last.finish == "stop"


@pytest.mark.parametrize(
    ("ids", "sampling"),
    [
        ([600], SamplingParams(max_new_tokens=1)),
        ([5] * 9000, SamplingParams(max_new_tokens=1)),
        ([5], SamplingParams(max_new_tokens=1, temperature=0.7)),
        ([5], SamplingParams(max_new_tokens=1, extra={"regex": "a*"})),
    ],
    ids=[
        "a token that the model does not know",
        "a prompt that is too long",
        "a temperature",
        "a parameter in SGLang's name",
    ],
)
async def test_a_request_that_cannot_be_served_is_refused(
    engine: VLLMEngine, ids: list[int], sampling: SamplingParams
) -> None:
    request = GenerationRequest(
        request_id="2" * 32, input_ids=np.array(ids, np.int32), sampling=sampling
    )
    with pytest.raises(EngineRejected) as refused:
        await whole(engine, request)
    assert refused.value.status == 400
    assert len(await whole(engine, greedy(4))) == 4


async def test_a_failed_load_keeps_the_weights_and_every_request(
    engine: VLLMEngine, models: tuple[Path, Path], tmp_path: Path
) -> None:
    """After it vLLM has no weights, and its process would end at the next token."""
    reference = await whole(engine, greedy(300))
    for version, broken in enumerate((tmp_path / "missing", tmp_path / "truncated")):
        stream = await Stream(engine, greedy(ENDLESS)).start().reach(20)
        await engine.pause("retract")
        await engine.flush()
        if broken.name == "truncated":
            broken.mkdir()
            (broken / "config.json").write_bytes((models[1] / "config.json").read_bytes())
            whole_file = (models[1] / "model.safetensors").read_bytes()
            (broken / "model.safetensors").write_bytes(whole_file[: len(whole_file) // 2])
        with pytest.raises(EngineRejected):
            await engine.update_from_disk(broken, version + 1)
        assert await engine.version() == 0
        await engine.resume()
        await stream.cut(300)
        assert stream.ids[:300] == reference.ids
        assert stream.last.spans is not None
        assert {span.version for span in stream.last.spans} == {0}


async def test_weights_of_a_killed_loader_are_inconsistent(
    engine: VLLMEngine, models: tuple[Path, Path]
) -> None:
    """The load and its label are two calls, so a client may be killed between them."""
    label = engine.set_label

    async def killed(label_: str) -> None:
        if label_ == "7":
            raise asyncio.CancelledError
        await label(label_)

    engine.set_label = killed  # type: ignore[method-assign]
    await engine.pause("retract")
    with pytest.raises(asyncio.CancelledError):
        await engine.update_from_disk(models[1], 7)
    other = VLLMEngine(engine.address)
    await other.open()
    try:
        with pytest.raises(InconsistentWeights):
            await other.version()
        await other.update_from_disk(models[1], 8)
        assert await other.version() == 8
    finally:
        await other.close()


@pytest.mark.long
async def test_a_processed_logprob_is_that_of_the_sampled_distribution(
    clean_pair: tuple[VLLMServer, VLLMServer],
    models: tuple[Path, Path],
    tmp_path: Path,
    vllm_python: Path,
) -> None:
    """With a temperature and with the default of transformers; a key is required and sent."""
    async with aiohttp.ClientSession() as session:
        body = {"token_ids": [5], "sampling_params": {"max_tokens": 1}}
        url = f"{clean_pair[1].url}/inference/v1/generate"
        async with session.post(url, json=body) as answer:
            assert answer.status == 401
    engine = VLLMEngine(clean_pair[1].url, api_key=KEY)
    await engine.open()
    try:
        plain, warm = [
            await whole(
                engine,
                GenerationRequest(
                    request_id=f"{temperature:032}",
                    input_ids=PROMPT,
                    sampling=SamplingParams(
                        max_new_tokens=200, temperature=temperature, ignore_eos=True
                    ),
                ),
            )
            for temperature in (1.0, 0.5)
        ]
    finally:
        await engine.close()
    received = [(PROMPT, np.array(stream.ids, np.int32)) for stream in (plain, warm)]
    ((own, sharper),) = sequence_scores([models[0]], received, tmp_path, python=vllm_python)
    assert np.abs(plain.logprobs - own).max() < TOLERANCE
    # Halving the temperature doubles differences of logits, so likely tokens become likelier.
    assert warm.logprobs.mean() > sharper.mean() + 0.1


async def test_a_server_of_another_program_is_refused_in_one_sentence(
    clean_server: VLLMServer,
) -> None:
    for engine in (SGLangEngine(clean_server.url), VLLMEngine(f"{clean_server.url}/v1")):
        with pytest.raises(EngineProtocolError, match=r"does not answer .* like (SGLang|vLLM)"):
            await engine.open()


async def test_many_requests_pause_at_once_and_lose_nothing(engine: VLLMEngine) -> None:
    """More requests than the server runs at a time: waiting ones are paused too."""

    async def once(_: int) -> bool:
        """Whether the last request was paused; on a busy machine it may end before the pause."""
        streams = [
            Stream(engine, greedy(40, prompt=PROMPT + np.int32(number))).start()
            for number in range(300)
        ]
        await until(lambda: any(stream.chunks for stream in streams))
        await engine.pause("retract")
        assert await engine.is_paused()
        before = [-1]
        while (counts := [len(stream) for stream in streams]) != before:
            before = counts
            await asyncio.sleep(0.5)  # Tokens that were sent before the pause may arrive late.
        is_held = not streams[-1].done
        await engine.resume()
        for stream in streams:
            await stream.end()
        assert {(len(stream), stream.last.finish) for stream in streams} == {(40, "length")}
        return is_held

    await try_until(once, bool, "the last request ended before the pause")
