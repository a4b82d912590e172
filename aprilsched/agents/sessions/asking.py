"""Requests of every dialect to a session, and its replies in their dialect.

The trainer decides how a session samples. Of a request's sampling fields, only the length of the
answer and its stop conditions are used.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from aprilsched.agents.dialects.values import Asked, Chat, Dialect, End, Names, Part
from aprilsched.agents.serving.streams import Event
from aprilsched.errors import ConfigError

if TYPE_CHECKING:
    from aprilsched.agents.sessions.harness import Reply, Session


def ask(dialect: type[Dialect], session: Session, asked: Asked) -> Awaitable[Reply]:
    """Send a request to a session.

    Raises:
        ConfigError: if it requests what a session does not support.
    """
    for is_wrong, why in (
        (asked.n != 1, f"`n` must be 1, got {asked.n}: a session gives one answer at a time."),
        (len(asked.questions) > 1, "`prompt` must be one text: a session answers one at a time."),
        (
            asked.logprobs and not dialect.is_native,
            "`logprobs` must be left out: the trainer has them.",
        ),
        (asked.is_constrained, "`response_format` must be text: nothing constrains the policy."),
        (asked.has_media, "images must be in the messages of a chat, got some with a prompt."),
    ):
        if is_wrong:
            raise ConfigError(why)
    (question,) = asked.questions
    prompt, text, most = question.prompt, question.text, question.max_tokens
    if not isinstance(prompt, Chat):
        # By default SGLang leaves out special tokens, and what ended the response.
        raw = text.no_stop_trim and not text.skip_special_tokens
        return session.complete(prompt, max_tokens=most, stop=text.stops, raw=raw)
    if prompt.goes_on:
        raise ConfigError("continue_final_message has no place in a session; leave it out.")
    if prompt.forced:
        raise ConfigError(
            "tool_choice must be auto or none, because nothing makes the policy call."
        )
    return session.chat(
        prompt.messages,
        tools=prompt.tools,
        max_tokens=most,
        stop=text.stops,
        options=prompt.options,
    )


def render_whole(dialect: type[Dialect], asked: Asked, reply: Reply) -> Any:
    """Return the answer as a whole."""
    answer, part = _answer_of(dialect, asked, reply)
    return answer.whole([part])


def render_events(dialect: type[Dialect], asked: Asked, reply: Reply) -> list[bytes]:
    """Return the answer as the frames of a stream."""
    answer, part = _answer_of(dialect, asked, reply)
    events = [*answer.first(), *answer.events(part), *answer.last([part])]
    return [*map(dialect.frame, events), dialect.done]


def _answer_of(dialect: type[Dialect], asked: Asked, reply: Reply) -> tuple[Dialect, Part]:
    """Return the renderer of a reply, and its only part."""
    output, message = reply.output, reply.message
    name = asked.name if isinstance(asked.name, str) else uuid.uuid4().hex
    label = str(output.versions[-1]) if len(output.versions) else ""
    changes: list[Event] = [
        {field: message[field]} for field in ("reasoning_content", "content") if message.get(field)
    ]
    for place, call in enumerate(message.get("tool_calls") or ()):
        changes.append({"tool_calls": [{"index": place, **call}]})
    ids: list[int] = output.token_ids.tolist()
    part = Part(
        name=name,
        prompt_ids=reply.question.ids,
        token_ids=ids,
        logprobs=output.logprobs.tolist(),
        text=message.get("content") or "",
        changes=changes,
        end=End(
            reason=output.finish_reason,
            matched=ids[-1] if ids and output.finish_reason == "stop" else None,
            message=dict(message),
            versions={"versions": output.versions.tolist()} if asked.token_ids else {},
        ),
    )
    names = Names(answer=name, model=asked.model, token=str, label=lambda: label)
    return dialect(asked, names), part
