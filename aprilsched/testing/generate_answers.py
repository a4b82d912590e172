"""Builds the responses of /generate from chunks, with ``meta_info`` in SGLang's names."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from typing import Any

from aprilsched.agents.dialects.sglang import finish_reason, likely_triples, token_logprobs
from aprilsched.agents.serving.streams import Event
from aprilsched.kernel.engines.base import Chunk
from aprilsched.kernel.values.companions import TOP
from aprilsched.testing.served import Call, ServedEngine


class Answer:
    """Builds the events of one response, and counts the tokens sent."""

    def __init__(self, served: ServedEngine, call: Call, *, logprobs: bool) -> None:
        self._served = served
        self._call = call
        self._logprobs = logprobs
        self._tokens = 0
        self._masks = 0
        self._began = asyncio.get_running_loop().time()

    def event(self, chunk: Chunk) -> Event:
        """Return the event with the tokens of `chunk`, all of which are new."""
        ids: list[int] = chunk.token_ids.tolist()
        self._tokens += len(ids)
        meta: dict[str, Any] = {
            "id": self._call.request.request_id,
            "finish_reason": finish_reason(
                chunk.finish, tokens=self._tokens, last=ids[-1] if ids else 0
            ),
            "prompt_tokens": chunk.prompt_tokens or len(self._call.request.input_ids),
            "weight_version": self._served.label,
            "num_retractions": self._call.retractions,
        }
        if chunk.busy is not None:
            busy = {"message": str(chunk.busy), "status_code": chunk.busy.status}
            meta["finish_reason"] |= busy
        if self._logprobs:
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = token_logprobs(ids, chunk.logprobs.tolist())
            meta["output_token_logprobs_length"] = self._tokens
        for name, rows in (chunk.token_rows or {}).items():
            if name == TOP:
                meta["output_top_logprobs"] = likely_triples(rows, rows.values.shape[1])
                continue
            self._masks += len(rows)
            meta["output_token_sampling_mask"] = [
                rows.row(index).tolist() for index in range(len(rows))
            ]
            meta["output_token_sampling_mask_length"] = self._masks
        for name, rows in (chunk.context_rows or {}).items():
            meta[name] = b64encode(rows.values.astype("<i4").tobytes()).decode()
        meta["reasoning_tokens"] = 0
        meta["completion_tokens"] = self._tokens
        meta["cached_tokens"] = chunk.cached_tokens or 0
        meta["dp_rank"] = None
        if chunk.finish is not None:
            meta["weight_versions"] = self._served.labelled(chunk.spans or (), self._tokens)
            meta["e2e_latency"] = asyncio.get_running_loop().time() - self._began
            meta |= {} if chunk.answer is None else chunk.answer.values
        meta["cached_tokens_details"] = None
        return {"output_ids": ids, "meta_info": meta}
