"""Admission: accepts responses up to the gateway's limits, and ends them.

Invariant: every response that a client waits for ends with its rollout, an abort, or a failure
cause.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from aprilsched.agents.gateway.responses import NewResponse, Response, Responses
from aprilsched.agents.gateway.settings import GatewaySettings
from aprilsched.agents.serving.refusals import Refused, Unavailable
from aprilsched.errors import ConfigError
from aprilsched.kernel.core.config import SchedulerConfig
from aprilsched.kernel.shell.prompt_queue import PromptQueue
from aprilsched.kernel.shell.prompts import checked
from aprilsched.kernel.store.codec import check_storable

_MAX_NAME_CHARACTERS = 256
_STOPPED = "The gateway stops; send the same rid again to go on with this response."
_ENDED = "The gateway stops; send the prompt with these tokens elsewhere to go on."


class Admission:
    """Accepts responses.

    Args:
        responses: the open responses.
        prompts: the scheduler's source of prompts.
        settings: the gateway's limits.
        config: settings of the scheduler.

    Attributes:
        draining: whether new requests are refused because the gateway is stopping.
    """

    def __init__(
        self,
        responses: Responses,
        prompts: PromptQueue,
        settings: GatewaySettings,
        config: SchedulerConfig,
    ) -> None:
        self.draining = False
        self._responses = responses
        self._prompts = prompts
        self._settings = settings
        self._companions = config.policies.companions
        self._expiring: asyncio.TimerHandle | None = None

    @property
    def retry_s(self) -> int:
        """Seconds for Retry-After: 1, or `drain_s` while the gateway is draining."""
        return math.ceil(max(1, self._settings.drain_s if self.draining else 1))

    def check_amount(self, count: int) -> None:
        """Refuse more responses than the gateway's limit, before any is allocated.

        Raises:
            Refused: if a body requests more.
        """
        most = self._settings.max_requests
        if count > most:
            raise Refused(f"The body asks for {count} responses; ask for at most {most}.")

    @contextmanager
    def open(self, wanted: Sequence[NewResponse]) -> Generator[list[Response]]:
        """Start responses, or continue responses of the prior process with the same names.

        Either all of them start or none does; the client leaves all at the end of the block.

        Raises:
            Refused: if a prompt or a name cannot be used.
            Unavailable: if the gateway is stopping, or is at its limit of open requests.
        """
        if self.draining:
            raise Unavailable("The gateway stops and takes no new requests.")
        most = self._settings.max_requests
        for each in wanted:
            for name in (each.rid, each.group):
                if name is not None and not 0 < len(name) <= _MAX_NAME_CHARACTERS:
                    raise Refused(
                        f"A name must have 1 to {_MAX_NAME_CHARACTERS} characters, got {len(name)}."
                    )
        # Clients that ended with the prior process must not block others until `reclaim_s`.
        read = len(self._responses) - self._responses.unclaimed
        if read + self._responses.new(wanted) > most:
            raise Unavailable(
                f"The gateway has {most} open responses; try again later, or end all of them with "
                '/abort_request {"abort_all": true}.'
            )
        try:
            for each in wanted:
                checked(each.prompt, 1, companions=self._companions)
                if self._settings.store is not None:
                    check_storable(replace(each.prompt, key=each.rid))
            responses, prompts = self._responses.open(wanted)
        except ConfigError as error:
            raise Refused(str(error)) from error
        if prompts:
            self._prompts.put(*prompts)
        try:
            yield responses
        finally:
            for response in responses:
                self._responses.leave(response)

    def expire_later(self) -> None:
        """Schedule the end of the prior process's responses that no client claims in time."""
        seconds = self._settings.reclaim_s
        why = f"no client requested it within {seconds:g} s after the restart"
        loop = asyncio.get_running_loop()
        self._expiring = loop.call_later(seconds, self._responses.expire, why)

    async def drain(self) -> None:
        """Refuse new requests, and let the open responses finish.

        A response that is still open after `drain_s` ends as aborted with its tokens and the
        reason; with a store it ends without a result.
        """
        self.draining = True
        try:
            async with asyncio.timeout(self._settings.drain_s):
                await self._responses.all_read()
        except TimeoutError:
            if self._settings.store is not None:
                self._responses.interrupt_all(_STOPPED)
            else:
                self._responses.end_all(_ENDED)

    def close(self) -> None:
        """Refuse new requests."""
        self.draining = True
        if self._expiring is not None:
            self._expiring.cancel()
