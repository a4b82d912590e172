"""The JSON bodies of vLLM's calls as typed structs, and the events of a response as chunks.

Unknown fields are ignored, because every server version adds some. A missing or mistyped field
that a token depends on makes decoding fail: no token is guessed.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from aprilsched.engines.base import Chunk, GenerationRequest
from aprilsched.engines.http import UNREADABLE, quote
from aprilsched.engines.stream import LabelSpan, Logprob, Name, ResponseReader, TokenId

PREFIX = "generate-tokens-"
"""vLLM puts it before the id of a request of /inference/v1/generate. An abort under the id alone is
answered with "aborted": 1, and aborts nothing (0.32)."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """A sampled token with its logprob."""

    token_id: TokenId
    logprob: Logprob


class Logprobs(msgspec.Struct, frozen=True):
    """The sampled tokens of an event."""

    content: list[TokenLogprob] | None = None


class Choice(msgspec.Struct, frozen=True):
    """New tokens of a response; only the last event has `finish_reason` and `weight_versions`."""

    index: int
    token_ids: list[TokenId] | None = None
    logprobs: Logprobs | None = None
    finish_reason: Name | None = None
    weight_versions: list[LabelSpan] | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """An error inside a stream, after the HTTP status 200: that a prompt is too long, for one."""

    message: str = ""
    code: int | None = None


class StreamEvent(msgspec.Struct, frozen=True):
    """One event of a streamed answer: tokens, or the error that ends it."""

    choices: list[Choice] = []
    error: ErrorBody | None = None


_decoder = msgspec.json.Decoder(StreamEvent)


class EventReader(ResponseReader):
    """Turns vLLM's events of one request into chunks; each has only new tokens."""

    def feed(self, payload: bytes) -> Chunk | None:
        """Return the chunk that one event's payload carries; None for an event without a choice."""
        try:
            event = _decoder.decode(payload)
        except UNREADABLE as error:
            raise self._broken(
                f"sent an event that cannot be read ({quote(str(error))})"
            ) from error
        if event.error is not None:
            raise self._rejected(event.error.message, event.error.code)
        if not event.choices:
            return None
        if len(event.choices) > 1 or event.choices[0].index != 0:
            raise self._broken("sent an event that is not one of a single response")
        return self._chunk(event.choices[0])

    def _chunk(self, choice: Choice) -> Chunk:
        tokens = choice.token_ids or []
        sampled = (choice.logprobs and choice.logprobs.content) or []
        if [token.token_id for token in sampled] != tokens:
            raise self._broken("sent token_ids that are not the tokens of its logprobs")
        self.held += len(tokens)
        if self.held > self.max_tokens:
            raise self._broken(f"sent {self.held} tokens where {self.max_tokens} were asked for")
        finish = choice.finish_reason
        if not (finish is None or finish == "stop" or finish == "length" or finish == "abort"):
            raise self._broken(f"finished with the unknown reason {quote(finish)!r}")
        return Chunk(
            token_ids=np.array(tokens, np.int32),
            logprobs=np.array([token.logprob for token in sampled], np.float32),
            finish=finish,
            spans=None if finish is None else self._spans(choice.weight_versions),
        )


def generate_body(request: GenerationRequest, *, stream_interval: int) -> dict[str, Any]:
    """The body of POST /inference/v1/generate.

    vLLM ignores sampling parameters that it does not know (0.32).
    """
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": list(sampling.stop_token_ids),
        "seed": sampling.sampling_seed,
        "logprobs": 0,
        "detokenize": False,
        "stream_interval": stream_interval,
    }
    body: dict[str, Any] = {
        "request_id": request.request_id,
        "token_ids": request.input_ids.tolist(),
        "sampling_params": {**params, **sampling.extra},
        "stream": True,
    }
    if request.adapter is not None:
        body["model"] = request.adapter
    if request.cache_key is not None:
        body["cache_salt"] = request.cache_key
    return body
