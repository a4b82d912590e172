"""Tests the commands and the gateway on a real vLLM server."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest

from aprilsched import VLLMFleet
from aprilsched.agents.chat.tokenizer import load_tokenizer
from aprilsched.agents.gateway import Gateway, GatewaySettings
from tests.sglang.recorded import TOLERANCE, sequence_scores
from tests.support.tiny_tokenizer import bytes_tokenizer
from tests.vllm.server import VLLMServer

SECONDS = 600


async def command(*arguments: str) -> tuple[int | None, str, str]:
    """Run ``aprilsched ARGUMENTS``; returns exit code, stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "aprilsched", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(SECONDS):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.long
async def test_run_drives_a_server_and_updates_it(
    clean_server: VLLMServer, models: tuple[Path, Path], tmp_path: Path
) -> None:
    code, out, errors = await command(
        *("run", "--engine", f"vllm+{clean_server.url}", "--weights", str(models[1])),
        *[
            "--median",
            "20",
            "--sigma",
            "0.5",
            "--cap",
            "200",
            "--batches",
            "3",
            "--batch-groups",
            "3",
            "--group-size",
            "2",
        ],
        *f"--over-provision 2 --no-report --json --out {tmp_path / 'run'}".split(),
    )
    assert code == 0, errors
    summary = json.loads(out)
    assert summary["rollouts"]["delivered"] == 3 * 3 * 2
    assert summary["rollouts"]["lost"] == summary["rollouts"]["duplicated"] == 0
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{clean_server.url}/weight_info") as answer,
    ):
        assert int((await answer.json())["weight_version"]) >= 2


@pytest.mark.long
async def test_a_server_under_a_wrong_name_is_refused_clearly(
    clean_server: VLLMServer, tmp_path: Path
) -> None:
    for urls, printed in (
        ([clean_server.url], "vllm+http://"),
        ([clean_server.url, f"vllm+{clean_server.url}"], "mixes vLLM and SGLang servers"),
    ):
        code, _, errors = await command(
            "run", "--engine", *urls, "--batches", "1", "--out", str(tmp_path / "run")
        )
        assert code != 0
        assert printed in errors
        assert errors.count("\n") == 1


@pytest.mark.long
@pytest.mark.parametrize("refits", [False, True])
async def test_the_doctor_passes_and_leaves_the_server_unchanged(
    clean_server: VLLMServer, models: tuple[Path, Path], refits: bool
) -> None:
    refit = ("--refit", str(models[1])) if refits else ()
    code, out, errors = await command("doctor", f"vllm+{clean_server.url}", "--json", *refit)
    found = {finding["check"]: finding for finding in json.loads(out)}
    assert code == 0, errors
    assert {name for name, finding in found.items() if finding["status"] == "warn"} == {
        "logprobs",
        *(() if refits else ("refit by its logprobs",)),
    }
    assert found["left as found"]["status"] == "pass"
    assert "running requests" in found["room"]["seen"]
    assert "speculation off" in found["room"]["seen"]
    if refits:
        seen = found["refit by its logprobs"]["seen"]
        before, again, other, back = seen.split(": ")[1].split(", ")
        assert before == again == back != other


async def generated(
    session: aiohttp.ClientSession, prompt: list[int], tokens: int, update: dict[str, str]
) -> tuple[list[int], list[float], list[dict[str, Any]]]:
    """Return ids, log-probabilities and spans of a response; request new weights at its first
    event."""
    params = {"max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params, "stream": True, "return_logprob": True}
    ids: list[int] = []
    logprobs: list[float] = []
    spans: list[dict[str, Any]] = []
    loading: asyncio.Task[aiohttp.ClientResponse] | None = None
    async with session.post("/generate", json=body) as answer:
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            meta = event["meta_info"]
            ids += event["output_ids"]
            logprobs += [entry[0] for entry in meta["output_token_logprobs"]]
            spans = meta.get("weight_versions") or spans
            if loading is None:
                post = session.post("/update_weights_from_disk", json=update)
                loading = asyncio.create_task(post.__aenter__())
    assert loading is not None
    async with await loading as loaded:
        assert loaded.status == 200, await loaded.text()
    assert len(ids) == tokens
    return ids, logprobs, spans


@pytest.mark.shows("gateway", engine="vLLM")
async def test_a_request_through_the_gateway_outlives_new_weights(
    clean_server: VLLMServer, models: tuple[Path, Path], tmp_path: Path, vllm_python: Path
) -> None:
    """A client of SGLang's API learns which weights sampled each token."""
    prompt, label, number = [9, 8, 7, 6, 5], "default", 0
    fleet = VLLMFleet([clean_server.url], stream_interval=8)
    async with (
        Gateway(fleet, settings=GatewaySettings(port=0, drain_s=0)) as gateway,
        aiohttp.ClientSession(gateway.url) as session,
    ):
        while True:
            # On a busy machine a response may end before the new weights arrive.
            before, label = label, f"w{number}"
            order = (models[number % 2], models[(number + 1) % 2])
            update = {"model_path": str(order[1]), "weight_version": label}
            ids, logprobs, spans = await generated(session, prompt, 600 * 3**number, update)
            number += 1
            if len(spans) > 1 or number == 3:
                break
    assert [span["version"] for span in spans] == [before, label]
    response = [(np.array(prompt, np.int32), np.array(ids, np.int32))]
    ((old,), (new,)) = sequence_scores(order, response, tmp_path, python=vllm_python)
    at = spans[1]["start"]
    expected = np.concatenate([old[:at], new[at:]])
    assert np.abs(np.array(logprobs) - expected).max() < TOLERANCE


@pytest.mark.shows("gateway", engine="vLLM")
async def test_a_client_of_openai_gets_the_text_of_the_servers_tokens(
    clean_server: VLLMServer, tmp_path: Path
) -> None:
    """The server itself has no tokenizer and no OpenAI endpoints."""
    folder = bytes_tokenizer(tmp_path / "tokenizer")
    settings = GatewaySettings(port=0, drain_s=0, tokenizer=folder)
    greedy: dict[str, Any] = {
        "model": "any",
        "max_tokens": 40,
        "temperature": 0.0,
        "extra_body": {"ignore_eos": True, "return_token_ids": True},
    }
    async with (
        Gateway(VLLMFleet([clean_server.url]), settings=settings) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        calls: Any = client
        answer: Any = await calls.completions.create(prompt="How are you?", **greedy)
        printed = {"messages": [{"role": "user", "content": "How are you?"}], **greedy}
        with pytest.raises(openai.BadRequestError, match="vLLM ignores"):
            await calls.chat.completions.create(response_format={"type": "json_object"}, **printed)
    (choice,) = answer.choices
    assert len(choice.token_ids) == 40
    assert choice.text == load_tokenizer(folder).decode(choice.token_ids)
    assert [span["version"] for span in choice.weight_versions] == ["default"]
