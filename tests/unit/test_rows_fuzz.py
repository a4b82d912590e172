"""Tests that whatever a server sends with its tokens becomes rows of the wanted shape, or an error
of that server."""

from __future__ import annotations

import json
import random
import warnings
from base64 import b64encode
from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from aprilsched import SamplingParams
from aprilsched.errors import EngineProtocolError, EngineRejected
from aprilsched.kernel.engines.base import Chunk, GenerationRequest
from aprilsched.kernel.engines.sglang.chunks import ChunkAssembler
from aprilsched.kernel.engines.stream import ResponseReader
from aprilsched.kernel.engines.vllm.tokens_api import EventReader
from aprilsched.kernel.values.companions import Companion, top_logprobs
from tests.support.mutation import spoiled_answer
from tests.support.table import each_row

PROMPT, TOKENS, LAYERS, TOP_K = 4, 3, 3, 2
ROWS = PROMPT + TOKENS - 1
EXPERTS = Companion("routed_experts", "uint8", (LAYERS, TOP_K))
MASKS = Companion("sampling_mask", "uint16")
LIKELY = top_logprobs(2)


def request() -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        input_ids=np.arange(PROMPT, dtype=np.int32),
        sampling=SamplingParams(max_new_tokens=8, keep=("hidden",)),
        companions=((EXPERTS, 0), (MASKS, 0), (LIKELY, 0)),
    )


def npy(header: str, content: bytes, *, version: bytes = b"\1\0", size: int | None = None) -> str:
    """A .npy file in base64, whose header may be anything."""
    text = header.encode("utf-8", "replace")
    length = (len(text) if size is None else size) & 0xFFFF
    return b64encode(
        b"\x93NUMPY" + version + length.to_bytes(2, "little") + text + content
    ).decode()


def header(shape: tuple[int, ...], descr: str = "'|u1'", order: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}}}"


RIGHT = header((ROWS, LAYERS, TOP_K))
SIZE = ROWS * LAYERS * TOP_K

# fmt: off
LITERALS = st.sampled_from([
    "()", "-1", "-'a'", "(", ")", "1*2", "{[]: 1}", "[('a', '<i4')]", "'|O'", "'<i8'", "None",
    "True", "1e99", "(1, True)", "(-6, -3, 2)", "(2**99,)", "'|V0'", "...", "\0", "[" * 300,
    "(9999999999, 9999999999)", "(6, 3, 2)", "'|u1'", "'>u1'", "{}", "lambda: 0", "'\ud800'",
])
# fmt: on
REST = st.sampled_from(["", ",", ", 'x': 1", "}", "\n"])
HEADERS = st.one_of(
    st.text(max_size=40),
    st.tuples(LITERALS, LITERALS, LITERALS, REST).map(
        lambda parts: "{{'descr': {}, 'fortran_order': {}, 'shape': {}{}}}".format(*parts)
    ),
)


def sglang(**more: Any) -> dict[str, Any]:
    meta = {
        "id": "r",
        "completion_tokens": TOKENS,
        "finish_reason": {"type": "length", "length": TOKENS},
        "output_token_logprobs": [[-1.0, i, None] for i in range(TOKENS)],
        "output_token_logprobs_length": TOKENS,
        "weight_version": "0",
        "weight_versions": [{"version": "0", "start": 0, "end": TOKENS}],
        "output_token_sampling_mask": [[i] for i in range(TOKENS)],
        "output_token_sampling_mask_length": TOKENS,
        "output_top_logprobs": [[[-1.0, 1, None], [-2.0, 2, None]]] * TOKENS,
        "routed_experts": b64encode(bytes(4 * SIZE)).decode(),
        "hidden": [1.0],
    }
    return {"output_ids": [*range(TOKENS)], "meta_info": {**meta, **more}}


def vllm(**more: Any) -> dict[str, Any]:
    likely = [{"token_id": 1, "logprob": -1.0}, {"token_id": 2, "logprob": -2.0}]
    choice = {
        "index": 0,
        "token_ids": [*range(TOKENS)],
        "logprobs": {
            "content": [
                {"token_id": i, "logprob": -1.0, "top_logprobs": likely} for i in range(TOKENS)
            ]
        },
        "finish_reason": "length",
        "weight_versions": [{"version": "0", "start": 0, "end": TOKENS}],
        "routed_experts": npy(RIGHT, bytes(SIZE)),
        "sampling_mask": [[i] for i in range(TOKENS)],
    }
    return {"choices": [{**choice, **more}]}


def read(kind: type[ResponseReader], event: Any) -> Chunk | None:
    """The chunk of an event; None if it is the server's fault that there is none."""
    try:
        with warnings.catch_warnings():
            # Of an escape in the header, by the compiler that NumPy lets read it.
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            content = event if isinstance(event, bytes) else json.dumps(event).encode()
            chunk = kind("e", request()).feed(content)
    except (EngineProtocolError, EngineRejected):
        return None
    if chunk is not None:
        check(chunk)
    return chunk


def check(chunk: Chunk) -> None:
    tokens = len(chunk.token_ids)
    assert chunk.token_ids.dtype == np.int32
    assert (chunk.token_ids >= 0).all()
    assert np.isfinite(chunk.logprobs).all()
    for name, rows in (chunk.token_rows or {}).items():
        assert len(rows) == tokens, name
    for rows in (chunk.context_rows or {}).values():
        assert rows.values.shape[1:] == EXPERTS.shape
        assert rows.values.dtype == np.uint8
        assert len(rows) == max(0, PROMPT + tokens - 1)


def test_right_rows_are_read() -> None:
    for kind, event in ((ChunkAssembler, sglang()), (EventReader, vllm())):
        chunk = read(kind, event)
        assert chunk is not None
        assert chunk.context_rows is not None
        assert len(chunk.token_rows or ()) == 2


@example(header=header((ROWS, LAYERS, TOP_K), "()"), content=bytes(SIZE))
@example(header=header((ROWS, LAYERS, TOP_K), "-'a'"), content=bytes(SIZE))
@example(header="(" * 500, content=b"")
@example(header=RIGHT, content=bytes(SIZE))
@given(header=HEADERS, content=st.sampled_from([b"", bytes(SIZE), bytes(8 * SIZE)]))
def test_any_header_gives_rows_or_an_error_of_the_server(header: str, content: bytes) -> None:
    read(EventReader, vllm(routed_experts=npy(header, content)))


@given(
    version=st.binary(min_size=2, max_size=2),
    size=st.integers(0, 2**16 - 1),
    cut=st.integers(0, 200),
)
def test_any_part_of_a_file_gives_rows_or_an_error(version: bytes, size: int, cut: int) -> None:
    whole = npy(RIGHT, bytes(SIZE), version=version, size=size)
    read(EventReader, vllm(routed_experts=whole))
    read(EventReader, vllm(routed_experts=whole[:cut]))


@each_row(
    "shape",
    [
        (ROWS, 2 * LAYERS, TOP_K),
        (ROWS, TOP_K, LAYERS),
        (ROWS, LAYERS * TOP_K),
        (ROWS * 2, 3, 1),
        (ROWS * LAYERS, TOP_K),
        (SIZE,),
        (1, ROWS, LAYERS, TOP_K),
        (ROWS + 2, LAYERS, TOP_K),
    ],
    ids=str,
)
def test_rows_of_another_shape_are_an_error(shape: tuple[int, ...]) -> None:
    content = bytes(int(np.prod(shape)))
    assert read(EventReader, vllm(routed_experts=npy(header(shape), content))) is None


@each_row("layers", [1, 2, 6, 12])
@each_row("finish", ["length", "abort"])
def test_rows_of_another_number_of_layers_are_an_error(layers: int, finish: str) -> None:
    """SGLang sends numbers without a shape, so their count has to tell."""
    sent = b64encode(bytes(4 * ROWS * layers * TOP_K)).decode()
    event = sglang(routed_experts=sent, finish_reason={"type": finish})
    assert read(ChunkAssembler, event) is None


@each_row("mask", [[70000], [-1], [2**31], [1.5], [True], "ab", None, [[1]]])
def test_masks_that_do_not_fit_are_an_error(mask: Any) -> None:
    masks = [mask, [1], [2]]
    assert read(ChunkAssembler, sglang(output_token_sampling_mask=masks)) is None
    assert read(EventReader, vllm(sampling_mask=masks)) is None


@given(seed=st.integers(0, 2**64 - 1))
def test_a_spoiled_event_gives_a_chunk_or_an_error(seed: int) -> None:
    draw = random.Random(seed)
    for kind, event in ((ChunkAssembler, sglang()), (EventReader, vllm())):
        read(kind, spoiled_answer(draw, event))
