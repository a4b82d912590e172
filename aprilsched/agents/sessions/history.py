"""The messages of a session's requests and answers, and their tokens.

A harness knows messages, and the policy knows tokens. Sampled tokens are never tokenised again: the
messages of a request are matched to the known messages, from the first one on, and only the text
after the last known answer is tokenised. The chat template renders that text. A template that now
renders earlier messages differently (without their reasoning, say, or with another end) therefore
changes no known token. :attr:`History.drift` counts the tokens that would have changed.

Messages are compared in the form that a template sees. These make no difference: amounts of white
space in an answer, the ids and the order of its tool calls, its reasoning, zero-width joiners and
empty fields. An answer that has neither a text nor a call may be left out.
"""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np

from aprilsched.agents.chat.openai_bodies import Message, one_for_template
from aprilsched.agents.chat.tokenizer import ModelTokenizer
from aprilsched.errors import ConfigError
from aprilsched.types import Int32Array, Media

JsonObject: TypeAlias = Mapping[str, Any]
"""A message in OpenAI's form."""
Mark: TypeAlias = bytes
"""Hash of the first messages of a chat, up to some message, and of their tools."""

log = logging.getLogger("aprilsched")

_PLACE = f"AprilschedPlaceOfAnAnswer{uuid.uuid4().hex}"
"""Placeholder for the last known answer in a rendered chat; no client or policy can produce it."""
_OTHER = f"AprilschedOtherAnswer{uuid.uuid4().hex}"
"""Placeholder for the earlier answers."""
_URLS = ("data:", "http://", "https://")
_PLAIN = {str, type(None)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A request as tokens.

    Attributes:
        ids: int32 [n], its whole context.
        text: the text of `ids`.
        mark: the hash of its messages.
        messages: its messages.
        tools: the tools that it may call.
        after: the mark of the answer that it continues; None if it continues none.
        media: its images, in order.
        shown: the text of a completion as its client has it.
        raw: whether the client of a completion reads special tokens.
    """

    ids: Int32Array
    text: str
    mark: Mark
    messages: tuple[JsonObject, ...] = ()
    tools: Sequence[JsonObject] | None = None
    after: Mark | None = None
    media: tuple[Media, ...] = ()
    shown: str = ""
    raw: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """An answer, with the part of its context that follows the previous answer.

    Attributes:
        ids: int32 [n], the tokens after the previous answer.
        text: the text of `ids`.
        after: the previous answer; None if there is none. Another one with the same mark may come
            later.
        offset: number of tokens, and of characters, before `ids`.
    """

    ids: Int32Array
    text: str
    after: _Answer | None
    offset: tuple[int, int] = (0, 0)

    @property
    def end(self) -> tuple[int, int]:
        """Number of tokens and of characters up to the end of the answer."""
        return self.offset[0] + len(self.ids), self.offset[1] + len(self.text)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A message of a request.

    Attributes:
        plain: a copy of it if all its values are strings or None; None otherwise.
        rendered: the message in the form that a template sees.
        images: the URLs of its images.
        mark: the hash of it and the messages before it.
    """

    plain: JsonObject | None
    rendered: JsonObject
    images: tuple[str, ...]
    mark: Mark


class History:
    """The answers of one session, by the messages that led to them.

    Args:
        tokenizer: the model's tokenizer.
        most_branches: number of branches that requests may start.

    Attributes:
        begun: number of branches that requests have started.
        messages: the messages of the latest branch, up to and including the latest answer.
    """

    def __init__(self, tokenizer: ModelTokenizer, *, most_branches: int) -> None:
        self.messages: tuple[JsonObject, ...] = ()
        self.branches_started = 0
        self._tokenizer = tokenizer
        self._most = most_branches
        self._answers: dict[Mark, _Answer] = {}
        self._ends: dict[Mark, tuple[JsonObject, ...]] = {}
        """The last answer of each branch, with its messages."""
        self._texts: dict[str, Mark] = {}
        """Texts of completions, prompt and answer together, with their marks."""
        self._resampled = self._rewritten = 0
        self._begin: tuple[str, Mark] = ("", b"")
        """The tools and options of the latest request, and the mark of an empty chat with them."""
        self._seen: list[_Seen] = []
        """The messages of the latest request."""
        self._latest: tuple[Mark, Int32Array, str] = (b"", np.array((), np.int32), "")
        """The latest answer with its whole context: mark, token ids and text."""
        self._open: Mark | None = None
        """The latest request that started a branch, until it is answered."""

    @property
    def drift(self) -> int:
        """Number of known tokens that would differ if the chat were tokenised again."""
        return self._resampled + self._rewritten

    @property
    def branches(self) -> list[tuple[JsonObject, ...]]:
        """The messages of each branch up to its last answer; none for a completion.

        Branches with the same messages appear once.
        """
        return list(self._ends.values())

    # --- requests --------------------------------------------------------------------------------

    def ask(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None = None,
        options: JsonObject | None = None,
    ) -> Question:
        """Return the tokens of a chat.

        Args:
            messages: all messages, in OpenAI's form.
            tools: definitions of tools.
            options: variables of the template.

        Raises:
            ConfigError: if the messages cannot be used.
        """
        options = options or {}
        seen = self._see(messages, tools, options)
        rendered, marks = [each.rendered for each in seen], [each.mark for each in seen]
        known = next((i for i in reversed(range(len(rendered))) if marks[i] in self._answers), None)
        if known is None:
            whole = self._render(rendered, tools, options)
            question = self._encode(whole), whole
        else:
            is_known = [mark in self._answers for mark in marks[: known + 1]]
            question = self._continue(rendered, marks[known], is_known, tools, options)
        if not len(question[0]):
            raise ConfigError("the messages have no tokens; give some text.")
        return Question(
            ids=question[0],
            text=question[1],
            mark=marks[-1],
            messages=tuple(messages),
            tools=tools,
            after=None if known is None else marks[known],
            media=_media([url for each in seen for url in each.images]),
        )

    def continue_text(self, prompt: str | Sequence[int], *, raw: bool = False) -> Question:
        """Return the tokens of a completion.

        A text continues the longest known text that is its prefix; token ids are used unchanged.
        With `raw` the answer's text contains special tokens.

        Raises:
            ConfigError: if the prompt is empty, or has token ids outside of the vocabulary.
        """
        after: Mark | None = None
        if isinstance(prompt, str):
            found = max((t for t in self._texts if prompt.startswith(t)), key=len, default=None)
            text = prompt
            self._tokenizer.check_size(prompt)
            if found is None:
                ids = np.array(self._tokenizer.encode(prompt), dtype=np.int32)
            else:
                after = self._texts[found]
                (known, before), rest = self._whole(after), prompt[len(found) :]
                ids, text = np.concatenate((known, self._encode(rest))), before + rest
        else:
            most = self._tokenizer.size - 1
            if not all(0 <= each <= most for each in prompt):
                raise ConfigError(f"the prompt has token ids that are not from 0 to {most}.")
            ids = np.array(prompt, dtype=np.int32)
            after, text = self._begun_with(ids)
        if not len(ids):
            raise ConfigError("the prompt is empty; give some text.")
        shown = prompt if isinstance(prompt, str) else text
        mark = _after(b"asked", {"text": shown})
        return Question(ids=ids, text=text, mark=mark, after=after, shown=shown, raw=raw)

    def _begun_with(self, ids: Int32Array) -> tuple[Mark | None, str]:
        """Return the last answer of the branch that `ids` continue, and the text of `ids`."""
        for mark in self._ends:
            known, text = self._whole(mark)
            if len(known) <= len(ids) and np.array_equal(known, ids[: len(known)]):
                return mark, text + self._tokenizer.decode(ids[len(known) :].tolist())
        return None, self._tokenizer.decode(ids.tolist())

    def start(self, question: Question) -> None:
        """Note that a request is about to be answered.

        A request that its client sends again after a disconnect starts no other branch.

        Raises:
            ConfigError: if it would start more than `most_branches` branches.
        """
        if question.after in self._ends or question.mark == self._open:
            return
        if self.branches_started >= self._most:
            raise ConfigError(
                f"the session has {self._most} branches, its limit; continue the messages of "
                "one of them."
            )
        self.branches_started += 1
        self._open = question.mark

    # --- answers ---------------------------------------------------------------------------------

    def answered(self, question: Question, token_ids: Int32Array) -> JsonObject:
        """Record the sampled tokens, int32 [m]; return the answer's message in OpenAI's form.

        The message of a completion has the text as its content.
        """
        tokenizer = self._tokenizer
        sampled: list[int] = token_ids.tolist()
        ended = bool(sampled) and sampled[-1] in tokenizer.ends
        shown = sampled[:-1] if ended else sampled
        raw = tokenizer.decode(sampled, skip_special=False)
        self._resampled += _differing(sampled, tokenizer.encode(raw, special=False))
        after = None if question.after is None else self._answers[question.after]
        offset = (0, 0) if after is None else after.end
        answer = _Answer(
            ids=np.concatenate((question.ids[offset[0] :], token_ids)),
            text=question.text[offset[1] :] + raw,
            after=after,
            offset=offset,
        )
        # The delimiters of tool calls and reasoning may be special tokens.
        is_chat = bool(question.messages)
        skip = not (is_chat and tokenizer.parses)
        text, end = raw, ""
        if not question.raw and skip:
            text = tokenizer.decode(shown)
        elif not question.raw and ended:
            end = tokenizer.decode(sampled[-1:], skip_special=False)
            text = raw.removesuffix(end)
        message = Message(tokenizer.parser(question.text, question.tools) if is_chat else None)
        message.push(text)
        message.finish(end)
        rendered = message.as_message()
        if is_chat:
            mark = _after(question.mark, one_for_template(rendered, "the answer", []))
        else:
            shown = question.shown + text
            mark = _after(b"text", {"text": shown})
            # A continuation is longer than its text, so the earlier text is no longer needed.
            self._texts = {t: m for t, m in self._texts.items() if m != question.after}
            self._texts[shown] = mark
        self._open = None
        if question.after is not None:
            self._ends.pop(question.after, None)
        self._answers[mark] = answer
        self._latest = mark, np.concatenate((question.ids, token_ids)), question.text + raw
        self.messages = (*question.messages, rendered) if is_chat else ()
        self._ends[mark] = self.messages
        return rendered

    def unknown(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None,
        options: JsonObject | None,
    ) -> list[int]:
        """Return the indices of the answers in these messages that are not known."""
        seen = self._see(messages, tools, options or {})
        return [
            place
            for place, each in enumerate(seen)
            if place and each.rendered["role"] == "assistant" and each.mark not in self._answers
        ]

    def _see(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None,
        options: JsonObject,
    ) -> list[_Seen]:
        """Return the messages with their marks.

        A request mostly starts with the previous one, so unchanged messages are reused.
        """
        given = repr((tools, options))
        empty: JsonObject = {"role": "assistant", "content": ""}
        if given != self._begin[0]:
            mark = _after(b"", {"tools": tools or None, "options": options})
            if mark != self._begin[1]:
                self._seen = []
            self._begin = given, mark
        mark, before = self._begin[1], self._seen
        seen: list[_Seen] = []
        for place, message in enumerate(messages):
            left_out = _after(mark, empty)
            if place and message.get("role") != "assistant" and left_out in self._answers:
                # Some clients omit an earlier answer that has neither a text nor a call.
                seen.append(_Seen(None, empty, (), left_out))
                mark = left_out
            old = before[len(seen)] if len(seen) < len(before) else None
            if old is None or message != old.plain:
                found: list[str] = []
                rendered = one_for_template(message, f"messages[{place}]", found)
                images = tuple(found)
                if old is None or (rendered, images) != (old.rendered, old.images):
                    before = ()
                    mark = _after(mark, rendered, images)
                    # The caller may change its own copy.
                    plain = dict(message) if set(map(type, message.values())) <= _PLAIN else None
                    old = _Seen(plain, rendered, images, mark)
            seen.append(old)
            mark = old.mark
        self._seen = seen
        return seen

    def _whole(self, mark: Mark) -> tuple[Int32Array, str]:
        """Return the token ids and the text of an answer with its whole context."""
        if mark == self._latest[0]:
            return self._latest[1:]
        parts = [self._answers[mark]]
        while (before := parts[-1].after) is not None:
            parts.append(before)
        parts.reverse()
        return np.concatenate([p.ids for p in parts]), "".join([p.text for p in parts])

    def _continue(
        self,
        rendered: Sequence[JsonObject],
        after: Mark,
        is_known: Sequence[bool],
        tools: Sequence[JsonObject] | None,
        options: JsonObject,
    ) -> tuple[Int32Array, str]:
        """Return the tokens and the text of a chat that continues the known answer `after`.

        Raises:
            ConfigError: if the template does not show what follows that answer.
        """
        ids, text = self._whole(after)
        whole: str | None = None
        refused = ConfigError(
            f"messages[{len(is_known) - 1}] must be an answer that the model's chat template "
            "writes, got one that it leaves out with all that follows; use another template."
        )
        try:
            whole = self._render(rendered, tools, options, shown_from=len(is_known))
        except ConfigError as error:
            # The template may reject a sampled message.
            refused = error
        if whole is not None and whole.startswith(text):
            # The usual case: the template renders the known messages exactly as sampled.
            more: str | None = whole[len(text) :]
        else:
            more = self._follows(rendered, is_known, int(ids[-1]), tools, options)
        if more is None:
            raise refused
        if whole is not None and text + more != whole:
            self._rewritten = max(self._rewritten, self._changed(text + more, whole))
        return np.concatenate((ids, self._encode(more))), text + more

    # --- templates -------------------------------------------------------------------------------

    def _follows(
        self,
        rendered: Sequence[JsonObject],
        is_known: Sequence[bool],
        last: int,
        tools: Sequence[JsonObject] | None,
        options: JsonObject,
    ) -> str | None:
        """Return the template's text after the last known answer, whose last token is `last`.

        None if the template does not show where that answer ends. `is_known` marks the known
        answers among the first messages.
        """
        count = len(is_known)
        # The template may reject the sampled calls, or accept fewer of them. It may leave out the
        # text of an answer with calls, or have no place for calls.
        for most_calls in (None, 1, 0):
            before = [
                _stand_in(each, most_calls, _PLACE if i == count - 1 else _OTHER) if known else each
                for i, (each, known) in enumerate(zip(rendered, is_known, strict=False))
            ]
            plain = {"role": "assistant", "content": _PLACE}
            try:
                more = self._behind([*before, *rendered[count:]], tools, options, shown_from=count)
                behind = self._behind(before, tools, options, generation_prompt=False)
                end = behind
                if before[-1].get("tool_calls"):
                    end = self._behind(
                        [*before[:-1], plain], tools, options, generation_prompt=False
                    )
            except ConfigError as error:
                log.debug("the chat template refuses what stands for answers: %s", error)
                continue
            if more is not None and behind is not None and end is not None:
                return self._behind_end(more, behind, end, last)
        # The template leaves out the answer, but may show what follows it.
        whole = self._render(rendered, tools, options, shown_from=count)
        shown = self._render(
            rendered[:count], tools, options, generation_prompt=False, shown_from=count
        )
        return whole[len(shown) :] if shown and whole.startswith(shown) else None

    def _behind(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None,
        options: JsonObject,
        *,
        generation_prompt: bool = True,
        shown_from: int | None = None,
    ) -> str | None:
        shown_from = len(messages) if shown_from is None else shown_from
        text = self._render(
            messages, tools, options, generation_prompt=generation_prompt, shown_from=shown_from
        )
        _, found, behind = text.rpartition(_PLACE)
        return behind if found else None

    def _behind_end(self, more: str, behind: str, end: str, last: int) -> str:
        """Return the text to append to an answer whose last token is `last`.

        Args:
            more: the template's text after the answer's placeholder.
            behind: the same if no message follows the answer.
            end: the same if the answer has no calls, which the template writes after its text.
            last: the last token of the answer.
        """
        special = self._tokenizer.special_texts
        same = _same(more, behind)
        for text in (more, behind):
            # A prefix must not split a special token.
            inside = [m.start() for m in special.finditer(text) if m.start() < same < m.end()]
            same = min([same, *inside])
        # The end of the answer, which the template writes whether or not a message follows.
        closing = next(n for n in range(same, -1, -1) if end.startswith(more[same - n : same]))
        tokenizer = self._tokenizer
        ends = [tokenizer.decode([each], skip_special=False) for each in sorted(tokenizer.ends)]
        ends = [each for each in ends if each]
        for each in ends:
            at = more.rfind(each, 0, same)
            closing = max(closing, same - at) if at >= 0 else closing
        follows = more[same - closing :]
        own = tokenizer.decode([last], skip_special=False)
        if own and follows.startswith(own):
            return follows[len(own) :]
        if last not in tokenizer.ends:
            return follows
        for each in ends:
            at = follows.find(each, 0, closing)
            if at >= 0:
                return follows[at + len(each) :]
        if behind[same:].startswith(tuple(ends)):
            # The template ends an answer differently if another message follows it.
            first = special.match(follows)
            if first and special.match(follows[first.end() :].lstrip()):
                return follows[first.end() :]
        return follows

    def _render(
        self,
        rendered: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None,
        options: JsonObject,
        *,
        generation_prompt: bool = True,
        shown_from: int = 0,
    ) -> str:
        text = self._tokenizer.render(
            rendered,
            tools,
            go_on=False,
            options=options,
            generation_prompt=generation_prompt,
            shown_from=shown_from,
        )
        self._tokenizer.check_size(text)
        return text

    def _encode(self, text: str) -> Int32Array:
        return np.array(self._tokenizer.encode(text, special=False), dtype=np.int32)

    def _changed(self, text: str, whole: str) -> int:
        """Return how many tokens of the known `text` differ in `whole`, the template's text now."""
        first = _same(text, whole)
        text, whole = text[first:], whole[first:]
        last = _same(text[::-1], whole[::-1])
        changed = text[: len(text) - last] or whole[: len(whole) - last]
        return len(self._encode(changed))


def _stand_in(answer: JsonObject, most_calls: int | None, text: str) -> JsonObject:
    """Return an answer with `text` in its place, and with at most `most_calls` of its calls."""
    calls = cast("list[Any]", answer.get("tool_calls") or [])[:most_calls]
    if not calls:
        return {"role": "assistant", "content": text}
    # Some templates write an answer's text after the results of its calls.
    calls = [{**c, "function": {**c["function"], "arguments": {text: text}}} for c in calls]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _same(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common prefix, in characters or tokens."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[:middle] == other[:middle]:
            least = middle
        else:
            most = middle - 1
    return least


def _differing(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens between the first and the last difference of two rows."""
    if one == other:
        return 0
    first = _same(one, other)
    one, other = one[first:], other[first:]
    return max(1, len(one) - _same(one[::-1], other[::-1]))


def _after(mark: Mark, what: JsonObject, images: Sequence[str] = ()) -> Mark:
    # The text of a message is canonical, because arguments of calls are sorted. JSON would take
    # four times as long.
    text = repr([*_compared(what), *images]) if what.get("role") else _in_one_order(what)
    return hashlib.blake2b(mark + text.encode(), digest_size=16).digest()


def _compared(message: JsonObject) -> list[Any]:
    """Return what identifies a message, in the form of templates."""
    content: Any = message.get("content") or ""
    calls: list[str] = []
    if message["role"] == "assistant":
        if isinstance(content, str):
            # pydantic-ai breaks up texts of special tokens with zero-width joiners.
            content = " ".join(content.split()).replace("\u200d", "")
        for call in cast("list[Any]", message.get("tool_calls") or ()):
            function = call["function"]
            text = _in_one_order([function["name"], function["arguments"]])
            # JavaScript has one number type, and writes 1.0 as 1.
            calls.append(repr(json.loads(text, parse_int=_number, parse_float=_number)))
    return [message["role"], content, message.get("name"), sorted(calls)]


def _number(text: str) -> float:
    return float(text) + 0.0  # Without the sign of -0.0.


def _in_one_order(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _media(images: Sequence[str]) -> tuple[Media, ...]:
    if not all(each.startswith(_URLS) for each in images):
        raise ConfigError(
            "an image is not a URL that starts with data:, http: or https:; give one."
        )
    return tuple([Media("image", each) for each in images])
