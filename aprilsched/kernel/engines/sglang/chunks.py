"""Turns the bytes of SGLang's streamed answers into chunks of tokens.

Invariants:

- A token and its logprob come from one ``[logprob, id, text]`` triple, never from two lists
  paired by position: at an abort SGLang repeats the last output id, and where it joins that
  repeat with a pending event, ``output_ids`` is shifted by one against the logprobs.
- New tokens are found by count (``completion_tokens`` minus the tokens already held), not by the
  form of the event, so incremental events, cumulative events and repeats are read alike. The
  count never decreases, and never exceeds the number of tokens that were asked for.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Literal

import msgspec
import numpy as np

from aprilsched.errors import EngineBusy
from aprilsched.kernel.engines.base import Chunk
from aprilsched.kernel.engines.failures import BUSY_STATUSES, quote
from aprilsched.kernel.engines.sglang.wire import Finish, MetaInfo, StreamEvent
from aprilsched.kernel.engines.stream import ResponseReader, guarded
from aprilsched.kernel.values.companions import TOP, Rows
from aprilsched.types import Answer, FinishReason

_decoder = msgspec.json.Decoder(StreamEvent)
_LOGPROB, _ID = itemgetter(0), itemgetter(1)


class ChunkAssembler(ResponseReader):
    """Turns SGLang's events of one request into chunks; see :class:`ResponseReader`."""

    @guarded
    def feed(self, payload: bytes) -> Chunk:
        """Return the chunk that one event's payload carries."""
        event = self.event(payload)
        if event.index:
            raise self.broken("sent an event that is not one of a single response")
        return self.chunk(event, payload)

    @guarded
    def event(self, payload: bytes) -> StreamEvent:
        """Decode an event, of whichever request it is; errors as :meth:`feed`."""
        return _decoder.decode(payload)

    @guarded
    def chunk(self, event: StreamEvent, payload: bytes) -> Chunk:
        """Return the chunk of an event of this request; errors as :meth:`feed`."""
        if event.error is not None:
            raise self._rejected(event.error.message, event.error.code)
        if event.meta_info is None:
            raise self.broken("sent an event without meta_info")
        entries: Mapping[str, Any] = {}
        if self._request.sampling.keep and event.meta_info.finish_reason:
            entries = msgspec.json.decode(payload)["meta_info"]
        return self._chunk(event.output_ids or [], event.meta_info, entries)

    def _chunk(self, output_ids: list[int], meta: MetaInfo, entries: Mapping[str, Any]) -> Chunk:
        reason = meta.finish_reason
        finish = None if reason is None else self._finish(reason)
        where = self._fresh(meta, finish)
        fresh = (meta.output_token_logprobs or [])[where]
        tokens = list(map(_ID, fresh))
        # An abort is exempt: its output_ids hold a repeat of the last one.
        if finish != "abort" and tokens != output_ids[len(output_ids) - len(tokens) :]:
            raise self.broken("sent output_ids that are not the tokens of its logprobs")
        before, self.held = self.held, self.held + len(tokens)
        spans = self._spans(meta.weight_versions) if finish else None
        shown = meta.weight_version if spans is None else None
        return Chunk(
            # np.array would pass twice over the elements, at three times the cost.
            token_ids=np.fromiter(tokens, np.int32, len(tokens)),
            logprobs=np.fromiter(map(_LOGPROB, fresh), np.float32, len(tokens)),
            finish=finish,
            spans=spans,
            cached_tokens=meta.cached_tokens,
            label=None if shown is None else self.version_of(shown),
            token_rows=self._token_rows(meta, before, where) if self._of_tokens else None,
            context_rows=self._rows_of_context(meta) if finish and self._companions else None,
            prompt_tokens=meta.prompt_tokens if self._request.media else None,
            answer=Answer.of(entries, self._request.sampling.keep) if finish and entries else None,
            busy=None if reason is None or finish != "abort" else self._busy(reason),
        )

    def _token_rows(self, meta: MetaInfo, before: int, where: slice) -> dict[str, Rows]:
        """Return the rows of the tokens from `begin` to `held`, for each companion of tokens.

        `where` is the slice of the event that holds their log-probabilities."""
        found: dict[str, Rows] = {}
        for companion in self._of_tokens:
            if companion.name == TOP:
                likely = [
                    [each[:2] for each in row] for row in (meta.output_top_logprobs or [])[where]
                ]
                found[TOP] = self._top_rows(companion, likely, self.held - before)
                continue
            masks = meta.output_token_sampling_mask or []
            length = meta.output_token_sampling_mask_length
            # As with log-probabilities, the end of the list is known, but not its start.
            first = len(masks) - ((length or 0) - before)
            rows = masks[max(0, first) : first + self.held - before]
            if first < 0 or len(rows) < self.held - before:
                raise self.broken(
                    f"sent sampling masks that do not cover its tokens {before} to {self.held}"
                )
            found[companion.name] = self._ragged_rows(companion, rows)
        return found

    def _rows_of_context(self, meta: MetaInfo) -> dict[str, Rows]:
        """The rows from the first missing one on, for each companion of the context."""
        return {
            companion.name: self._context_rows(
                companion,
                lambda encoded=encoded: np.frombuffer(b64decode(encoded, validate=True), "<i4"),
                first=start if companion.name == "routed_experts" else 0,
                start=start,
                # At an abort tokens may come without their logprobs, and one is not even counted.
                spare=1 + meta.completion_tokens - self.held,
            )
            for companion, start in self._companions
            if companion.per == "context"
            and (encoded := getattr(meta, companion.name, None)) is not None
        }

    def _fresh(self, meta: MetaInfo, finish: str | None) -> slice:
        """Return the slice of the triples of the tokens after the first `held` ones.

        The event's list may start anywhere (at `held` in the incremental form, at 0 in the
        cumulative one and at an abort), but its end is known, so positions count from the end.
        """
        if meta.completion_tokens > self.max_tokens:
            raise self.broken(
                f"sent {meta.completion_tokens} tokens where {self.max_tokens} were asked for"
            )
        if meta.completion_tokens < self.held:
            raise self.broken(
                f"counts {meta.completion_tokens} tokens after it had sent {self.held}"
            )
        triples = meta.output_token_logprobs or []
        end = meta.output_token_logprobs_length
        end = meta.completion_tokens if end is None else end
        upto = min(end, meta.completion_tokens)
        if upto < meta.completion_tokens and finish != "abort":
            raise self.broken(
                f"sent {end} logprobs for {meta.completion_tokens} tokens; every token needs one"
            )
        if upto <= self.held:
            return slice(0)
        if end - self.held > len(triples):
            raise self.broken(
                f"sent {len(triples)} logprobs where {end - self.held} were missing; every "
                "token needs one"
            )
        return slice(len(triples) - (end - self.held), len(triples) - (end - upto))

    def _finish(self, reason: Finish) -> FinishReason | Literal["abort"]:
        match reason.type:
            case "stop" | "length" as natural:
                return natural
            case "abort" if reason.status_code is None or reason.status_code in BUSY_STATUSES:
                return "abort"
            case "abort":
                # The server itself failed the request (too long, timed out in the queue). If it
                # counted as our own abort, the request would be sent again forever.
                raise self._rejected(reason.message or "aborted", reason.status_code)
            case other:
                raise self.broken(f"finished with the unknown reason {quote(other)!r}")

    def _busy(self, reason: Finish) -> EngineBusy | None:
        """Why the server itself aborted the request, whose tokens so far are good; None if it did
        not."""
        if reason.status_code is None:
            return None
        text = f"request {self.request_id}: {quote(reason.message or 'aborted')}"
        return EngineBusy(self.engine, text, status=reason.status_code)
