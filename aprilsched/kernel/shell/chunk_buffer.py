"""Turns the chunks that an engine streams into events for the core; both shells use it."""

from __future__ import annotations

from aprilsched.kernel.core.messages.events import Finished, Interrupted, Progress
from aprilsched.kernel.engines.base import Chunk


def progress(chunk: Chunk, request_id: int, attempt: int) -> Progress | None:
    """The event with the chunk's tokens; None if the chunk has no tokens."""
    if not len(chunk.token_ids):
        return None
    return Progress(
        request_id=request_id,
        attempt=attempt,
        token_ids=chunk.token_ids,
        logprobs=chunk.logprobs,
        label=chunk.label,
        rows=chunk.token_rows,
        prompt_tokens=chunk.prompt_tokens,
        decode_seconds=chunk.decode_seconds,
    )


def ending(chunk: Chunk, request_id: int, attempt: int) -> Finished | Interrupted | None:
    """The event that ends the attempt with this chunk; None if the attempt continues."""
    if chunk.finish is None:
        return None
    if chunk.finish == "abort":
        return Interrupted(
            request_id=request_id,
            attempt=attempt,
            spans=chunk.spans,
            rows=chunk.context_rows,
            answer=chunk.answer,
            busy="" if chunk.busy is None else str(chunk.busy),
            retry_after_s=None if chunk.busy is None else chunk.busy.retry_after_s,
        )
    return Finished(
        request_id=request_id,
        attempt=attempt,
        reason=chunk.finish,
        spans=chunk.spans,
        rows=chunk.context_rows,
        answer=chunk.answer,
    )
