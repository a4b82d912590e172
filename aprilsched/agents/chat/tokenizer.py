"""The model's tokenizer: token ids for text and chats, and text for token ids.

transformers loads it from a local folder, and runs no code from that folder. Streamed text comes
from the ``DecodeStream`` of tokenizers, which emits only whole characters.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from aprilsched.agents.chat.templates import ChatTemplate
from aprilsched.agents.serving.refusals import Unavailable
from aprilsched.errors import ConfigError
from aprilsched.kernel.values.extras import extra
from aprilsched.kernel.values.files import read_regular

log = logging.getLogger("aprilsched")

T = TypeVar("T")

_FILES = ("tokenizer.json", "tokenizer_config.json")
_CONTEXT = 6
"""Prompt tokens that are decoded together with the first response tokens. Many tokenizers write
the space before a word only if another token precedes it."""
_NO_LIMIT = 2**40
"""transformers writes a larger number if no limit is known."""
_QUICK = 4096
"""Characters, or tokens, that are converted within a millisecond, too short for a thread."""
_MOST_TEXT = 2**23
"""Characters that one request may have tokenised; this many take 3 s and 1 GB of memory."""
_LONGEST_TOKEN = 128
"""Characters of the longest token that a tokenizer has: a run of blanks."""
_AT_WORK = 2**28
"""Characters that wait for a thread or are converted; a body has up to 2^26 bytes."""
_THREADS = 2
_HELD = 8
"""Buffered tokens after which they are decoded even if incomplete.

A UTF-8 character has at most 4 bytes, so a longer run cannot be the prefix of one.
"""


def load_tokenizer(folder: Path, response_template: Path | None = None) -> ModelTokenizer:
    """Load the tokenizer in `folder`.

    Args:
        folder: the model's folder: tokenizer.json, tokenizer_config.json, and optionally
            generation_config.json.
        response_template: JSON file that describes how the model writes tool calls and reasoning,
            in the form of transformers. None takes the one in tokenizer_config.json, or TRL's for
            the same chat template if TRL is installed.

    Raises:
        ConfigError: if no tokenizer can be loaded without running code from the folder.
        MissingExtra: if transformers is not installed.
    """
    if not any((folder / name).is_file() for name in _FILES):
        raise ConfigError(f"{folder} has no tokenizer.json; give the folder of the model as saved.")
    with extra("gateway"):
        from transformers import AutoTokenizer
    try:
        read: Any = AutoTokenizer
        loaded: Any = read.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers may raise anything.
        raise ConfigError(f"The tokenizer in {folder} cannot be loaded: {error}") from error
    return wrapped_tokenizer(loaded, folder, response_template)


def wrapped_tokenizer(
    loaded: Any, folder: Path, response_template: Path | None = None
) -> ModelTokenizer:
    """Wrap a transformers tokenizer that is already loaded; its model may be in `folder`.

    See :func:`load_tokenizer`.

    Raises:
        ConfigError: if it cannot be used.
    """
    if getattr(loaded, "backend_tokenizer", None) is None:
        raise ConfigError(
            f"The tokenizer in {folder} is of a kind that gives no text token by token; save it "
            "as tokenizer.json."
        )
    template = _known_template(loaded) if response_template is None else _read(response_template)
    return ModelTokenizer(loaded, ends=_ends(folder), response_template=template)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return msgspec.json.decode(read_regular(path), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"The response template {path} cannot be read: {error}") from error


def _known_template(loaded: Any) -> Mapping[str, Any] | None:
    """Return the response template in the tokenizer's files, or TRL's for its chat template."""
    found = getattr(loaded, "response_template", None)
    if found is not None or loaded.chat_template is None:
        return found
    try:
        from trl.chat_template_utils import add_response_schema

        add_response_schema(loaded)  # pyright: ignore[reportUnknownMemberType]
    except (ImportError, ValueError):  # TRL is not installed, or does not know the template.
        return None
    return getattr(loaded, "response_template", None)


def _ends(folder: Path) -> frozenset[int]:
    """Return the tokens at which the model ends a response, by its generation_config.json."""
    try:
        config = msgspec.json.decode(read_regular(folder / "generation_config.json"))
        found = config["eos_token_id"]
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        return frozenset()
    several = cast("list[object]", found) if isinstance(found, list) else [found]
    return frozenset(each for each in several if isinstance(each, int))


class ModelTokenizer:
    """A transformers tokenizer with the methods that a gateway needs; threads may share it.

    Attributes:
        wrapped: the tokenizer of transformers.
        ends: the tokens that end a response.
        render: renders a chat; see :meth:`ChatTemplate.render`.
        knows_tools: whether the chat template has a place for tool definitions.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        ends: frozenset[int] = frozenset(),
        response_template: Mapping[str, Any] | None = None,
    ) -> None:
        self.wrapped = tokenizer
        self._backend: Any = tokenizer.backend_tokenizer
        # The file's truncation and padding would cut or extend a prompt.
        self._backend.no_truncation()
        self._backend.no_padding()
        eos: int | None = tokenizer.eos_token_id
        self.ends = ends if eos is None else ends | {eos}
        self._template = self._load_template(response_template)
        self.render = ChatTemplate(tokenizer).render
        self.knows_tools = "tools" in str(tokenizer.chat_template)
        # Not asyncio's default pool: other work waits for it, and with its many threads, at 1 GB
        # each, memory would run out.
        self._threads = ThreadPoolExecutor(_THREADS, "aprilsched-text")
        self._at_work = 0

    @staticmethod
    def _load_template(template: Mapping[str, Any] | None) -> Any:
        if template is None:
            return None
        from transformers.utils.chat_parsing import response_templates

        load: Any = response_templates.load_response_template  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        try:
            return load(dict(template))
        except ValueError as error:
            raise ConfigError(f"The response template cannot be used: {error}") from error

    @functools.cached_property
    def special_texts(self) -> re.Pattern[str]:
        """Finds the texts of special tokens."""
        tokens: Any = self._backend.get_added_tokens_decoder().values()
        texts = sorted((each.content for each in tokens if each.special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or "(?!)")

    @property
    def size(self) -> int:
        """Number of token ids, from 0 on."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def parses(self) -> bool:
        """Whether the model's format of tool calls and reasoning is known."""
        return self._template is not None

    @property
    def context_tokens(self) -> int | None:
        """Maximum input in tokens according to the tokenizer's files; None if they set none."""
        longest = int(self.wrapped.model_max_length)
        return longest if longest < _NO_LIMIT else None

    def check_size(self, *texts: str, context: int | None = None) -> None:
        """Refuse texts that are too long to be tokenised for one request.

        Args:
            texts: the texts.
            context: tokens of the longest input; None takes :attr:`context_tokens`.

        Raises:
            ConfigError: if one cannot fit the context, or if they have more than 2^23 characters.
        """
        size, longest = sum(map(len, texts)), max(map(len, texts), default=0)
        context = self.context_tokens if context is None else context
        if context is not None and longest > context * _LONGEST_TOKEN:
            raise ConfigError(
                f"A text has {longest} characters, which cannot fit the model's context of "
                f"{context} tokens; shorten it."
            )
        if size > _MOST_TEXT:
            raise ConfigError(
                f"The text of a request must have at most {_MOST_TEXT} characters, got {size}; "
                "shorten it."
            )

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of `text`; `special` adds the model's special tokens around it."""
        if len(text) <= _QUICK:
            return self._backend.encode(text, add_special_tokens=special).ids
        # Only the batch calls release the GIL: `encode` of 1 MiB blocks the loop for 0.8 s, even
        # from a thread (tokenizers 0.22.2).
        return self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of `token_ids`; an unknown id has no text."""
        if len(token_ids) <= _QUICK:
            return self._backend.decode(token_ids, skip_special_tokens=skip_special)
        return self._backend.decode_batch([token_ids], skip_special_tokens=skip_special)[0]

    async def work_out(self, make: Callable[[], T], *, size: int, is_required: bool = False) -> T:
        """Return the result of `make`, which runs in a thread if `size` is large.

        A cancellation waits until the thread is finished.

        Args:
            make: the work.
            size: characters or tokens to process.
            is_required: whether to run `make` even if too much text is waiting or being converted,
                and even if the caller is cancelled before `make` starts.

        Raises:
            Unavailable: if too much text is waiting or being converted.
        """
        if size <= _QUICK:
            return make()
        if self._at_work + size > _AT_WORK and not is_required:
            raise Unavailable("There is too much text to tokenise; try again later.")
        self._at_work += size
        work = self._threads.submit(make)
        waiting = asyncio.wrap_future(work)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if not is_required:
                work.cancel()  # It may not have started.
            while not waiting.done():  # Nothing else may change what `make` works on.
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([waiting])
            raise
        finally:
            self._at_work -= size

    def detokenizer(self, prompt: Sequence[int], *, skip_special: bool) -> Detokenizer:
        """Return a detokenizer that decodes a response to `prompt` token by token."""
        return Detokenizer(self._backend, prompt[-_CONTEXT:], skip_special=skip_special)

    def parser(self, prompt: str, tools: Sequence[Mapping[str, Any]] | None) -> Any:
        """Return a parser of a response to the rendered `prompt`; None if :attr:`parses` is False.

        It raises nothing for the text of a region. If a region cannot be parsed, its event
        ``region_close`` has the value None, and the region's whole text as ``raw`` if it has a
        delimiter.
        """
        if self._template is None:
            return None
        return _parser_class()(self._template, prompt, tools=[dict(tool) for tool in tools or ()])


@functools.cache
def _parser_class() -> Any:
    from transformers.utils.chat_parsing import ResponseParser

    base: Any = ResponseParser

    class Parser(base):
        """Continues after a region that cannot be parsed; transformers' parser stops there."""

        def __init__(self, *args: Any, **more: Any) -> None:
            self._region = self._response = 0
            """Where the open region, with its delimiter, and the response start in the buffer."""
            super().__init__(*args, **more)  # pyright: ignore[reportUnknownMemberType]
            self._response = len(self._buffer)

        def _open_explicit(self, events: list[Any], field: Any, m: Any) -> None:
            self._region = m.start()
            super()._open_explicit(events, field, m)  # pyright: ignore[reportUnknownMemberType]

        def _close_current(self, events: list[Any]) -> None:
            name, is_closed = self._current, self._opened
            try:
                super()._close_current(events)  # pyright: ignore[reportUnknownMemberType]
            except Exception as error:  # The parsers of regions may raise anything.
                log.debug("a sampled %s cannot be parsed and stays text: %r", name, error)
                events.append({"type": "region_close", "field": name, "value": None})
                self._reset_to_implicit()
            if is_closed and name != self._implicit_name:
                since = max(self._region, self._response)
                events[-1]["raw"] = self._buffer[since : self._pos]

    return Parser


class Detokenizer:
    """Turns the tokens of one response into text; every piece consists of whole characters."""

    def __init__(self, backend: Any, before: Sequence[int], *, skip_special: bool) -> None:
        self._backend = backend
        self._skip = skip_special
        self._held: list[int] = []
        """Tokens whose text is not emitted yet."""
        # If the prompt's text ends within a character, that text would be emitted again.
        whole = not self._decode(before).endswith("\ufffd")
        self._stream = self._open_stream(before if whole else ())

    def push(self, token_id: int) -> str:
        """Return the text that is complete with `token_id`."""
        text = self._step(token_id)
        if len(self._held) < _HELD:
            return text
        # The last three tokens may be the prefix of a character. The earlier ones are invalid
        # bytes or have no text.
        *others, a, b, c = self._held
        self._held = []
        self._stream = self._open_stream(())
        return self._decode(others) + self._step(a) + self._step(b) + self._step(c)

    def _step(self, token_id: int) -> str:
        self._held.append(token_id)
        try:
            text: str | None = self._stream.step(self._backend, token_id)
        except Exception:
            # Invalid bytes may become valid text with this token. The stream rejects that ("Invalid
            # prefix encountered").
            return self.rest()
        if text is None:
            return ""
        self._held.clear()
        return text

    def text_of(self, token_id: int) -> str:
        """Return the text of one token by itself, also of a special one."""
        return self._backend.decode([token_id], skip_special_tokens=False)

    def rest(self) -> str:
        """Return the text of the buffered tokens, with U+FFFD for invalid bytes."""
        held, self._held = self._held, []
        if not held:
            return ""
        text = self._decode(held)
        self._stream = self._open_stream(() if text.endswith("\ufffd") else held)
        return text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._backend.decode(list(token_ids), skip_special_tokens=self._skip)

    def _open_stream(self, before: Sequence[int]) -> Any:
        from tokenizers.decoders import DecodeStream

        return DecodeStream(list(before), skip_special_tokens=self._skip)
