"""POST /tokenize and /detokenize, with SGLang's bodies and answers."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from aprilsched.gateway.service import SERVICE
from aprilsched.serving.bodies import body_of
from aprilsched.serving.refusals import Refused, as_json

__all__ = ["detokenize", "tokenize"]

_LARGEST_ID = 2**31 - 1


class _TokenizeBody(msgspec.Struct, frozen=True):
    prompt: str | list[str]
    add_special_tokens: bool = True


class _DetokenizeBody(msgspec.Struct, frozen=True):
    tokens: list[int | list[int]]
    skip_special_tokens: bool = True


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize: the token ids of a text, or of each of several."""
    service = request.app[SERVICE]
    body = await body_of(request, _TokenizeBody)
    one = isinstance(body.prompt, str)
    texts: Any = [body.prompt] if one else body.prompt
    ids = await service.texts.encoded(
        texts, service.context_tokens, special=body.add_special_tokens
    )
    counts = [len(each) for each in ids]
    longest = service.context_tokens
    return as_json(
        {
            "tokens": ids[0] if one else ids,
            "count": counts[0] if one else counts,
            "max_model_len": -1 if longest is None else longest,
        }
    )


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize: the text of token ids, or of each of several lists of them."""
    service = request.app[SERVICE]
    body = await body_of(request, _DetokenizeBody)
    tokenizer = service.texts.tokenizer
    lists = [each for each in body.tokens if isinstance(each, list)]
    if lists and len(lists) < len(body.tokens):
        raise Refused("tokens has ids and lists of ids; give either.")
    several: list[Any] = lists or [body.tokens]
    if not all(0 <= i <= _LARGEST_ID for ids in several for i in ids):
        raise Refused(f"tokens must be in [0, {_LARGEST_ID}].")
    texts = await service.texts.prepared(
        lambda: [tokenizer.decode(ids, skip_special=body.skip_special_tokens) for ids in several],
        size=sum(map(len, several)),
    )
    return as_json({"text": texts if lists else texts[0]})
