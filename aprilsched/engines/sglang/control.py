"""The control calls of a server: each is bounded in time, and none of them generates.

The safe order around a refit is pause(retract), flush, update, resume. SGLang starts a pause
without waiting until it takes effect, but it keeps the order of later calls.

The client remembers what was released, because the server does not check: it dies when it wakes
memory that was not released, and continues without its memory when it is told to. A call counts as
executed unless the server refused it or could not be reached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tenacity import AsyncRetrying, retry_if_result, wait_exponential

from aprilsched.engines.base import Capabilities, GenerationRequest, PauseMode
from aprilsched.engines.http.failures import Answer, quoted
from aprilsched.engines.http.limits import HttpLimits
from aprilsched.engines.http.transport import ControlCalls
from aprilsched.engines.load import EngineLoad
from aprilsched.engines.sglang.loads import read_load
from aprilsched.engines.sglang.probe import ServerFacts, weight_label
from aprilsched.engines.sglang.wire import version_number
from aprilsched.errors import ControlTimeout, EngineRejected, EngineUnreachable

_BAD_REQUEST = _BUSY = 400
_PAUSED = 503
_CONFLICT = 409
_FLUSH_POLL_SECONDS = 0.05
_LOAD_SECONDS = 5.0
"""The bound is short, because the caller asks for a load again soon."""
_MESSAGE_BYTES = 1024


class ServerControl:
    """The control calls of an engine."""

    def __init__(
        self, name: str, server: ControlCalls, limits: HttpLimits, *, first_version: int = 0
    ) -> None:
        self._name = name
        self._server = server
        self._limits = limits
        self._first_version = first_version
        self._facts: ServerFacts | None = None
        self._released: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """Host and port; also the path, where several servers share them."""
        return self._name

    @property
    def facts(self) -> ServerFacts:
        """What the server said about itself when it was opened."""
        if self._facts is None:
            raise EngineUnreachable(self.name, "is not open; call open() before using it.")
        return self._facts

    @property
    def capabilities(self) -> Capabilities:
        """What the server can do; known after :meth:`open`."""
        return self.facts.capabilities

    async def version(self) -> int:
        """Ask for the policy version of the server's weights."""
        label = await weight_label(self.name, self._server, self._limits.control_timeout)
        return version_number(label, self._first_version)

    async def is_paused(self) -> bool | None:
        """Whether the server is paused; None where it cannot tell (before SGLang had /ready)."""
        timeout = self._limits.control_timeout
        answer = await self._server.call(
            "GET", "ready", timeout=timeout, accept=(200, _PAUSED, 404), admin=False
        )
        return None if answer.status == 404 else answer.status == _PAUSED

    async def load(self, *, metrics: bool = False) -> EngineLoad:
        """Ask for the server's load; see :class:`~aprilsched.engines.load.ReportsLoad`."""
        timeout = min(_LOAD_SECONDS, self._limits.control_timeout)
        enabled = self.facts.metrics
        return await read_load(self.name, self._server, timeout, enabled=enabled, metrics=metrics)

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding. The mode is always sent: SGLang's default aborts every request."""
        await self._control("pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Continue after a pause; refused while any of the server's memory is released."""
        if self._released:
            raise self._conflict(f"its {min(self._released)} is released; wake it first.")
        body = {"torch_empty_cache": False} if self.facts.torch_empty_cache else {}
        await self._control("continue_generation", body)

    async def flush(self) -> None:
        """Drop all cached KV; ask again at "busy", since a pause may not have taken effect yet."""
        refused = ""

        async def attempt() -> Answer:
            nonlocal refused
            answer = await self._control("flush_cache", accept=(200, _BUSY))
            refused = quoted(answer.body[:_MESSAGE_BYTES].decode("utf-8", "replace"))
            return answer

        again = AsyncRetrying(
            retry=retry_if_result(lambda answer: answer.status == _BUSY),
            wait=wait_exponential(multiplier=_FLUSH_POLL_SECONDS, max=1.0),
        )
        try:
            async with asyncio.timeout(self._limits.flush_timeout):
                await again(attempt)
        except TimeoutError as error:
            raise ControlTimeout(
                self.name,
                f"flush_cache was refused for {self._limits.flush_timeout:g} s ({refused}); "
                "pause with retract before it, and end the requests of other clients.",
            ) from error

    async def release(self, tags: Sequence[str]) -> None:
        """Release memory; the server dies unless it is paused with retract."""
        if twice := sorted(self._released.intersection(tags)):
            raise self._conflict(f"{twice[0]} is released already; release each part once.")
        await self._change_memory("release_memory_occupation", tags, self._released.union(tags))

    async def wake(self, tags: Sequence[str]) -> None:
        """Take released memory back."""
        if awake := sorted(set(tags) - self._released):
            raise self._conflict(f"{awake[0]} was not released; wake only what was.")
        await self._change_memory("resume_memory_occupation", tags, self._released.difference(tags))

    async def released(self) -> frozenset[str]:
        """Ask what is released now; nothing is if the server was restarted since."""
        await self._forget_releases_of_prior_run()
        return self._released

    async def _change_memory(self, path: str, tags: Sequence[str], after: frozenset[str]) -> None:
        before, self._released = self._released, after
        try:
            # The call is not repeated: a second wake kills the server.
            await self._server.call(
                "POST",
                path,
                {"tags": list(tags)},
                timeout=self._limits.control_timeout,
                repeatable=False,
            )
        except (EngineRejected, EngineUnreachable):
            self._released = before
            raise

    async def _forget_releases_of_prior_run(self) -> None:
        """A server that is not paused was restarted, so it has all of its memory."""
        if self._released and await self.is_paused() is False:
            self._released = frozenset()

    def _check_ids(self, request: GenerationRequest) -> None:
        vocab = self.facts.vocab_size
        largest = int(request.input_ids.max(initial=0))
        # SGLang 0.5.21 does not check: the lookup in the embedding fails and the server dies.
        if vocab is not None and largest >= vocab:
            raise EngineRejected(
                self.name,
                f"request {request.request_id} holds token id {largest}, and the model knows "
                f"{vocab}; tokenize the prompt with this model's tokenizer.",
                status=_BAD_REQUEST,
            )

    def _conflict(self, why: str) -> EngineRejected:
        return EngineRejected(self.name, why, status=_CONFLICT)

    async def _control(
        self, path: str, body: object = None, *, accept: tuple[int, ...] = (200,)
    ) -> Answer:
        return await self._server.call(
            "POST", path, body, timeout=self._limits.control_timeout, accept=accept
        )

    async def _abort(self, request_id: str, timeout: float) -> None:  # noqa: ASYNC109
        await self._server.call("POST", "abort_request", {"rid": request_id}, timeout=timeout)
