"""Builds the answers of /generate from chunks: ``output_ids`` and ``meta_info`` in SGLang's names.

The items of a stream are events, and bytes that are not an event.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias

import msgspec

from aprilsched.engines.base import Chunk
from aprilsched.testing.served import Call, ServedRequests
from aprilsched.types import Float32Array, Int32Array

__all__ = ["DONE", "Answer", "Event", "Item", "framed"]

Event: TypeAlias = dict[str, Any]
Item: TypeAlias = Event | bytes

DONE = b"data: [DONE]\n\n"
"""The end of every stream."""


def framed(item: Item) -> bytes:
    """The bytes of `item` on the wire."""
    return item if isinstance(item, bytes) else b"data: " + msgspec.json.encode(item) + b"\n\n"


class Answer:
    """Makes the events of one response, and counts the tokens that they have carried."""

    def __init__(self, served: ServedRequests, call: Call, *, logprobs: bool) -> None:
        self._served = served
        self._call = call
        self._logprobs = logprobs
        self._tokens = 0
        self._began = asyncio.get_running_loop().time()

    def event(self, chunk: Chunk) -> Event:
        """The event that carries the tokens of `chunk`, all of which are new."""
        ids: list[int] = chunk.token_ids.tolist()
        self._tokens += len(ids)
        meta: dict[str, Any] = {
            "id": self._call.request.request_id,
            "finish_reason": _finish_reason(chunk, self._tokens),
            "prompt_tokens": len(self._call.request.input_ids),
            "weight_version": self._served.label,
            "num_retractions": self._call.retractions,
        }
        if self._logprobs:
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = _triples(chunk.token_ids, chunk.logprobs)
            meta["output_token_logprobs_length"] = self._tokens
        meta["reasoning_tokens"] = 0
        meta["completion_tokens"] = self._tokens
        meta["cached_tokens"] = chunk.cached_tokens or 0
        if chunk.finish is not None:
            meta["weight_versions"] = self._served.labelled(chunk.spans or (), self._tokens)
            meta["e2e_latency"] = asyncio.get_running_loop().time() - self._began
        meta["cached_tokens_details"] = None
        meta["dp_rank"] = None
        return {"output_ids": ids, "meta_info": meta}


def _triples(ids: Int32Array, logprobs: Float32Array) -> list[tuple[float, int, None]]:
    return [(p, i, None) for p, i in zip(logprobs.tolist(), ids.tolist(), strict=True)]


def _finish_reason(chunk: Chunk, tokens: int) -> dict[str, Any] | None:
    match chunk.finish:
        case None:
            return None
        case "length":
            return {"type": "length", "length": tokens}
        case "stop":
            return {"type": "stop", "matched": int(chunk.token_ids[-1])}
        case "abort":
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
