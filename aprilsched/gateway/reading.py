"""A client's reading of one response: its tokens and text as they come, up to a stop string.

Engines need no tokenizer, so the gateway looks for stop strings itself, and withdraws the rollout
where one is found. The response then ends with the token that completed the stop string.

Invariants:
- The parts of a response, one after another, are the whole of it.
- Text that may be the beginning of a stop string is held back until it is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from aprilsched.chat.openai_bodies import check_stops
from aprilsched.chat.tokenizer import Detokenizer
from aprilsched.companions import TOP
from aprilsched.dialects.sglang import labelled, likely_triples
from aprilsched.gateway.responses import Response, Responses
from aprilsched.serving.refusals import Refusal
from aprilsched.serving.streams import merged
from aprilsched.types import FinishReason, Segment

_AT_ONCE = 1024
"""Tokens that become text before other clients have their turn."""


@dataclass(frozen=True, kw_only=True)
class TextRules:
    """What of a response's text a client wants.

    Attributes:
        stops: strings that end the response.
        keep_stop: whether the string or the token that ended it is in the text.
        skip_special: whether special tokens have no text.
        ends: tokens that end the response.
        ignore_ends: whether they do not.

    Raises:
        ConfigError: if the stop strings cannot be used.
    """

    stops: Sequence[str] = ()
    keep_stop: bool = False
    skip_special: bool = True
    ends: frozenset[int] = frozenset()
    ignore_ends: bool = False

    def __post_init__(self) -> None:
        check_stops(self.stops)

    def given(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """`params` with the tokens that end the response, which engines without a tokenizer do not
        all know."""
        return dict(params) if self.ignore_ends else {**params, "stop_token_ids": sorted(self.ends)}

    def trims(self, token_id: int) -> bool:
        """Whether `token_id` ends the response and has no text."""
        return token_id in self.ends and not (self.keep_stop or self.ignore_ends)


@dataclass(frozen=True, kw_only=True)
class Part:
    """What has come since the last part.

    Attributes:
        start: number of tokens before these.
        text: new text; it may lag behind the tokens, but for the last part.
        over: whether this is the last part.
    """

    start: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    text: str
    over: bool


class Stops:
    """Finds the first stop string in a text that comes in pieces."""

    def __init__(self, strings: Sequence[str], *, keep: bool) -> None:
        self._strings = strings
        self._keep = keep
        self._held = ""
        self.matched: str | None = None
        """The string that was found."""

    def push(self, text: str) -> str:
        """The text that belongs to the response for certain."""
        if not self._strings:
            return text
        held = self._held + text
        found = [(at, -len(s), s) for s in self._strings if (at := held.find(s)) >= 0]
        if found:
            at, _, self.matched = min(found)
            self._held = ""
            return held[: at + len(self.matched) * self._keep]
        keep = max(_overlap(held, string) for string in self._strings)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def rest(self) -> str:
        """The text that is held back, when no more comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


@dataclass
class Reading:
    """What one client reads of `response`.

    Args:
        responses: where the response is ended if a stop string is found.
        response: what is read.
        detokenizer: gives its text; None leaves it without text.
        rules: what of the text is wanted.
        index: its number in the answer.
    """

    responses: Responses
    response: Response
    detokenizer: Detokenizer | None
    rules: TextRules
    index: int = 0
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    text: str = ""
    """The tokens that were read, their log-probabilities, and their text."""
    over: bool = False

    def __post_init__(self) -> None:
        self._stops = Stops(self.rules.stops, keep=self.rules.keep_stop)

    @property
    def whole(self) -> Part:
        """All that was read."""
        return Part(
            start=0,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            text=self.text,
            over=self.over,
        )

    @property
    def failure(self) -> str:
        """The cause, if the response has failed."""
        return "" if self.matched is not None else self.response.failure

    @property
    def matched(self) -> str | None:
        """The stop string that has ended it."""
        return self._stops.matched

    @property
    def finish(self) -> FinishReason | str | None:
        """Why it ended; None while it goes on."""
        if not self.over:
            return None
        return "stop" if self.matched is not None else self.response.finish

    @property
    def segments(self) -> list[Segment]:
        """The versions of the tokens that were read; known at the end."""
        end = len(self.token_ids)
        return [
            structs.replace(each, end=min(each.end, end))
            for each in self.response.segments
            if each.start < end
        ]

    def labelled(self, label_of: Callable[[int], str]) -> list[dict[str, str | int]]:
        """The field ``weight_versions`` of what was read; known at the end."""
        return labelled(((s.version, s.start, s.end) for s in self.segments), label_of)

    def likely(self, part: Part, n: int) -> list[list[tuple[float, int, None]]]:
        """The `n` likeliest tokens in the place of each token of a part, in SGLang's form. A list
        is empty where the engine's answer was lost."""
        end = part.start + len(part.token_ids)
        rows = self.response.rows(TOP, part.start, end)
        found = [] if rows is None else likely_triples(rows, n)
        return found + [[] for _ in range(len(part.token_ids) - len(found))]

    async def parts(self) -> AsyncGenerator[Part, None]:
        """The parts as they come, up to the last one."""
        while not self.over:
            yield await self.more()

    async def more(self) -> Part:
        """Wait for new tokens, or for the end; nothing follows a part that is the last."""
        start, pieces = len(self.token_ids), list[str]()
        while len(self.response.token_ids) == start and not self.response.over:
            await self.response.news()
        ids, logprobs = self.response.token_ids, self.response.logprobs
        if len(ids) - start > _AT_ONCE:
            await asyncio.sleep(0)  # A client that had stopped reading must not hold up the others.
        end, last = start, min(len(ids), start + _AT_ONCE)
        while end < last and self.matched is None:
            pieces.append(self._stops.push(self._push(ids[end])))
            end += 1
        over = self.response.over and end == len(ids)
        if over and self.matched is None:
            rest = "" if self.detokenizer is None else self.detokenizer.rest()
            pieces.append(self._stops.push(rest))
            if self.matched is None:
                pieces.append(self._stops.rest())
        self.token_ids += ids[start:end]
        self.logprobs += logprobs[start:end]
        if self.matched is not None:
            # Whatever comes now is not read. The versions are known when the response is over.
            self.responses.end(self.response, "a stop string has ended it")
            await self.response.end()
            over = True
        self.over = over
        text = "".join(pieces)
        self.text += text
        ids, logprobs = self.token_ids[start:], self.logprobs[start:]
        return Part(start=start, token_ids=ids, logprobs=logprobs, text=text, over=over)

    def _push(self, token_id: int) -> str:
        if self.detokenizer is None or self.rules.trims(token_id):
            return ""
        return self.detokenizer.push(token_id)


class Failed(Refusal):
    """A response has failed, and with it the request."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.failure)
        self.status = response.status


async def parts_of(readings: Sequence[Reading]) -> AsyncGenerator[tuple[Reading, Part], None]:
    """The parts of all readings as they come."""
    if len(readings) == 1:  # Most bodies ask for one response, which needs no tasks.
        async for part in readings[0].parts():
            yield readings[0], part
        return
    async with aclosing(merged([each.parts() for each in readings])) as parts:
        async for index, part in parts:
            yield readings[index], part


async def parts_until_failure(
    readings: Sequence[Reading],
) -> AsyncGenerator[tuple[Reading, Part], None]:
    """The parts of all readings as they come.

    Raises:
        Failed: if one of them fails.
    """
    async with aclosing(parts_of(readings)) as parts:
        async for reading, part in parts:
            if reading.failure:
                raise Failed(reading.response)
            yield reading, part
