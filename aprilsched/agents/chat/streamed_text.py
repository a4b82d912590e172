"""The text of a token stream, in whole characters."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from aprilsched.agents.chat.tokenizer import Detokenizer, ModelTokenizer, load_tokenizer
from aprilsched.agents.serving.refusals import Refused
from aprilsched.errors import ConfigError
from aprilsched.types import Prompt

log = logging.getLogger("aprilsched")


# The gateway's tokenizer as handlers see it. Without one, a sentence gives the reason.


class Texts:
    """The gateway's tokenizer, which may be missing.

    Args:
        folder: the model's tokenizer; None takes the folder of the engines' model, if this machine
            can read it.
        response_template: see :func:`~aprilsched.agents.chat.tokenizer.load_tokenizer`.

    Attributes:
        folder: the folder of the loaded tokenizer; empty without one.
    """

    def __init__(self, folder: Path | None = None, response_template: Path | None = None) -> None:
        self._folder = folder
        self._template = response_template
        self._tokenizer: ModelTokenizer | None = None
        self._why_not = "the gateway is not started"
        self.folder = ""

    async def open(self, *folders: str) -> None:
        """Load the tokenizer from the first of `folders` that has one, unless one is configured.

        Raises:
            ConfigError: if the configured tokenizer cannot be used. The tokenizer of the engines'
                model is optional, so an error there is not raised.
        """
        if self._tokenizer is not None:
            return
        found = [Path(each) for each in folders if each] if self._folder is None else [self._folder]
        if not found:
            self._why_not = "the engines report no folder of their model"
        for folder in found:
            try:
                self._tokenizer = await asyncio.to_thread(load_tokenizer, folder, self._template)
                self.folder = str(folder)
                return
            except ConfigError as error:
                if self._folder is not None or (self._template is not None and folder is found[-1]):
                    raise
                self._why_not = str(error)
        log.warning(
            "the gateway takes no text, and chats get 400: %s; start it with --tokenizer PATH",
            self._why_not,
        )

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

    def detokenizer(self, prompt: Prompt, skip_special: bool) -> Detokenizer | None:
        """Return a detokenizer for a response to `prompt`; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        return self._tokenizer.detokenizer(prompt.input_ids.tolist(), skip_special=skip_special)

    def text_of(self, token_id: int) -> str:
        """Return the text of one token by itself, also of a special one."""
        return self.tokenizer.decode([token_id], skip_special=False)

    def context(self, engines: int | None) -> int | None:
        """Return the maximum context in tokens: the least of `engines` and the tokenizer's files.

        None if neither is known.
        """
        known = (engines, None if self._tokenizer is None else self._tokenizer.context_tokens)
        return min((each for each in known if each is not None), default=None)

    async def encode_texts(
        self, texts: Sequence[str], context: int | None, *, special: bool = True
    ) -> list[list[int]]:
        """Return the token ids of each text; `context` is the result of :meth:`context`.

        Raises:
            Refused: if the gateway has no tokenizer.
            ConfigError: if the texts are too long.
            Unavailable: if too much text is waiting or being converted.
        """
        tokenizer = self.tokenizer
        tokenizer.check_size(*texts, context=context)
        return await tokenizer.work_out(
            lambda: [tokenizer.encode(text, special=special) for text in texts],
            size=sum(map(len, texts)),
        )
