"""One server under examination, and the lines of its report.

The server is left in its original state. When a check ends, its requests are aborted and its pause
is continued, even if the examination is cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

from aprilsched.errors import EngineError
from aprilsched.kernel.engines.generations import despite_cancellation
from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.kernel.engines.vllm import VLLMEngine
from aprilsched.testing.contract import (
    ENDLESS,
    PROMPT,
    Check,
    EndedTooSoon,
    OtherTokens,
    Subject,
    greedy,
    until,
)

Status: TypeAlias = Literal["pass", "warn", "fail"]

CHECK_TIMEOUT_S = 60.0
"""Longest time of a check of the contract."""
IDLE_TIMEOUT_S = 3.0
"""Longest wait for the end of a request whose last token has arrived."""
MIN_SETTLE_S = 0.1
"""Shortest time in which a pause takes effect after its call has returned."""
MAX_ATTEMPTS = 3
"""Attempts at a check whose response ended too soon, as on a busy machine."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a check, and what the user can do about it; empty for nothing."""

    status: Status
    seen: str
    to_do: str = ""


def one_line(error: Exception) -> str:
    """Return the message of an error as a part of a line."""
    return " ".join(str(error).split()).rstrip(".")


class LeftOut(Exception):
    """A check cannot be made without disturbing the server; the text is the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A line of the report: the observation, the meaning of the check, and the remedy."""

    check: str
    status: Status
    seen: str
    meaning: str
    to_do: str


class Server:
    """An open engine, its original state, and the subject of the contract's checks."""

    def __init__(self, engine: SGLangEngine | VLLMEngine, refit: str | None) -> None:
        self.engine, self.refit, self.facts = engine, refit, engine.facts
        self.subject = Subject(engine=engine, busy=self.requests, settle_s=MIN_SETTLE_S)
        if (limit := self.facts.context_tokens) is not None:
            self.subject.endless = min(ENDLESS, limit - 2 * len(PROMPT))
        self._may_be_paused = False
        self.is_paused = False
        """Whether another client has paused it."""
        self.is_owned = False
        """Whether a scheduler or gateway owns it, which would stop at a pause of this command."""
        self.others: int | None = None
        """Requests of other clients; None if the server does not report its load."""

    async def look(self) -> None:
        """Find out whether other clients use or have paused it, and how fast it responds."""
        self.is_paused = bool(await self.engine.is_paused())
        if not self.is_paused:
            self.is_owned = not await self.engine.claim()
            await self.engine.disclaim()
        with suppress(EngineError):
            self.others = await self.requests()
            if self.others:
                await self.is_idle()
                self.others = await self.requests()
        if self.is_paused:
            return
        started = time.monotonic()
        # A server that gives no tokens fails the checks.
        with suppress(EngineError, AssertionError, TimeoutError):
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                chunks = len((await self.subject.whole(greedy())).chunks)
                interval_s = (time.monotonic() - started) / chunks
                self.subject.settle_s = max(MIN_SETTLE_S, 2 * interval_s)

    async def requests(self) -> int:
        """Return the number of requests that run or wait.

        Raises:
            EngineError: if the server does not report it.
        """
        load = await self.engine.load()
        return load.running + load.queued

    async def is_idle(self) -> bool:
        """Wait until it has no requests; return whether that happened in time."""
        with suppress(TimeoutError):
            await until(self.subject.idle, IDLE_TIMEOUT_S)
            return True
        return False

    async def check_free(self, *, alone: bool = True) -> None:
        """Refuse a check on a paused server, or an `alone` check on a server in use.

        Raises:
            LeftOut: if another client uses the server, or may do so.
            EngineError: if it does not answer.
        """
        if self.is_paused:
            raise LeftOut("another client has paused it")
        if not alone:
            return
        if self.is_owned:
            raise LeftOut("a scheduler or gateway owns it; examine it before that starts")
        if self.others is None:
            raise LeftOut("it does not report whether other clients have requests on it")
        if self.others or not await self.is_idle():
            raise LeftOut("requests of other clients are on it")
        self._may_be_paused = True

    async def take_back(self) -> None:
        """Abort the requests of a check and continue its pause; failed calls are retried at the
        end."""
        with suppress(EngineError):
            await self.subject.leave()
            if self._may_be_paused:
                await self.engine.resume()
                self._may_be_paused = False


Judge: TypeAlias = Callable[[Server], Awaitable[Verdict | None]]
"""Examines a server; None if the check is about servers of another program."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the report: its name, and the function that examines the server."""

    name: str
    judge: Judge

    @property
    def meaning(self) -> str:
        """What the check is about, in one paragraph."""
        return " ".join((self.judge.__doc__ or "").split())

    async def finding(self, server: Server) -> Finding | None:
        """Return the line about a server, or None."""
        try:
            verdict = await self.judge(server)
        except LeftOut as left:
            verdict = Verdict("warn", f"left out: {left}")
        except EngineError as error:
            verdict = Verdict("fail", one_line(error), "look at its log")
        if verdict is None:
            return None
        return Finding(check=self.name, meaning=self.meaning, **asdict(verdict))


def kept(check: Check, to_do: str, *, alone: bool = True) -> Judge:
    """Return the judge of a check of the contract.

    Greedy tokens depend on the batch on most GPUs, so other tokens are a warning.

    Args:
        check: the check.
        to_do: what the user can do if the server does not pass.
        alone: whether it pauses the server or counts its requests.
    """

    async def judge(server: Server) -> Verdict:
        for _ in range(MAX_ATTEMPTS):
            await server.check_free(alone=alone)
            started = time.monotonic()
            try:
                async with asyncio.timeout(CHECK_TIMEOUT_S):
                    await check(server.subject)
            except EndedTooSoon:
                continue
            except OtherTokens as error:
                return Verdict("warn", str(error))
            except TimeoutError:
                return Verdict("fail", f"it did not end within {CHECK_TIMEOUT_S:g} s", to_do)
            except (AssertionError, EngineError) as error:
                return Verdict("fail", one_line(error), to_do)
            finally:
                await despite_cancellation(server.take_back())
            return Verdict("pass", f"kept in {time.monotonic() - started:.1f} s")
        raise LeftOut("each response was over before anything was done to it")

    judge.__doc__ = check.__doc__
    return judge
