"""The JSON bodies of vLLM's calls as typed structs, and the events of a response as chunks.

Unknown fields are ignored, because every server version adds some. A missing or mistyped field
that a token depends on makes decoding fail: no token is guessed.
"""

from __future__ import annotations

import math
from base64 import b64decode
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import msgspec
import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from aprilsched.kernel.engines.base import Chunk, GenerationRequest
from aprilsched.kernel.engines.failures import quote
from aprilsched.kernel.engines.stream import (
    Count,
    ErrorBody,
    LabelSpan,
    Logprob,
    Name,
    ResponseReader,
    TokenId,
    guarded,
    media_source,
)
from aprilsched.kernel.values.companions import TOP, Rows
from aprilsched.types import derived_seed

PREFIX = "generate-tokens-"
"""vLLM puts it before the id of a request of /inference/v1/generate. An abort under the id alone is
answered with "aborted": 1, and aborts nothing (0.32)."""


class Likely(msgspec.Struct, frozen=True):
    """A token that might have been sampled."""

    token_id: TokenId
    logprob: Logprob


class TokenLogprob(msgspec.Struct, frozen=True):
    """A sampled token with its logprob, and in `top_logprobs` itself and likelier ones."""

    token_id: TokenId
    logprob: Logprob
    top_logprobs: list[Likely] = []


class Logprobs(msgspec.Struct, frozen=True):
    """The sampled tokens of an event."""

    content: list[TokenLogprob] | None = None


class Choice(msgspec.Struct, frozen=True):
    """New tokens of a response, with the ids that each was sampled from in `sampling_mask`.

    Only the last event has `finish_reason`, `weight_versions` and `routed_experts`, which are
    base64 of a .npy file.
    """

    index: int
    token_ids: list[TokenId] | None = None
    logprobs: Logprobs | None = None
    finish_reason: Name | None = None
    weight_versions: list[LabelSpan] | None = None
    routed_experts: str | None = None
    sampling_mask: list[list[TokenId]] | None = None


class Usage(msgspec.Struct, frozen=True):
    """`prompt_tokens` counts media as the tokens that their placeholders became."""

    prompt_tokens: Count


class StreamEvent(msgspec.Struct, frozen=True):
    """One event of a streamed answer: tokens, or the error that ends it."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: ErrorBody | None = None


_decoder = msgspec.json.Decoder(StreamEvent)


class EventReader(ResponseReader):
    """Turns vLLM's events of one request into chunks; each has only new tokens."""

    @guarded
    def feed(self, payload: bytes) -> Chunk | None:
        """Return the chunk that one event's payload carries; None for an event without a choice."""
        event = _decoder.decode(payload)
        if event.error is not None:
            raise self._rejected(event.error.message, event.error.code)
        if not event.choices:
            return None
        if len(event.choices) > 1 or event.choices[0].index != 0:
            raise self.broken("sent an event that is not one of a single response")
        return self._chunk(event.choices[0], event.usage)

    def _chunk(self, choice: Choice, usage: Usage | None) -> Chunk:
        tokens = choice.token_ids or []
        sampled = (choice.logprobs and choice.logprobs.content) or []
        if [token.token_id for token in sampled] != tokens:
            raise self.broken("sent token_ids that are not the tokens of its logprobs")
        self.held += len(tokens)
        if self.held > self.max_tokens:
            raise self.broken(f"sent {self.held} tokens where {self.max_tokens} were asked for")
        finish = choice.finish_reason
        if not (finish is None or finish == "stop" or finish == "length" or finish == "abort"):
            raise self.broken(f"finished with the unknown reason {quote(finish)!r}")
        return Chunk(
            token_ids=np.array(tokens, np.int32),
            logprobs=np.array([token.logprob for token in sampled], np.float32),
            finish=finish,
            spans=None if finish is None else self._spans(choice.weight_versions),
            token_rows=self._token_rows(choice, sampled) if self._of_tokens else None,
            context_rows=self._rows_of_context(choice) if finish and self._companions else None,
            prompt_tokens=None if usage is None else usage.prompt_tokens,
        )

    def _token_rows(self, choice: Choice, sampled: Sequence[TokenLogprob]) -> dict[str, Rows]:
        """The rows of the new tokens, for each companion of tokens."""
        found: dict[str, Rows] = {}
        for companion in self._of_tokens:
            if companion.name == TOP:
                likely = [
                    sorted([(e.logprob, e.token_id) for e in token.top_logprobs], reverse=True)
                    for token in sampled
                ]
                found[TOP] = self._top_rows(companion, likely, len(sampled))
                continue
            masks = choice.sampling_mask or []
            if len(masks) != len(sampled):
                raise self.broken(f"sent {len(masks)} sampling masks for {len(sampled)} tokens")
            found[companion.name] = self._ragged_rows(companion, masks)
        return found

    def _rows_of_context(self, choice: Choice) -> dict[str, Rows]:
        """The rows from the first missing one on, for each companion of the context."""
        encoded = choice.routed_experts
        return {
            companion.name: self._context_rows(
                companion,
                lambda encoded=encoded, row=companion.shape: _array(encoded, row),
                first=start,
                start=start,
                # An abort may leave out the rows of the last step, or the tokens.
                spare=None if choice.finish_reason == "abort" else 0,
            )
            for companion, start in self._companions
            if encoded is not None and companion.per == "context"
        }


def _array(encoded: str, row: tuple[int, ...]) -> NDArray[Any]:
    """The values of a .npy file in base64.

    Raises:
        Exception: if it is not a .npy file, or not one of integers in rows of the shape `row`.
            NumPy's reader of headers raises ValueError, SyntaxError, TypeError and others.
    """
    file = BytesIO(b64decode(encoded, validate=True))
    npy.read_magic(file)
    # numpy.load would first make an array of the shape that the file claims to have.
    shape, columns_first, dtype = npy.read_array_header_1_0(file)
    content = file.read()
    if columns_first or dtype.kind not in "iu" or math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"{len(content)} bytes of an array {list(shape)} of {dtype}")
    if shape[1:] != row:
        raise ValueError(f"rows of the shape {list(shape[1:])}")
    return np.frombuffer(content, dtype)


def generate_body(request: GenerationRequest, *, stream_interval: int) -> dict[str, Any]:
    """The body of POST /inference/v1/generate.

    vLLM ignores sampling parameters that it does not know (0.32).
    """
    sampling, seed = request.sampling, request.sampling.sampling_seed
    if seed is not None:
        # vLLM draws from the start of a seed's sequence for every request, so a continued response
        # would repeat its first draws. SGLang draws by the position in the context.
        seed = derived_seed(seed, len(request.input_ids))
    params: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": list(sampling.stop_token_ids),
        "seed": seed,
        "logprobs": 0,
        "detokenize": False,
        "stream_interval": stream_interval,
    }
    for companion, start in request.companions:
        if companion.name == "routed_experts":
            params["routed_experts_prompt_start"] = start
        elif companion.name == TOP:
            # The sampled token takes a place among them, however unlikely it is.
            params["logprobs"] = companion.shape[0] + 1
    body: dict[str, Any] = {
        "request_id": request.request_id,
        "token_ids": request.input_ids.tolist(),
        "sampling_params": {**params, **sampling.extra},
        "stream": True,
    }
    if request.media:
        body["content_parts"] = [
            {"type": f"{media.kind}_url", "url": media_source(media)} for media in request.media
        ]
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if request.adapter is not None:
        body["model"] = request.adapter
    if request.cache_key is not None:
        body["cache_salt"] = request.cache_key
    return body
