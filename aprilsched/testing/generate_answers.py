"""Builds the answers of /generate from chunks, with ``meta_info`` in SGLang's names."""

from __future__ import annotations

import asyncio
from typing import Any

from aprilsched.engines.base import Chunk
from aprilsched.serving.answers import Event, finish_reason, token_logprobs
from aprilsched.testing.served import Call, ServedRequests

__all__ = ["Answer"]


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
            "finish_reason": finish_reason(
                chunk.finish, tokens=self._tokens, last=ids[-1] if ids else 0
            ),
            "prompt_tokens": len(self._call.request.input_ids),
            "weight_version": self._served.label,
            "num_retractions": self._call.retractions,
        }
        if self._logprobs:
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = token_logprobs(ids, chunk.logprobs.tolist())
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
