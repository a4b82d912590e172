"""Requests and results independent of dialect: each dialect parses into and renders from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from aprilsched.agents.serving.refusals import error_content
from aprilsched.agents.serving.streams import DONE, Event, frame_item
from aprilsched.errors import ConfigError
from aprilsched.types import FinishReason, Int32Array

_MOST_STOPS = 64
_STOP_CHARACTERS = 4096
"""Total characters of all stop strings. At every token the end of the text is compared with every
prefix of each of them, which takes up to 0.6 ms."""


def check_stops(stops: Sequence[str]) -> None:
    """Refuse stop strings that cost too much.

    Raises:
        ConfigError: if they are too many, too long or empty.
    """
    if len(stops) > _MOST_STOPS:
        raise ConfigError(f"`stop` must have at most {_MOST_STOPS} strings, got {len(stops)}.")
    if not all(stops):
        raise ConfigError("`stop` must have no empty string; leave it out.")
    if (size := sum(map(len, stops))) > _STOP_CHARACTERS:
        raise ConfigError(f"`stop` must have at most {_STOP_CHARACTERS} characters, got {size}.")


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The request parameters that end the text and select parts of it."""

    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool | None = None

    def __post_init__(self) -> None:
        check_stops(self.stops)

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


def prompts_of(given: str | Iterable[Any], field: str) -> list[str | list[int]]:
    """Return the prompts in a field: a text, token ids, or a list of several of either.

    Raises:
        ConfigError: if they are of several kinds, or one is empty.
    """
    several: list[Any] = [given] if isinstance(given, str) else list(given)
    kinds: set[type] = {type(each) for each in several}
    if len(kinds) > 1:
        raise ConfigError(f"{field} has texts, numbers and lists of numbers mixed; give one kind.")
    if kinds == {int}:
        several = [several]
    if not several or not all(several):
        raise ConfigError(f"{field} cannot be empty.")
    return several


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A chat to be answered.

    Attributes:
        messages: all messages, in OpenAI's form.
        tools: definitions of tools, in OpenAI's form.
        options: variables of the chat template.
        goes_on: whether the answer continues the last message.
        forced: whether the answer is a list of calls by a schema.
    """

    messages: Sequence[Event]
    tools: Sequence[Event] | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    goes_on: bool = False
    forced: bool = False


@dataclass(frozen=True, kw_only=True)
class Question:
    """One prompt of a request.

    Attributes:
        prompt: a text, token ids or a chat.
        params: sampling parameters, by the names of any library.
        text: its text options.
        max_tokens: tokens of the answer; None for the dialect's default.
    """

    prompt: str | list[int] | Chat
    params: Mapping[str, Any]
    text: TextOptions
    max_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request of a client.

    Attributes:
        questions: the prompts.
        n: number of responses per prompt.
        is_listed: whether SGLang's answer is a list.
        name: the client's request id; a list has a name for each response.
        model: the requested model; empty for any.
        stream: whether the answer is a stream.
        repeats: whether each event of a stream repeats the output so far.
        logprobs: whether the answer contains the log-probability of each token.
        likely: number of top logprobs per token, and the field that sets it; None if the number is
            in the further fields of the request.
        token_ids: whether the answer contains token ids in addition to its text.
        usage: whether a stream ends with the usage.
        seed: seed of the first response; each further one adds 1. None leaves seeds to `params`.
        is_constrained: whether the engine must constrain the output to a grammar.
        has_media: whether it has media outside of messages.
    """

    questions: Sequence[Question]
    n: int = 1
    is_listed: bool = False
    name: str | list[str] | None = None
    model: str = ""
    stream: bool = False
    repeats: bool = False
    logprobs: bool = False
    likely: tuple[str, int] | None = None
    token_ids: bool = False
    usage: bool = False
    seed: int | None = None
    is_constrained: bool = False
    has_media: bool = False

    @property
    def count(self) -> int:
        """Number of responses."""
        return len(self.questions) * self.n


@dataclass(frozen=True, kw_only=True)
class End:
    """The end of a response.

    Attributes:
        reason: why it ended.
        matched: the stop string or token that ended it.
        why: cause of an abort.
        message: the whole message, in OpenAI's form.
        versions: further fields with the version of the weights of each token.
    """

    reason: FinishReason | str
    matched: str | int | None = None
    why: str = "Aborted"
    message: Event = field(default_factory=dict[str, Any])
    versions: Event = field(default_factory=dict[str, Any])

    @property
    def reason_of_message(self) -> str:
        """ "stop", "length", "abort", or "tool_calls" if the message ends with calls."""
        calls = self.reason == "stop" and self.message.get("tool_calls")
        return "tool_calls" if calls else self.reason


Likely = list[tuple[float, int, None]]
"""The top logprobs at one position: log-probability, token id and no text."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """New tokens of one response; its parts, concatenated, are the whole response.

    Attributes:
        index: number of the response in the answer.
        name: its name.
        prompt_ids: int32 [n], the tokens of its prompt.
        start: number of earlier tokens.
        likely: the top logprobs at each token's position; empty if not requested.
        text: new text; it may lag behind the tokens, except in the last part. None without a
            tokenizer.
        changes: changes of the message, in OpenAI's form of ``delta``.
        rows: fields with the rows of companions, in SGLang's form.
        end: the end, in the last part.
    """

    index: int = 0
    name: str = ""
    prompt_ids: Int32Array
    start: int = 0
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    likely: Sequence[Likely] = ()
    text: str | None
    changes: Sequence[Event] = ()
    rows: Event = field(default_factory=dict[str, Any])
    end: End | None = None


@dataclass(frozen=True, kw_only=True)
class Names:
    """The names that an answer needs from its server.

    Attributes:
        answer: the id of the answer.
        model: the name of the model.
        token: the text of a token.
        label: the label of the newest weights.
    """

    answer: str
    model: str
    token: Callable[[int], str]
    label: Callable[[], str]


class Dialect(ABC):
    """One API: the class parses requests, and an instance renders the answer to one of them.

    Attributes:
        body: the type of a request body.
        default_tokens: max tokens of a request that sets none; None for what fits the context.
        is_native: whether it is the engines' own API, which checks lengths and needs no text.
        survives_failure: whether an answer continues when one of its responses fails.
        done: ends a stream on the wire.
        ping: keeps a stream open on the wire; clients see no event.
        frame: encodes an event for the wire.
        error: returns the content of an error with its status.
        stream_error: returns the event for an error after a stream has started.
    """

    body: ClassVar[type[Any]]
    default_tokens: ClassVar[int | None] = None
    is_native: ClassVar[bool] = False
    survives_failure: ClassVar[bool] = False
    done: ClassVar[bytes] = DONE
    ping: ClassVar[bytes] = b": the policy is at work\n\n"
    frame: ClassVar[Callable[[Event], bytes]] = staticmethod(frame_item)
    error: ClassVar[Callable[[str, int], Event]] = staticmethod(error_content)
    stream_error: ClassVar[Callable[[str, int], Event]] = staticmethod(error_content)

    def __init__(self, asked: Asked, names: Names) -> None:
        self._asked, self._names = asked, names

    @staticmethod
    @abstractmethod
    def parse(body: Any) -> Asked:
        """Parse a body.

        Raises:
            ConfigError: if no server could answer it.
        """

    @abstractmethod
    def whole(self, wholes: Sequence[Part]) -> Any:
        """Return the answer as a whole."""

    @abstractmethod
    def events(self, part: Part) -> Iterable[Event]:
        """Return the events of a part."""

    def first(self) -> Iterable[Event]:
        """Return the first events of a stream."""
        return ()

    def last(self, wholes: Sequence[Part]) -> Iterable[Event]:
        """Return the events after the last part of each response; `wholes` are the responses."""
        return ()
