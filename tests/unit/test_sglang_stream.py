"""Tests decoding SGLang's stream events into chunks: every form, and what must be refused."""

from __future__ import annotations

import json
from base64 import b64encode
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from aprilsched.errors import EngineBusy, EngineError, EngineProtocolError, EngineRejected
from aprilsched.kernel.engines.base import Chunk, GenerationRequest
from aprilsched.kernel.engines.sglang.chunks import ChunkAssembler
from aprilsched.kernel.engines.sse import Allowance, EventSplitter, UnfinishedEvents
from aprilsched.kernel.engines.stream import read_chunks, version_number
from aprilsched.kernel.values.companions import Companion, Rows, top_logprobs
from aprilsched.types import ANSWER_BYTES, Media, SamplingParams, VersionSpan
from tests.support.table import each_row

MAX_TOKENS = 100
ROOM = 10_000
UNFINISHED = UnfinishedEvents("engine:1", 3 * ROOM)
ABORTED = {"type": "abort", "message": "Abort in waiting queue"}
LENGTH = {"type": "length", "length": 5}


def triples(start: int, end: int) -> list[list[Any]]:
    """Tokens 100 + i with logprob -i / 10."""
    return [[-position / 10, 100 + position, None] for position in range(start, end)]


def event(
    start: int,
    end: int,
    *,
    finish: dict[str, Any] | None = None,
    spans: list[tuple[str, int, int]] | None = None,
    **changed: Any,
) -> bytes:
    """An event that carries the tokens `start` to `end`, as 0.5.21 words it."""
    meta: dict[str, Any] = {
        "id": "r",
        "finish_reason": finish,
        "completion_tokens": end,
        "cached_tokens": 3,
        "weight_version": "default",
        "output_token_logprobs": triples(start, end),
        "output_token_logprobs_length": end,
    }
    if spans is not None:
        meta["weight_versions"] = [{"version": v, "start": s, "end": e} for v, s, e in spans]
    output_ids = changed.pop("output_ids", list(range(100 + start, 100 + end)))
    meta.update(changed)
    meta = {name: value for name, value in meta.items() if value is not ...}
    return json.dumps({"output_ids": output_ids, "meta_info": meta}).encode()


def asked(*companions: tuple[Companion, int], prompt: int = 4) -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        input_ids=np.arange(prompt, dtype=np.int32),
        sampling=SamplingParams(max_new_tokens=MAX_TOKENS),
        companions=companions,
    )


def feed(*payloads: bytes) -> list[Chunk]:
    assembler = ChunkAssembler("engine:1", asked())
    return [assembler.feed(payload) for payload in payloads]


def assert_tokens(chunks: list[Chunk], count: int) -> None:
    ids = np.concatenate([chunk.token_ids for chunk in chunks])
    logprobs = np.concatenate([chunk.logprobs for chunk in chunks])
    assert ids.dtype == np.int32
    assert logprobs.dtype == np.float32
    assert ids.tolist() == list(range(100, 100 + count))
    np.testing.assert_allclose(logprobs, -np.arange(count) / 10, rtol=1e-6)


def test_labels_may_count_from_another_version_than_0() -> None:
    assembler = ChunkAssembler("engine:1", asked(), version_of=partial(version_number, first=40))
    spans = [("default", 0, 2), ("7", 2, 5)]
    chunks = [
        assembler.feed(event(0, 1, weight_version="1")),
        assembler.feed(event(1, 5, finish=LENGTH, spans=spans)),
    ]
    assert chunks[0].label == 41
    assert chunks[1].spans is not None
    assert [(span.version, span.end) for span in chunks[1].spans] == [(40, 2), (47, 5)]


def test_events_without_a_logprob_count_read_the_same() -> None:
    """Before 0.5.19 there is neither a count of the logprobs nor a report of the spans."""
    old: dict[str, Any] = {"output_token_logprobs_length": ...}
    chunks = feed(event(0, 1, **old), event(1, 4, **old), event(4, 5, finish=LENGTH, **old))
    assert_tokens(chunks, 5)
    assert chunks[-1].spans is None


def test_an_abort_in_the_queue_repeats_the_last_id_and_gives_nothing_new() -> None:
    """Hazard 2: there is one output id more than tokens, with the whole list of logprobs."""
    last = event(0, 3, finish=ABORTED, spans=[("7", 0, 3)], output_ids=[102])
    chunks = feed(event(0, 1), event(1, 3), last)
    assert_tokens(chunks, 3)
    assert chunks[-1].finish == "abort"
    assert len(chunks[-1].token_ids) == 0
    assert chunks[-1].spans == (VersionSpan(version=7, start=0, end=3),)


def test_an_abort_joined_with_a_pending_event_keeps_ids_and_logprobs_together() -> None:
    """The server joins [103, 104] with the repeat [104]: paired by position, all would shift."""
    last = event(
        0,
        5,
        finish=ABORTED,
        spans=[("7", 0, 5)],
        output_ids=[103, 104, 104],
        output_token_logprobs=[*triples(3, 5), *triples(0, 5)],
    )
    assert_tokens(feed(event(0, 3), last), 5)


def test_an_abort_with_fewer_logprobs_than_tokens_keeps_the_common_length() -> None:
    last = event(
        0, 5, finish=ABORTED, spans=[("7", 0, 5)], output_token_logprobs=triples(0, 4),
        output_token_logprobs_length=4,
    )  # fmt: skip
    chunks = feed(event(0, 2), last)
    assert_tokens(chunks, 4)
    assert chunks[-1].spans == (VersionSpan(version=7, start=0, end=4),)


def test_an_abort_before_the_first_token_is_empty() -> None:
    (chunk,) = feed(event(0, 0, finish=ABORTED, output_token_logprobs=[], spans=[("7", 0, 0)]))
    assert chunk.finish == "abort"
    assert len(chunk.token_ids) == len(chunk.logprobs) == 0
    assert chunk.spans == ()


def test_an_abort_of_a_running_request_is_ours_although_it_names_its_missing_status() -> None:
    running = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert feed(event(0, 2, finish=running, spans=[("1", 0, 2)]))[0].finish == "abort"


@each_row(
    ("payload", "why"),
    [
        (event(0, 2, output_token_logprobs=...), "sent 0 logprobs where 2 were missing"),
        (event(0, 2, output_token_logprobs=[]), "sent 0 logprobs where 2 were missing"),
        (event(0, 2, output_token_logprobs=triples(1, 2)), "every token needs one"),
        (event(0, 2, output_token_logprobs_length=1), "sent 1 logprobs for 2 tokens"),
        (event(0, 2, output_ids=[100]), "not the tokens of its logprobs"),
        (event(0, 2, output_ids=[100, 7]), "not the tokens of its logprobs"),
        (event(0, 1, output_token_logprobs=[[None, 100, None]]), "cannot be read"),
        (event(0, 1, output_token_logprobs=[[-1.0, -5, None]]), "cannot be read"),
        (event(0, 1, output_token_logprobs=[[-1.0, 2**31, None]]), "cannot be read"),
        (event(0, 1, output_token_logprobs=[[-1.0]]), "cannot be read"),
        (event(0, 1, output_token_logprobs=[[-1e39, 100, None]]), "cannot be read"),
        (event(0, 1, output_token_logprobs=[[0.5, 100, None]]), "cannot be read"),
        (event(0, 1, output_token_logprobs=[[-1.0, 100, {}]]), "cannot be read"),
        (event(0, 1, completion_tokens=-1), "cannot be read"),
        (event(0, 1, completion_tokens=2**31), "cannot be read"),
        (event(0, 1).replace(b"100", b"1" * 5000), "cannot be read"),
        (event(0, 1, output_token_logprobs_length=2**63), "cannot be read"),
        (event(0, 1, cached_tokens=-1), "cannot be read"),
        (event(0, 1, finish=LENGTH, spans=[("1", 0, 2**40)]), "cannot be read"),
        (event(0, 1, finish=LENGTH, spans=[("9" * 5000, 0, 1)]), "cannot be read"),
        (event(0, 101), "sent 101 tokens where 100 were asked for"),
        (event(0, 0, completion_tokens=2**31 - 1), "where 100 were asked for"),
        (b'{"meta_info": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "cannot be read"),
        (b'{"unknown": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "cannot be read"),
        (b'{"error": {"message": "\xff"}}', "cannot be read"),
        (event(0, 1, completion_tokens=...), "cannot be read"),
        (event(0, 2, finish={"type": "sideways"}, spans=[("1", 0, 2)]), "unknown reason"),
        (event(0, 2, finish=LENGTH, spans=[("1", 0, 1)]), "do not cover its 2 tokens"),
        (event(0, 2, finish=LENGTH, spans=[("1", 1, 2)]), "do not cover its 2 tokens"),
        (event(0, 2, finish=LENGTH, spans=[]), "do not cover its 2 tokens"),
        (b'{"output_ids": [1]}', "without meta_info"),
        (b'{"index": 1, "meta_info": {"completion_tokens": 0}}', "not one of a single response"),
        (b"{not json", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b'"text"', "cannot be read"),
    ],
)
def test_what_breaks_the_protocol_is_refused(payload: bytes, why: str) -> None:
    with pytest.raises(EngineProtocolError, match=why) as caught:
        feed(payload)
    assert caught.value.engine == "engine:1"


@each_row("finish", [None, LENGTH, ABORTED])
def test_a_count_that_runs_backwards_is_refused(finish: dict[str, Any] | None) -> None:
    with pytest.raises(EngineProtocolError, match="counts 2 tokens after it had sent 3"):
        feed(event(0, 3), event(0, 2, finish=finish, spans=[("1", 0, 3)]))


def test_an_unknown_reason_is_quoted_on_one_short_line() -> None:
    reason = {"type": "a\nb\x1b[2J" + "x" * 10**6}
    with pytest.raises(EngineProtocolError, match=r"reason 'a b\?\[2Jx") as caught:
        feed(event(0, 1, finish=reason, spans=[("1", 0, 1)]))
    assert len(str(caught.value)) < 400


@each_row("label", ["2147483648", "9" * 4000, "v7", "", "-1", "\u0663"])
def test_a_label_that_we_cannot_have_written_counts_as_version_0(label: str) -> None:
    (chunk,) = feed(event(0, 1, finish=LENGTH, spans=[(label, 0, 1)]))
    assert chunk.spans == (VersionSpan(version=0, start=0, end=1),)


def test_an_error_event_is_a_rejection_with_the_servers_words() -> None:
    payload = b'{"error": {"message": "Duplicate request ID detected: r", "code": 400}}'
    with pytest.raises(EngineRejected, match="Duplicate request ID") as caught:
        feed(payload)
    assert caught.value.status == 400


def test_an_abort_by_the_server_itself_is_a_rejection_and_no_interruption() -> None:
    failed = {"type": "abort", "message": "out of memory " * 99, "status_code": 500}
    with pytest.raises(EngineRejected, match="out of memory") as caught:
        feed(event(0, 0, finish=failed))
    assert caught.value.status == 500
    assert len(str(caught.value)) < 400


@each_row("tokens", [0, 3])
def test_an_abort_by_a_busy_server_keeps_its_tokens_and_versions(tokens: int) -> None:
    timed_out = {"type": "abort", "message": "waited too long " * 99, "status_code": 503}
    spans = [("4", 0, tokens)] if tokens else []
    (chunk,) = feed(event(0, tokens, finish=timed_out, spans=spans))
    assert chunk.finish == "abort"
    assert len(chunk.token_ids) == tokens
    assert [(s.version, s.end) for s in chunk.spans or ()] == ([(4, 3)] if tokens else [])
    assert chunk.busy is not None
    assert chunk.busy.status == 503
    assert "waited too long" in str(chunk.busy)
    assert len(str(chunk.busy)) < 400


def test_an_error_event_of_a_busy_server_means_busy() -> None:
    with pytest.raises(EngineBusy, match="queue is full"):
        feed(b'{"error": {"message": "The request queue is full.", "code": 503}}')


def test_lines_are_cut_anywhere() -> None:
    payloads = [event(0, 1), event(1, 3), b"[DONE]"]
    stream = b": a comment\r\n\r\nevent: x\n\n" + b"".join(b"data: %b\n\n" % p for p in payloads)
    for size in (1, 2, 7, 64, len(stream)):
        splitter = EventSplitter(Allowance("engine:1", "r", 10_000))
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert [payload for piece in pieces for payload in splitter.feed(piece)] == payloads


def test_a_line_of_megabytes_is_read_and_a_longer_one_refused() -> None:
    """A cumulative answer of a long response is one line, far beyond aiohttp's 128 KiB."""
    splitter = EventSplitter(Allowance("engine:1", "r", 4 * 2**20))
    piece = b"x" * 2**16
    assert splitter.feed(b"data: ") == []
    for _ in range(48):
        assert splitter.feed(piece) == []
    assert splitter.feed(b"\n\n") == [piece * 48]
    splitter.feed(b"data: " + piece * 15)
    with pytest.raises(EngineProtocolError, match="request r: sent more than 4194304 bytes"):
        splitter.feed(piece)


async def _read(parts: list[bytes]) -> list[Chunk]:
    """The chunks of a stream, whose parts are removed from the list as they are read."""

    async def read() -> bytes:
        return parts.pop(0) if parts else b""

    reader = read_chunks(
        read,
        Allowance("engine:1", "r", ROOM, UNFINISHED),
        ChunkAssembler("engine:1", asked()),
    )
    async with aclosing(reader) as chunks:
        return [chunk async for chunk in chunks]


async def test_a_stream_that_ends_early_is_an_error_that_counts_its_tokens() -> None:
    for rest in (b"", b"data: [DONE]\n\n"):
        with pytest.raises(EngineError, match="ended after 1 tokens"):
            await _read([b"data: " + event(0, 1) + b"\n\n", rest])


async def _refused(parts: list[bytes], why: str) -> int:
    """Number of parts that were read until the stream was refused."""
    left = list(parts)
    with pytest.raises(EngineProtocolError, match=why) as caught:
        await _read(left)
    assert caught.value.engine == "engine:1"
    assert UNFINISHED.size == 0
    return len(parts) - len(left)


@each_row(
    "junk",
    [
        b": a comment\n\n",
        b"\n",
        b"data: [DONE]\n\n",
        b"data: " + event(1, 1) + b"\n\n",
        b"data: " + event(0, 1) + b"\n\n",
        b"x",
        b"data: {",
    ],
)
async def test_what_no_token_accounts_for_is_cut_off(junk: bytes) -> None:
    """Comments, blank lines, events without new tokens, and an event that does not end."""
    parts = [b"data: " + event(0, 1) + b"\n\n", *[junk * 20] * 2000]
    asked = await _refused(parts, "beyond what its tokens account for; raise max_answer_bytes")
    assert sum(map(len, parts[:asked])) <= ROOM + len(parts[0]) + 20 * len(junk)


async def test_tokens_do_not_pay_for_whatever_comes_with_them() -> None:
    blown_up = [b"data: " + event(n, n + 1, junk="x" * 10_000) + b"\n\n" for n in range(MAX_TOKENS)]
    assert await _refused(blown_up, "beyond what its tokens account for") < 5


async def test_a_cumulative_answer_may_be_many_times_as_long_as_the_limit() -> None:
    parts = [b"data: " + event(0, n) + b"\n\n" for n in range(1, MAX_TOKENS)]
    parts.append(b"data: " + event(0, 100, finish=LENGTH, spans=[("1", 0, 100)]) + b"\n\n")
    assert sum(map(len, parts)) > 10 * ROOM
    assert_tokens(await _read(parts), 100)


async def test_streams_together_hold_no_more_than_their_server_may_have_unfinished() -> None:
    """Each of them is far below its own limit."""
    unfinished = UnfinishedEvents("engine:1", 3 * ROOM)
    splitters = [EventSplitter(Allowance("engine:1", "r", ROOM, unfinished)) for _ in range(4)]
    for splitter in splitters[:3]:
        splitter.feed(b"x" * (ROOM - 1))
    with pytest.raises(EngineProtocolError, match="raise max_unfinished_bytes"):
        splitters[3].feed(b"x" * ROOM)
    splitters[0].feed(b"\n")
    assert unfinished.size == 3 * ROOM - 2


EXPERTS = Companion("routed_experts", "uint8", (3, 2))
MASK = Companion("sampling_mask")


def encoded(rows: int, *, first: int = 0) -> str:
    """Rows of base64, of which row i has the value i."""
    values = np.repeat(np.arange(first, first + rows, dtype="<i4"), 6)
    return b64encode(values.tobytes()).decode()


@each_row("extra", [0, 1])
def test_routed_experts_come_with_the_last_event(extra: int) -> None:
    """At an abort a row more may come, of a token without a logprob."""
    assembler = ChunkAssembler("engine:1", asked((EXPERTS, 3), prompt=4))
    first = assembler.feed(event(0, 2))
    rows = encoded(5 + extra, first=3)
    ended = {"type": "abort", "message": "Abort"} if extra else LENGTH
    last = assembler.feed(event(2, 5, finish=ended, spans=[("0", 0, 5)], routed_experts=rows))
    assert first.context_rows is first.token_rows is last.token_rows is None
    assert last.context_rows is not None
    found = last.context_rows["routed_experts"].values
    assert found.dtype == np.uint8
    assert found[:, 0, 0].tolist() == [3, 4, 5, 6, 7]


@each_row(
    ("rows", "complaint"),
    [
        (b64encode(bytes(20)).decode(), "are not rows of uint8"),
        ("%%%", "are not rows of uint8"),
        (encoded(5, first=300), "do not fit uint8"),
    ],
)
def test_routed_experts_of_another_shape_are_refused(rows: str, complaint: str) -> None:
    assembler = ChunkAssembler("engine:1", asked((EXPERTS, 0)))
    with pytest.raises(EngineProtocolError, match=complaint):
        assembler.feed(event(0, 5, finish=LENGTH, spans=[("0", 0, 5)], routed_experts=rows))


@each_row("cumulative", [False, True])
def test_sampling_masks_come_with_their_tokens(cumulative: bool) -> None:
    def masks(start: int, end: int) -> dict[str, Any]:
        low = 0 if cumulative else start
        kept = [[100 + i, *range(i % 3)] for i in range(low, end)]
        return {
            "output_token_sampling_mask": kept,
            "output_token_sampling_mask_length": end,
        }

    assembler = ChunkAssembler("engine:1", asked((MASK, 0)))
    chunks = [
        assembler.feed(event(0, 1, **masks(0, 1))),
        assembler.feed(event(1, 4, **masks(1, 4))),
        assembler.feed(event(4, 5, finish=LENGTH, spans=[("0", 0, 5)], **masks(4, 5))),
    ]
    rows = [chunk.token_rows["sampling_mask"] for chunk in chunks if chunk.token_rows]
    found = [each.row(index).tolist() for each in rows for index in range(len(each))]
    assert found == [[100 + i, *range(i % 3)] for i in range(5)]


@each_row("cumulative", [False, True])
def test_likely_tokens_come_with_their_tokens(cumulative: bool) -> None:
    """A null logprob stands for -inf: its id cannot be sampled, and JSON has no infinity."""

    def likely(start: int, end: int) -> dict[str, Any]:
        low = 0 if cumulative else start
        rows = [[(-i / 10, 100 + i, None), (None, 7, None)] for i in range(low, end)]
        return {"output_top_logprobs": rows, "output_token_logprobs": triples(low, end)}

    assembler = ChunkAssembler("engine:1", asked((top_logprobs(2), 0)))
    joined = event(3, 5, finish=LENGTH, spans=[("0", 0, 5)], **likely(3, 5))
    fed = [event(0, 1, **likely(0, 1)), event(1, 3, **likely(1, 3)), joined]
    rows = Rows.join([(assembler.feed(each).token_rows or {})["top_logprobs"] for each in fed])
    ids, logprobs = rows.values[..., 0], rows.values[..., 1]
    assert ids.tolist() == [[100 + i, 7] for i in range(5)]
    np.testing.assert_allclose(logprobs, [[-i / 10, -np.inf] for i in range(5)], rtol=1e-6)


NOT_LIKELY = "top_logprobs that are not 2 for each of 2"


@each_row(
    ("companion", "rows", "complaint"),
    [
        (MASK, ..., "sampling masks that do not cover its tokens"),
        (top_logprobs(2), ..., NOT_LIKELY),
        (top_logprobs(2), [[]], NOT_LIKELY),
        (top_logprobs(2), [[[-1.0, 5, None]]] * 2, NOT_LIKELY),
    ],
)
def test_tokens_without_their_rows_are_refused(
    companion: Companion, rows: Any, complaint: str
) -> None:
    assembler = ChunkAssembler("engine:1", asked((companion, 0)))
    with pytest.raises(EngineProtocolError, match=complaint):
        assembler.feed(event(0, 2, output_top_logprobs=rows))


def test_what_a_request_keeps_comes_with_its_last_event() -> None:
    sampling = SamplingParams(
        max_new_tokens=MAX_TOKENS, keep=("hidden_states", "dp_rank", "large", "missing")
    )
    assembler = ChunkAssembler("engine:1", msgspec.structs.replace(asked(), sampling=sampling))

    assert assembler.feed(event(0, 2, dp_rank=1)).answer is None
    large = "x" * ANSWER_BYTES
    entries = {"hidden_states": [[0.5, 1]], "dp_rank": None, "large": large, "other": 1}
    answer = assembler.feed(event(2, 5, finish=LENGTH, spans=[("0", 0, 5)], **entries)).answer
    assert answer is not None
    assert answer.values == {"hidden_states": [[0.5, 1]], "dp_rank": None}
    assert answer.sizes == {"hidden_states": 10, "dp_rank": 4, "large": ANSWER_BYTES + 2}
    assert answer.left_out == ("large",)


def test_the_tokens_of_a_prompt_with_media_are_returned() -> None:
    with_media = msgspec.structs.replace(asked(), media=(Media("image", "a.png"),))
    for request, received in ((asked(), None), (with_media, 68)):
        assembler = ChunkAssembler("engine:1", request)
        assert assembler.feed(event(0, 2, prompt_tokens=68)).prompt_tokens == received
