"""Tests what is read of a vLLM server's events besides tokens, and what a request asks for."""

from __future__ import annotations

import json
from base64 import b64encode
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from aprilsched import Media, SamplingParams
from aprilsched.errors import EngineProtocolError
from aprilsched.kernel.engines.base import GenerationRequest
from aprilsched.kernel.engines.vllm.tokens_api import EventReader, generate_body
from aprilsched.kernel.values.companions import Companion, routed_experts, top_logprobs
from tests.support.table import each_row

EXPERTS = routed_experts(layers=2, per_token=2, experts=8)
MASKS = Companion("sampling_mask")
PROMPT = 5


def request(start: int = 0, **changes: Any) -> GenerationRequest:
    given: dict[str, Any] = {
        "request_id": "r",
        "input_ids": np.arange(PROMPT, dtype=np.int32),
        "sampling": SamplingParams(max_new_tokens=9),
        "companions": ((EXPERTS, start), (MASKS, 0)),
    }
    return GenerationRequest(**{**given, **changes})


def npy(array: NDArray[Any]) -> str:
    file = BytesIO()
    np.save(file, array)
    return b64encode(file.getvalue()).decode()


def event(tokens: list[int], finish: str | None = None, **more: Any) -> bytes:
    content = [{"token_id": token, "logprob": -1.0} for token in tokens]
    choice = {"index": 0, "token_ids": tokens, "logprobs": {"content": content}}
    if finish is not None:
        choice |= {"finish_reason": finish, "weight_versions": []}
    return json.dumps({"choices": [{**choice, **more}]}).encode()


@each_row("start", [0, 3])
@each_row(("finish", "extra"), [("length", 0), ("abort", 0), ("abort", 1)])
def test_rows_cover_the_requested_tokens_except_the_last(
    start: int, finish: str, extra: int
) -> None:
    reader = EventReader("e", request(start))
    reader.feed(event([7, 8], sampling_mask=[[7], [8, 9]]))
    rows = np.arange((PROMPT + 3 - 1 + extra - start) * 4, dtype=np.uint8).reshape(-1, 2, 2) % 8
    versions = [{"version": "0", "start": 0, "end": 3}]
    last = reader.feed(
        event(
            [9],
            finish,
            sampling_mask=[[9, 1, 2]],
            routed_experts=npy(rows),
            weight_versions=versions,
        )
    )
    assert last is not None
    assert last.context_rows is not None
    assert last.token_rows is not None
    given = last.context_rows["routed_experts"].values
    assert given.dtype == np.uint8
    assert np.array_equal(given, rows[: PROMPT + 3 - 1 - start])
    assert last.token_rows["sampling_mask"].row(0).tolist() == [9, 1, 2]


@each_row(
    ("sent", "why"),
    [
        ("!", "routed_experts that are not rows"),
        (b64encode(b"no array").decode(), "routed_experts that are not rows"),
        (npy(np.zeros((5, 2, 2))), "of float64"),
        (npy(np.zeros((5, 2, 3), np.uint8)), "correct companions"),
        (npy(np.full((5, 2, 2), 300, np.uint16)), "do not fit uint8"),
        (npy(np.asfortranarray(np.zeros((5, 2, 2), np.uint8))), "of uint8"),
        (npy(np.zeros((5, 2, 2), np.uint8))[:-8], "bytes"),
    ],
)
def test_what_is_no_row_is_refused(sent: str, why: str) -> None:
    reader = EventReader("e", request())
    with pytest.raises(EngineProtocolError, match=why):
        reader.feed(event([], "abort", sampling_mask=None, routed_experts=sent))


def test_masks_that_do_not_cover_the_tokens_are_refused() -> None:
    reader = EventReader("e", request())
    with pytest.raises(EngineProtocolError, match="1 sampling masks for 2 tokens"):
        reader.feed(event([7, 8], sampling_mask=[[7]]))


def test_likely_tokens_are_the_likeliest_without_the_sampled_one_that_is_none() -> None:
    """vLLM puts the sampled token among them, and drops the last one for it."""
    asked = request(companions=((top_logprobs(2), 0),))
    assert generate_body(asked, stream_interval=8)["sampling_params"]["logprobs"] == 3
    of_7 = [(7, -9.0), (3, -0.5), (4, -1.5)], [(8, -0.25), (5, -2.0), (6, -3.0)]
    content = [
        {
            "token_id": row[0][0],
            "logprob": row[0][1],
            "top_logprobs": [{"token_id": i, "logprob": p, "rank": 1} for i, p in row],
        }
        for row in of_7
    ]
    reader = EventReader("e", asked)
    chunk = reader.feed(event([7, 8], logprobs={"content": content}))
    assert chunk is not None
    assert chunk.token_rows is not None
    rows = chunk.token_rows["top_logprobs"].values.tolist()
    assert rows == [[[3, -0.5], [4, -1.5]], [[8, -0.25], [5, -2.0]]]
    with pytest.raises(EngineProtocolError, match="not 2 for each of 1 tokens"):
        reader.feed(event([9]))


def test_a_request_asks_for_the_first_missing_row_and_brings_its_media() -> None:
    media = (Media("image", "http://host/a.png"), Media("image", b"bytes"))
    body = generate_body(request(4, media=media), stream_interval=8)
    assert body["sampling_params"]["routed_experts_prompt_start"] == 4
    assert body["token_ids"] == list(range(PROMPT))
    assert body["content_parts"] == [
        {"type": "image_url", "url": "http://host/a.png"},
        {"type": "image_url", "url": "data:image/png;base64,Ynl0ZXM="},
    ]
    assert not {"content_parts", "stream_options"} & set(
        generate_body(request(companions=()), stream_interval=8)
    )


def test_the_expanded_prompt_is_counted() -> None:
    reader = EventReader("e", request(companions=()))
    payload = json.loads(event([7]))
    chunk = reader.feed(json.dumps({**payload, "usage": {"prompt_tokens": 81}}).encode())
    assert chunk is not None
    assert chunk.prompt_tokens == 81


def test_a_continued_response_does_not_repeat_the_draws_of_its_seed() -> None:
    """vLLM starts a seed's sequence of draws again with every request."""
    sampling = SamplingParams(sampling_seed=42)
    contexts = [np.arange(1, n, dtype=np.int32) for n in (3, 4, 3)]
    first, continued, again = [
        generate_body(
            GenerationRequest(request_id="r", input_ids=ids, sampling=sampling), stream_interval=8
        )["sampling_params"]["seed"]
        for ids in contexts
    ]
    assert first == again != continued
    assert generate_body(request(), stream_interval=8)["sampling_params"]["seed"] is None
