"""Tests clients that know nothing of this library, through a gateway in front of two real servers.

Weights that are very different are loaded through the gateway while the clients wait, and one of
the servers is killed. No client notices, and each token is proven under the weights of its version.
"""

# pyright: basic
# The clients have types of their own, without the fields that the gateway adds.
from __future__ import annotations

import asyncio
import importlib
import json
import shutil
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from openai import AsyncOpenAI

from aprilsched import SGLangFleet
from aprilsched.agents.chat.tokenizer import ModelTokenizer, load_tokenizer
from aprilsched.agents.gateway import Gateway, GatewaySettings
from aprilsched.testing.contract import until
from tests.sglang.conftest import ADMIN_KEY, INTERVAL
from tests.sglang.helpers import reset
from tests.sglang.recorded import TOLERANCE, sequence_scores, try_until
from tests.sglang.server import CpuServer, run_with_server_packages
from tests.support.slime_loop import arguments, write_prompts
from tests.support.slime_stand_in import ROOTS, trainer_modules
from tests.support.tiny_tokenizer import bytes_tokenizer

TOKENS = 1500
"""Tokens of a response, which lasts through all that a test does."""
LABELS = ["default", "one", "two", "three"]
"""The versions in their order; they have the weights of the two models in turn."""
TEXTS: Any = [{"role": "user", "content": "How are you, Zoë?"}]


@dataclass
class Received:
    """What a client received of one response."""

    prompt: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    likely: list[list[float]] = field(default_factory=list)
    text: str = ""
    spans: list[dict[str, Any]] = field(default_factory=list)
    exact: bool = False
    finish: str | None = None

    @property
    def labels(self) -> list[str]:
        return [span["version"] for span in self.spans]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bytes_tokenizer(tmp_path_factory.mktemp("tokenizer"), parses=True)


@pytest.fixture
def killed(clean_pair: tuple[CpuServer, CpuServer]) -> Iterator[CpuServer]:
    """A server that the test may kill; it is there again afterwards."""
    yield clean_pair[1]
    if not clean_pair[1].alive():
        clean_pair[1].start()
        clean_pair[1].wait_ready()


@asynccontextmanager
async def gateway_of(
    servers: Sequence[CpuServer], tokenizer: Path
) -> AsyncGenerator[tuple[Gateway, aiohttp.ClientSession]]:
    fleet = SGLangFleet(
        [server.url for server in servers], admin_key=ADMIN_KEY, stream_interval=INTERVAL
    )
    settings = GatewaySettings(port=0, drain_s=0, tokenizer=tokenizer)
    async with (
        Gateway(fleet, settings=settings) as gateway,
        aiohttp.ClientSession(gateway.url) as session,
    ):
        yield gateway, session


async def asked(session: aiohttp.ClientSession, call: str, **body: str) -> None:
    async with session.post(f"/{call}", json=body) as answer:
        assert answer.status == 200, await answer.text()


async def load(session: aiohttp.ClientSession, weights: Path, label: str) -> None:
    await asked(session, "update_weights_from_disk", model_path=str(weights), weight_version=label)


# --- the clients -------------------------------------------------------------------------------


async def streamed_completion(client: Any, received: list[Received]) -> None:
    """OpenAI's client with a stream of two choices."""
    stream = await client.completions.create(
        model="any",
        prompt="Once upon a time",
        n=2,
        max_tokens=TOKENS,
        logprobs=2,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    async for event in stream:
        for choice in event.choices:
            one = received[choice.index]
            one.prompt += choice.model_extra.get("prompt_token_ids", [])
            one.ids += choice.token_ids
            one.logprobs += choice.logprobs.token_logprobs
            one.likely += [list(row.values()) for row in choice.logprobs.top_logprobs]
            one.text += choice.text
            if choice.finish_reason:
                one.finish, one.spans = choice.finish_reason, choice.weight_versions
                one.exact = choice.weight_versions_exact


async def streamed_chat(client: Any, received: list[Received]) -> None:
    """OpenAI's client with a streamed chat."""
    stream = await client.chat.completions.create(
        model="any",
        messages=TEXTS,
        max_completion_tokens=TOKENS,
        logprobs=True,
        top_logprobs=2,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    async for event in stream:
        (choice,), (one,) = event.choices, received
        more = choice.model_extra
        one.prompt += more.get("prompt_token_ids", [])
        one.ids += more.get("token_ids", [])
        if choice.logprobs:
            one.logprobs += [each.logprob for each in choice.logprobs.content]
            one.likely += [
                [top.logprob for top in each.top_logprobs] for each in choice.logprobs.content
            ]
        if choice.finish_reason:
            one.finish, one.spans = choice.finish_reason, more["weight_versions"]
            one.exact = more["weight_versions_exact"]


async def whole_chat(client: Any, received: list[Received]) -> None:
    """OpenAI's client with a chat that is not streamed."""
    answer = await client.chat.completions.create(
        model="any",
        messages=TEXTS,
        max_completion_tokens=TOKENS,
        logprobs=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    (choice,), (one,) = answer.choices, received
    one.prompt, one.ids = choice.prompt_token_ids, choice.token_ids
    one.logprobs = [each.logprob for each in choice.logprobs.content]
    one.finish, one.spans = choice.finish_reason, choice.weight_versions
    one.exact = choice.weight_versions_exact


async def curl(url: str, received: list[Received]) -> None:
    """A plain curl that prints a stream."""
    (one,) = received
    one.prompt = [9, 8, 7, 6, 5]
    params = {"max_new_tokens": TOKENS, "ignore_eos": True}
    body = {"input_ids": one.prompt, "sampling_params": params, "stream": True}
    process = await asyncio.create_subprocess_exec(
        *("curl", "-sSN", "--fail", f"{url}/generate"),
        *("-d", json.dumps({**body, "return_logprob": True})),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    done = False
    async for line in process.stdout:
        if line.startswith(b"data: {"):
            event = json.loads(line.removeprefix(b"data: "))
            meta = event["meta_info"]
            one.ids += event["output_ids"]
            one.text += event["text"]
            one.logprobs += [logprob for logprob, *_ in meta["output_token_logprobs"]]
            if meta["finish_reason"]:
                one.finish, one.spans = meta["finish_reason"]["type"], meta["weight_versions"]
                one.exact = meta["weight_versions_exact"]
        done = line.startswith(b"data: [DONE]") or (done and not line.strip())
    assert await process.wait() == 0
    assert done


async def sglangs_client(
    url: str, tokenizer: ModelTokenizer, folder: Path, received: list[Received]
) -> None:
    """SGLang's language with its RuntimeEndpoint, in its own environment."""
    out = folder / "sgl.json"
    await asyncio.to_thread(run_with_server_packages, "sgl_client", url, out, TOKENS // 2)
    for one, answer in zip(received, json.loads(out.read_text()), strict=True):
        meta = answer["meta_info"]
        one.prompt = tokenizer.encode("Once upon a time")
        one.logprobs, one.ids = ([t[k] for t in meta["output_token_logprobs"]] for k in (0, 1))
        one.text, one.finish = answer["text"], meta["finish_reason"]["type"]
        one.spans, one.exact = meta["weight_versions"], meta["weight_versions_exact"]
    assert answer["streamed"] == answer["text"]
    assert answer["pieces"] > 3


# --- the tests ---------------------------------------------------------------------------------


def text_of(tokenizer: ModelTokenizer, received: Received) -> str:
    """The text of the tokens. Random tokens are often no characters, and then depend on the way in
    which they are decoded."""
    pieces = tokenizer.detokenizer(received.prompt, skip_special=True)
    return "".join([*map(pieces.push, received.ids), pieces.rest()])


def prove(received: Sequence[Received], models: tuple[Path, Path], folder: Path) -> None:
    """Check that each token's logprob is its score by the model of its version alone.

    A server that dies takes with it which tokens it had sampled before an update and sent after it.
    The response then reports that its versions are not exact, and these tokens, the first ones
    behind the border, are of the previous version.
    """
    prompts = [(np.array(t.prompt, np.int32), np.array(t.ids, np.int32)) for t in received]
    found = sequence_scores(models, prompts, folder)
    for index, one in enumerate(received):
        of = np.concatenate(
            [
                np.full(span["end"] - span["start"], LABELS.index(span["version"]) % 2)
                for span in one.spans
            ]
        )
        at = np.arange(len(one.ids))
        assert len(of) == len(at) == len(one.logprobs)
        assert len(one.likely) in (0, len(at))
        # No other token is likelier than the likeliest, and the sampled one has its own logprob.
        for own, likely in zip(one.logprobs, one.likely, strict=False):
            assert own <= max(likely)
            assert own in likely or own < min(likely)
        both = np.abs(np.stack([own[index] for own in found]) - one.logprobs)
        wrong = np.flatnonzero(both[of, at] >= TOLERANCE)
        if not one.exact:
            for span in one.spans:
                late = wrong[(wrong >= span["start"]) & (wrong < span["end"])]
                assert late.tolist() == list(range(span["start"], span["start"] + len(late)))
                assert not len(late) or span["start"]
            assert (both[1 - of, at][wrong] < TOLERANCE).all()
        else:
            assert not len(wrong)
        assert np.median(both[1 - of, at]) > 0.5


@pytest.mark.shows("lost engines", "gateway", engine="SGLang")
@pytest.mark.long
async def test_no_client_notices_three_updates_and_the_death_of_a_server(
    clean_pair: tuple[CpuServer, CpuServer],
    killed: CpuServer,
    models: tuple[Path, Path],
    tokenizer_folder: Path,
    tmp_path: Path,
):
    tokenizer = load_tokenizer(tokenizer_folder)

    async def once(_: int) -> list[list[Received]]:
        if not killed.alive():
            killed.start()
            await asyncio.to_thread(killed.wait_ready)
        for server, key in zip(clean_pair, (None, ADMIN_KEY), strict=True):
            await reset(server.url, models[0], key)
        completion, chat, whole, curled, own = (
            [Received() for _ in range(n)] for n in (2, 1, 1, 1, 2)
        )
        async with gateway_of(clean_pair, tokenizer_folder) as (gateway, session):
            url = gateway.url
            client: Any
            async with (
                AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
                asyncio.TaskGroup() as group,
            ):
                # Otherwise some responses may end before the last client starts.
                await asked(session, "pause_generation", mode="retract")
                group.create_task(streamed_completion(client, completion))
                group.create_task(streamed_chat(client, chat))
                group.create_task(whole_chat(client, whole))
                group.create_task(curl(url, curled))
                group.create_task(sglangs_client(url, tokenizer, tmp_path, own))
                watched = [*completion, *chat, *curled]
                started = [*watched, *whole, own[0]]
                await until(lambda: len(gateway.service.responses) == len(started), seconds=60)
                await asked(session, "continue_generation")
                for number, label in enumerate(LABELS[1:], start=1):
                    seen = [len(one.ids) for one in watched]
                    await until(
                        lambda seen=seen: all(
                            len(one.ids) > before or one.finish
                            for one, before in zip(watched, seen, strict=True)
                        )
                    )
                    if number == 2:
                        killed.kill()
                    await load(session, models[number % 2], label)
            async with session.get("/server_info") as answer:
                engines = (await answer.json())["gateway"]["engines"]
            assert [engine["mode"] for engine in engines].count("running") == 1
            assert len(gateway.service.responses) == 0
        return [completion, chat, whole, curled, own]

    def outlived(received: list[list[Received]]) -> bool:
        everything = [one for each in received for one in each]
        return any(len(one.labels) >= 3 for one in everything) and any(
            one.exact and len(one.labels) > 1 for one in everything
        )

    received = await try_until(once, outlived, "the responses were too short")
    completion, _, _, curled, own = received
    everything = [one for each in received for one in each]
    for one in everything:
        assert one.finish == "length"
        assert len(one.ids) == TOKENS or one in own
        assert one.spans[-1]["end"] == len(one.ids)
    for one in (*completion, *curled, *own):
        assert one.text == text_of(tokenizer, one)
    prove(everything, models, tmp_path)


@pytest.mark.shows("gateway", engine="SGLang")
@pytest.mark.skipif(ROOTS["slime"] is None, reason="set SLIME_ROOT to a checkout of slime")
async def test_slimes_own_rollout_with_its_own_abort(
    clean_pair: tuple[CpuServer, CpuServer],
    models: tuple[Path, Path],
    tokenizer_folder: Path,
    tmp_path: Path,
):
    """slime's rollout function takes the gateway for its router, carries what it has aborted over
    the updates of the weights, and is not changed in anything."""
    shutil.copytree(models[0], tmp_path / "model")
    shutil.copytree(tokenizer_folder, tmp_path / "model", dirs_exist_ok=True)
    write_prompts(tmp_path)
    async with gateway_of(clean_pair, tokenizer_folder) as (gateway, session):
        host, port = gateway.url.removeprefix("http://").split(":")
        args = arguments(
            tmp_path,
            [],
            ci_test=False,
            over_sampling_batch_size=6,
            rollout_max_response_len=400,
            rollout_num_engines=2,
            # Responses have 50 tokens on average, and some have hundreds.
            rollout_stop_token_ids=list(range(10)),
            sglang_dp_size=None,
            sglang_router_ip=host,
            sglang_router_port=int(port),
            sglang_server_concurrency=32,
            use_distributed_post=False,
        )
        given: list[Any] = []
        with trainer_modules("slime"):
            rollout = importlib.import_module("slime.rollout.sglang_rollout")
            importlib.import_module("slime.utils.http_utils").init_http_client(args)
            data = importlib.import_module("slime.rollout.data_source")
            source = data.RolloutDataSourceWithBuffer(args)
            for step in range(20):
                label = str(step)
                # The order of slime's own update, with the pause that ends all responses.
                for path, body in (
                    ("pause_generation", {}),
                    ("flush_cache", None),
                    (
                        "update_weights_from_disk",
                        {"model_path": str(models[step % 2]), "weight_version": label},
                    ),
                    ("continue_generation", {}),
                ):
                    async with session.post(f"/{path}", json=body) as answer:
                        assert answer.status == 200, await answer.text()
                output = await asyncio.to_thread(rollout.generate_rollout, args, step, source)
                given += [sample for group in output.samples for sample in group]
                assert len(gateway.service.responses) == 0
                if step > 2 and any(len(each.weight_versions) > 1 for each in given):
                    break
            client = importlib.import_module("slime.utils.http_utils")._http_client
            await asyncio.to_thread(rollout.run, client.aclose())
    numbers = [sample.index for sample in given]
    assert len(set(numbers)) == len(numbers) >= 8 * 4
    assert any(len(each.weight_versions) > 1 for each in given), "nothing was carried over"
    parts = [
        (np.array(s.tokens[: -s.response_length], np.int32), s.tokens[-s.response_length :])
        for s in given
    ]
    found = sequence_scores(models, [(a, np.array(b, np.int32)) for a, b in parts], tmp_path)
    for index, sample in enumerate(given):
        both = np.abs(np.stack([own[index] for own in found]) - sample.rollout_log_probs)
        assert both.min(axis=0).max() < TOLERANCE
        # Its tokens come from the weights of its versions in their order. A part that was aborted
        # at once has a version and no tokens.
        versions = iter([int(version) % 2 for version in sample.weight_versions])
        clear = both.max(axis=0) > 100 * TOLERANCE
        runs = [model for model, _ in groupby(both.argmin(axis=0)[clear].tolist())]
        assert all(model in versions for model in runs)
