"""The gateway's tokenizer as handlers see it: there is one, or a sentence says why not.

What takes long, such as a chat with megabytes of tool definitions, is done in threads, for so many
characters at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from aprilsched.errors import ConfigError
from aprilsched.gateway.tokenizer import ModelTokenizer, load_tokenizer
from aprilsched.serving.refusals import Refused, Unavailable

__all__ = ["Texts"]

T = TypeVar("T")

log = logging.getLogger("aprilsched")

_QUICK = 4096
"""Characters that become tokens within a millisecond, for which a thread is not worth it."""
_AT_WORK = 2**28
"""Characters that become tokens at a time; a body has up to 2^26 bytes."""
_LONGEST_TOKEN = 128
"""Characters of the longest token that a tokenizer has: a run of blanks."""


class Texts:
    """What handlers ask about text.

    Args:
        folder: the model's tokenizer; None takes the folder of the model that the engines have
            loaded, if it can be read here.
        response_template: see :func:`~aprilsched.gateway.tokenizer.load_tokenizer`.
    """

    def __init__(self, folder: Path | None = None, response_template: Path | None = None) -> None:
        self._folder = folder
        self._template = response_template
        self._tokenizer: ModelTokenizer | None = None
        self._why_not = "the gateway is not started"
        self._at_work = 0

    async def open(self, model_path: str) -> None:
        """Load the tokenizer; `model_path` is the engines' model.

        Raises:
            ConfigError: if the named tokenizer cannot be used. The one of the engines' model is not
                needed, and is left out then.
        """
        if self._tokenizer is not None:
            return
        folder = Path(model_path) if self._folder is None else self._folder
        if self._folder is None and not model_path:
            self._why_not = "the engines tell no folder of their model"
            return
        try:
            self._tokenizer = await asyncio.to_thread(load_tokenizer, folder, self._template)
        except ConfigError as error:
            if self._folder is not None or self._template is not None:
                raise
            self._why_not = str(error)
            log.info("the gateway takes no text: %s", error)

    @property
    def there(self) -> bool:
        """Whether there is a tokenizer."""
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> ModelTokenizer:
        """The model's tokenizer.

        Raises:
            Refused: if there is none.
        """
        if self._tokenizer is None:
            raise Refused(
                f"The gateway has no tokenizer and cannot take text ({self._why_not}); start it "
                "with --tokenizer, or provide input_ids to /generate."
            )
        return self._tokenizer

    def context(self, engines: int | None) -> int | None:
        """Tokens of the longest context, of which the engines know as much as `engines`; None if
        neither they nor the tokenizer's files tell it."""
        known = (engines, None if self._tokenizer is None else self._tokenizer.context_tokens)
        return min((each for each in known if each is not None), default=None)

    async def encoded(
        self, texts: Sequence[str], context: int | None, *, special: bool = True
    ) -> list[list[int]]:
        """The token ids of each text; `context` is what :meth:`context` gives.

        Raises:
            Refused: if there is no tokenizer, or if a text cannot fit the context.
            Unavailable: if too much text is at work.
        """
        tokenizer = self.tokenizer
        longest = max(map(len, texts), default=0)
        if context is not None and longest > context * _LONGEST_TOKEN:
            raise Refused(
                f"A text has {longest} characters, which cannot fit the model's context of "
                f"{context} tokens; shorten it."
            )
        return await self.prepared(
            lambda: [tokenizer.encode(text, special=special) for text in texts],
            size=sum(map(len, texts)),
        )

    async def prepared(self, make: Callable[[], T], *, size: int) -> T:
        """What `make` gives for `size` characters, in a thread if they are many.

        Raises:
            Unavailable: if too much text is at work.
        """
        if size <= _QUICK:
            return make()
        if self._at_work + size > _AT_WORK:
            raise Unavailable("The gateway has too much text to tokenize; try again later.")
        self._at_work += size

        def done(_: object) -> None:
            self._at_work -= size

        # A client that leaves does not end the thread, which counts until it has ended.
        work = asyncio.ensure_future(asyncio.to_thread(make))
        work.add_done_callback(done)
        return await asyncio.shield(work)
