"""One client's view of one response: its tokens and text as they arrive, up to a stop string.

Engines need no tokenizer, so the gateway looks for stop strings itself and withdraws the rollout at
a match. The response then ends with the token that completed the stop string.

Invariants:
- The parts of a response, concatenated, are the whole response.
- Text that may be the prefix of a stop string is held back until that is decided.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from aprilsched.agents.chat.openai_bodies import Message
from aprilsched.agents.chat.tokenizer import Detokenizer
from aprilsched.agents.dialects.sglang import labelled, likely_triples
from aprilsched.agents.dialects.values import End, Likely, Part, check_stops
from aprilsched.agents.gateway.responses import Response, Responses
from aprilsched.agents.serving.refusals import Refusal
from aprilsched.agents.serving.streams import Event, merged
from aprilsched.kernel.values.companions import KINDS, TOP
from aprilsched.types import FinishReason

_AT_ONCE = 1024
"""Tokens that are decoded before other clients get their turn."""


@dataclass(frozen=True, kw_only=True)
class TextRules:
    """The text options of one request.

    Attributes:
        stops: strings that end the response.
        keep_stop: whether the text contains the string or token that ended the response.
        skip_special: whether special tokens are left out of the text.
        ends: tokens that end the response.
        ignore_ends: whether generation continues after them.

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
        """Return `params` with the tokens that end the response.

        An engine without a tokenizer does not know all of them.
        """
        return dict(params) if self.ignore_ends else {**params, "stop_token_ids": sorted(self.ends)}

    def trims(self, token_id: int) -> bool:
        """Return whether `token_id` ends the response and has no text."""
        return token_id in self.ends and not (self.keep_stop or self.ignore_ends)


class Stops:
    """Finds the first stop string in a text that arrives in pieces."""

    def __init__(self, strings: Sequence[str], *, keep: bool) -> None:
        self._strings = strings
        self._keep = keep
        self._held = ""
        self.matched: str | None = None
        """The string that was found."""

    def push(self, text: str) -> str:
        """Return the text that can no longer be part of a stop string."""
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
        """Return the text that is still held back at the end."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(kw_only=True)
class Reading:
    """One client's view of `response`.

    Args:
        responses: ends the response if a stop string is found.
        response: the response to read.
        rules: the text options of the request.
        detokenizer: decodes its tokens; None if the client gets no text.
        message: parses its text as a chat message; None if this is not a chat.
        index: its index in the answer.
        likely: number of top logprobs per token.
        label_of: returns the label of a version.
    """

    responses: Responses
    response: Response
    rules: TextRules
    detokenizer: Detokenizer | None = None
    message: Message | None = None
    index: int = 0
    likely: int = 0
    label_of: Callable[[int], str] = str
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    text: str = ""
    """The tokens that were read, their log-probabilities, and their text."""
    over: bool = False

    def __post_init__(self) -> None:
        self._stops = Stops(self.rules.stops, keep=self.rules.keep_stop)

    @property
    def failure(self) -> str:
        """The cause, if the response has failed."""
        return "" if self._stops.matched is not None else self.response.failure

    @property
    def finish(self) -> FinishReason | str | None:
        """Why it ended; None while it continues."""
        if not self.over:
            return None
        return "stop" if self._stops.matched is not None else self.response.finish

    @property
    def whole(self) -> Part:
        """Return all parts so far as one."""
        return self._part(0, self.text, ())

    async def parts(self) -> AsyncGenerator[Part, None]:
        """Yield the parts as they arrive, up to the last one."""
        while not self.over:
            yield await self.more()

    async def more(self) -> Part:
        """Wait for new tokens or the end, and return them as a part."""
        start, pieces = len(self.token_ids), list[str]()
        while len(self.response.token_ids) == start and not self.response.over:
            await self.response.news()
        ids, logprobs = self.response.token_ids, self.response.logprobs
        if len(ids) - start > _AT_ONCE:
            await asyncio.sleep(0)  # Catching up must not block other clients.
        end, last = start, min(len(ids), start + _AT_ONCE)
        while end < last and self._stops.matched is None:
            pieces.append(self._stops.push(self._push(ids[end])))
            end += 1
        over = self.response.over and end == len(ids)
        if over and self._stops.matched is None:
            rest = "" if self.detokenizer is None else self.detokenizer.rest()
            pieces.append(self._stops.push(rest))
            if self._stops.matched is None:
                pieces.append(self._stops.rest())
        self.token_ids += ids[start:end]
        self.logprobs += logprobs[start:end]
        if self._stops.matched is not None:
            # Later tokens are not read. The versions are known when the response is over.
            self.responses.end(self.response, "a stop string has ended it")
            await self.response.end()
            over = True
        self.over = over
        text = "".join(pieces)
        self.text += text
        changes: list[Event] = []
        if self.message is not None:
            changes += self.message.push(text)
            changes += self.message.finish(self._end_text()) if over else []
        return self._part(start, text, changes)

    def _push(self, token_id: int) -> str:
        if self.detokenizer is None or self.rules.trims(token_id):
            return ""
        return self.detokenizer.push(token_id)

    def _end_text(self) -> str:
        """Return the text of the token that ended the response, if the response lacks it."""
        last = self.token_ids[-1:]
        if self.detokenizer is None or self._stops.matched is not None or not last:
            return ""
        return self.detokenizer.text_of(last[0]) if self.rules.trims(last[0]) else ""

    def _part(self, start: int, text: str, changes: Sequence[Event]) -> Part:
        return Part(
            index=self.index,
            name=self.response.rid,
            prompt_ids=self.response.prompt.input_ids,
            start=start,
            token_ids=self.token_ids[start:],
            logprobs=self.logprobs[start:],
            likely=self._likely_from(start),
            text=None if self.detokenizer is None else text,
            changes=changes,
            rows=self._rows_from(start),
            end=self._end(),
        )

    def _end(self) -> End | None:
        if self.finish is None:
            return None
        matched = self._stops.matched
        if matched is None and self.token_ids:
            matched = self.token_ids[-1]
        end = len(self.token_ids)
        spans = ((s.version, s.start, min(s.end, end)) for s in self.response.segments)
        return End(
            reason=self.finish,
            matched=matched if self.finish == "stop" else None,
            why=self.response.message,
            message={} if self.message is None else self.message.as_message(),
            versions={
                "weight_versions": labelled(spans, self.label_of),
                "weight_versions_exact": self.response.versions_exact,
            },
        )

    def _likely_from(self, start: int) -> list[Likely]:
        """Return the top logprobs at each position from `start` on.

        A list is empty if the engine's answer was lost.
        """
        if not self.likely:
            return []
        total = len(self.token_ids)
        rows = self.response.rows(TOP, start, total)
        found = [] if rows is None else likely_triples(rows, self.likely)
        return found + [[] for _ in range(total - start - len(found))]

    def _rows_from(self, start: int) -> Event:
        """Return the requested companion rows, as SGLang sends them.

        Rows of tokens come with their tokens, rows of the context at the end.
        """
        fields: Event = {}
        response, total = self.response, len(self.token_ids)
        for name in response.prompt.companions or ():
            if name == TOP:
                continue
            per_token = KINDS[name] == "token"
            first, end = (start, total) if per_token else (0, response.prompt_tokens + total - 1)
            rows = response.rows(name, first, end) if per_token or self.over else None
            if rows is not None and per_token:
                fields[f"output_token_{name}"] = [rows.row(i).tolist() for i in range(len(rows))]
                fields[f"output_token_{name}_length"] = total
            elif rows is not None:
                fields[name] = b64encode(rows.values.astype("<i4").tobytes()).decode()
            if self.over and name in response.companions:
                fields[f"{name}_exact"] = bool(response.companions[name].exact[:total].all())
        return fields


class Failed(Refusal):
    """A response has failed, and therefore the request."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.failure)
        self.status = response.status


async def parts_of(readings: Sequence[Reading]) -> AsyncGenerator[tuple[Reading, Part], None]:
    """Yield the parts of all readings as they arrive."""
    if len(readings) == 1:  # Most bodies request one response, which needs no tasks.
        async for part in readings[0].parts():
            yield readings[0], part
        return
    async with aclosing(merged([each.parts() for each in readings])) as parts:
        async for index, part in parts:
            yield readings[index], part
