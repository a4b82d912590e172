"""Tests speculative decoding on real vLLM servers: every token has its version and its logprob.

Two servers draft by n-grams and by a draft model, which has the weights of the target at first, so
that it is right. A wide batch has shorter drafts. Steps end in the middle of an accepted run if a
response does.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from aprilsched import SamplingParams
from aprilsched.kernel.core.policies.straggler import StragglerRule
from aprilsched.kernel.engines.base import GenerationRequest
from aprilsched.kernel.engines.server import Over, read_series
from aprilsched.kernel.engines.vllm import VLLMEngine
from aprilsched.testing.contract import PROMPT, Stream, whole
from tests.sglang.changing import run_through_deltas
from tests.sglang.held import Site, run_and_check
from tests.sglang.recorded import TOLERANCE, long_tail
from tests.vllm.conftest import fleet, reset
from tests.vllm.server import VLLMServer

DRAFTS = 4
"""Largest number of draft tokens of a step."""
LENGTHS: dict[str, object] = {
    "num_speculative_tokens": DRAFTS,
    # From the first batch to the last one.
    "num_speculative_tokens_per_batch_size": [[1, 4, DRAFTS], [5, 64, DRAFTS // 2]],
}
NGRAM: dict[str, object] = {
    **LENGTHS,
    "method": "ngram",
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


def draft_model(path: Path) -> dict[str, object]:
    return {**LENGTHS, "method": "draft_model", "model": str(path)}


@pytest.fixture(scope="module")
def servers(
    models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, VLLMServer]]:
    """A server of each kind; the draft model is a copy of the target."""
    kinds: dict[str, dict[str, object]] = {"ngram": NGRAM, "draft_model": draft_model(models[0])}
    folder = tmp_path_factory.mktemp("speculative")
    started = {
        kind: VLLMServer(
            models[0], folder / f"{kind}.txt", "--speculative-config", json.dumps(config)
        )
        for kind, config in kinds.items()
    }
    for server in started.values():
        server.start()
    try:
        for server in started.values():
            server.wait_ready()
        yield started
    finally:
        for server in started.values():
            server.stop()


@asynccontextmanager
async def opened(server: VLLMServer) -> AsyncGenerator[VLLMEngine]:
    engine = VLLMEngine(server.url, stream_interval=1)
    await engine.open()
    try:
        yield engine
    finally:
        await engine.close()


async def counted(server: VLLMServer) -> tuple[float, float]:
    """The numbers of steps with drafts and of accepted draft tokens since the server was started,
    for one sequence each."""
    names: dict[str, Over] = {
        "spec_decode_num_drafts_total": "sum",
        "spec_decode_num_accepted_tokens_total": "sum",
    }
    async with aiohttp.ClientSession(server.url) as session, session.get("/metrics") as answer:
        found = read_series(await answer.read(), names, program="vllm")
    drafts, accepted = found.values()
    return drafts, accepted


@pytest.mark.shows("speculation", engine="vLLM")
@pytest.mark.parametrize("kind", ["ngram", "draft_model"])
async def test_a_response_ends_in_the_middle_of_a_step(
    servers: Mapping[str, VLLMServer], clean_server: VLLMServer, kind: str
) -> None:
    """Each limit, stop token and minimum gives the tokens of a server without speculation."""
    server = servers[kind]
    before = await counted(server)
    async with opened(clean_server) as plain, opened(server) as engine:
        most = SamplingParams(max_new_tokens=60, temperature=0.0, ignore_eos=True)
        number = 0

        async def both(**changes: object) -> Stream:
            nonlocal number
            number += 1
            request = GenerationRequest(
                request_id=f"{number:032d}",
                input_ids=PROMPT,
                sampling=replace(most, **changes),  # type: ignore[arg-type]
            )
            expected, got = await whole(plain, request), await whole(engine, request)
            assert got.ids == expected.ids, changes
            assert got.last.finish == expected.last.finish
            assert np.abs(np.array(got.logprobs) - np.array(expected.logprobs)).max() < TOLERANCE
            assert got.last.spans is not None
            assert [(s.start, s.end) for s in got.last.spans] == [(0, len(got.ids))]
            return got

        long = await both()
        for limit in range(1, 13):
            assert len(await both(max_new_tokens=limit)) == limit
        for place in range(2, 12):
            stop = long.ids[place]
            stopped = await both(stop_token_ids=(stop,))
            assert stopped.ids == long.ids[: long.ids.index(stop) + 1]
            kept = await both(stop_token_ids=(stop,), min_new_tokens=20)
            assert len(kept) >= 20
            assert stop not in kept.ids[:20]
    drafts, accepted = (now - then for now, then in zip(await counted(server), before, strict=True))
    assert drafts
    # A draft model that is the target is right as often as the steps' numerics allow.
    assert kind == "ngram" or accepted > 3 * drafts


@pytest.mark.lacks(
    "draft refits", engine="vLLM", why="vLLM 0.32 loads an update into the target alone."
)
async def test_a_drafter_that_is_not_refitted_is_seldom_right(
    servers: Mapping[str, VLLMServer], models: tuple[Path, Path]
) -> None:
    """vLLM loads new weights into the target alone; the tokens stay those of the target."""
    server = servers["draft_model"]
    await reset(server.url, models[0])
    sampling = SamplingParams(max_new_tokens=120, temperature=0.0, ignore_eos=True)
    shares: list[float] = []
    async with opened(server) as engine:
        for version, model in enumerate((models[0], models[1], models[0]), start=1):
            await engine.pause("retract")
            await engine.flush()
            await engine.update_from_disk(model, version)
            await engine.resume()
            before = await counted(server)
            request = GenerationRequest(
                request_id=f"{version:032d}", input_ids=PROMPT, sampling=sampling
            )
            response = await whole(engine, request)
            drafts, accepted = (
                now - then for now, then in zip(await counted(server), before, strict=True)
            )
            shares.append(accepted / drafts)
            assert response.last.spans is not None
            assert [span.version for span in response.last.spans] == [version]
    assert shares[0] > 3
    assert shares[1] < 1
    assert shares[2] > 3
    await reset(server.url, models[0])


@pytest.mark.shows("abort", "retract", "in_place", "speculation", engine="vLLM")
@pytest.mark.long
@pytest.mark.parametrize("rule", ["retract", "in_place", "abort"])
@pytest.mark.parametrize("kind", ["ngram", "draft_model"])
async def test_every_token_is_of_the_version_that_it_was_given(
    servers: Mapping[str, VLLMServer],
    models: tuple[Path, Path],
    tmp_path: Path,
    vllm_python: Path,
    kind: str,
    rule: str,
) -> None:
    server = servers[kind]
    before = await counted(server)
    site = Site(
        [server.url], models, tmp_path, partial(reset, weights=models[0]), fleet, vllm_python
    )
    # Greedy responses repeat themselves, so that n-grams are right at times.
    prompts = long_tail(40, longest=400, every=2, temperature=0.0)
    await run_and_check(site, rule, batches=4, prompts=prompts)
    drafts, accepted = (now - then for now, then in zip(await counted(server), before, strict=True))
    assert accepted > drafts / (20 if kind == "ngram" else 4)


@pytest.mark.shows("abort", "retract", "in_place", "deltas on disk", "speculation", engine="vLLM")
@pytest.mark.long
@pytest.mark.parametrize("rule", ["retract", "in_place", "abort"])
async def test_drafted_tokens_are_exact_through_deltas(
    servers: Mapping[str, VLLMServer],
    models: tuple[Path, Path],
    tmp_path: Path,
    vllm_python: Path,
    rule: StragglerRule,
) -> None:
    """Together with the test of data-parallel ranks, at least 100,000 tokens."""
    server = servers["ngram"]
    before = await counted(server)
    site = Site(
        [server.url], models, tmp_path, partial(reset, weights=models[0]), fleet, vllm_python
    )
    await run_through_deltas(site, rule)
    drafts, accepted = (now - then for now, then in zip(await counted(server), before, strict=True))
    assert accepted > drafts / 20
