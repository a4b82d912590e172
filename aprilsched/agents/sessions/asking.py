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


def ask(dialect: Dialect[Any], session: Session, asked: Asked) -> Awaitable[Reply]:
    """Send a request to a session.

    Raises:
        ConfigError: if it requests what a session does not support.
    """
    if asked.n != 1:
        raise ConfigError(
            f"n is {asked.n}, and a session gives one answer at a time; leave it out."
        )
    if len(asked.questions) > 1:
        raise ConfigError("prompt has several texts, and a session answers one; send one.")
    if asked.logprobs and not dialect.is_native:
        raise ConfigError("logprobs are for the trainer, which has them; leave logprobs out.")
    if asked.is_constrained:
        raise ConfigError("response_format must be text, because nothing constrains the policy.")
    if asked.has_media:
        raise ConfigError("a prompt of a session's /generate has no images; leave them out.")
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


def render_whole(dialect: Dialect[Any], asked: Asked, reply: Reply) -> Any:
    """Return the answer as a whole."""
    return dialect.answer(asked, _names_of(asked, reply)).whole([_part_of(asked, reply)])


def render_events(dialect: Dialect[Any], asked: Asked, reply: Reply) -> list[bytes]:
    """Return the answer as the frames of a stream."""
    answer, part = dialect.answer(asked, _names_of(asked, reply)), _part_of(asked, reply)
    events = [*answer.first(), *answer.events(part), *answer.last([part])]
    return [*map(dialect.frame, events), dialect.done]


def _names_of(asked: Asked, reply: Reply) -> Names:
    name = asked.name if isinstance(asked.name, str) else uuid.uuid4().hex
    versions = reply.output.versions
    label = str(versions[-1]) if len(versions) else ""
    return Names(answer=name, model=asked.model, token=str, label=lambda: label)


def _part_of(asked: Asked, reply: Reply) -> Part:
    """Return the only part of a reply."""
    output, message = reply.output, reply.message
    changes: list[Event] = [
        {name: message[name]} for name in ("reasoning_content", "content") if message.get(name)
    ]
    for place, call in enumerate(message.get("tool_calls") or ()):
        changes.append({"tool_calls": [{"index": place, **call}]})
    ids: list[int] = output.token_ids.tolist()
    return Part(
        name=asked.name if isinstance(asked.name, str) else uuid.uuid4().hex,
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
