"""The lines of a report, and how a check comes to its line: it asks for what it needs to see.

What an experiment shows is kept, because several checks may ask for it. An experiment that was not
made, that broke off or was not over in time leaves its checks out, with the reason.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias, TypeVar

import msgspec

from aprilsched.errors import EngineError

Status: TypeAlias = Literal["pass", "warn", "fail"]
T = TypeVar("T")

SECONDS = 40.0
"""Longest time of an experiment."""
NO_STRAGGLERS = 'use straggler="abort"'
"""What to do about a server that cannot keep stragglers through a pause."""
_AGAIN = "look at its log, and examine it again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a check found, what that means, what the scheduler does about it, what you can do."""

    check: str
    status: Status
    seen: str
    meaning: str
    action: str
    to_do: str = ""
    """What the user can do about it; empty if there is nothing to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The result of a check; the check has the rest of the line."""

    status: Status
    seen: str
    to_do: str = ""


def passed(seen: str) -> Verdict:
    """The server does what the scheduler needs, or the scheduler itself avoids the hazard."""
    return Verdict(status="pass", seen=seen)


def warned(seen: str, to_do: str = "") -> Verdict:
    """It depends on the server and was not tried, or the user should know about it."""
    return Verdict(status="warn", seen=seen, to_do=to_do)


def failed(seen: str, to_do: str) -> Verdict:
    """The scheduler cannot work with the server as intended, until the user has done `to_do`."""
    return Verdict(status="fail", seen=seen, to_do=to_do)


class LeftOut(Exception):
    """An experiment has shown nothing, of which its checks have this verdict."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.seen)
        self.verdict = verdict


def left_out(why: str) -> LeftOut:
    """For an experiment that is not made."""
    return LeftOut(warned(f"left out: {why}"))


class Examined:
    """A server under examination."""

    def __init__(self) -> None:
        self._seen: dict[object, Any] = {}

    async def seen(self, experiment: Callable[[Self], Awaitable[T]], seconds: float = SECONDS) -> T:
        """What an experiment shows, which is made once, within so many seconds.

        Raises:
            LeftOut: if it has shown nothing.
        """
        if experiment not in self._seen:
            # Also if the check that asks has no time left: the next one must not wait as long.
            over = failed(f"the probe was not over after {seconds:g} s", _AGAIN)
            self._seen[experiment] = LeftOut(over)
            try:
                async with asyncio.timeout(seconds):
                    self._seen[experiment] = await experiment(self)
            except TimeoutError:
                pass
            except LeftOut as left:
                self._seen[experiment] = left
            except EngineError as error:
                self._seen[experiment] = LeftOut(failed(f"the probe broke off ({error})", _AGAIN))
            except (msgspec.MsgspecError, KeyError, TypeError, AttributeError, ValueError) as error:
                what = f"its answers have another form ({type(error).__name__}: {error})"
                self._seen[experiment] = LeftOut(failed(what, "update the server"))
            finally:
                with suppress(EngineError):  # It is tried once more at the end.
                    await self.take_back()
        found = self._seen[experiment]
        if isinstance(found, LeftOut):
            raise found
        return found

    async def take_back(self) -> None:
        """End what experiments have begun."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line of the report: `judge` gives the result, the rest is constant."""

    name: str
    judge: Callable[[Any], Awaitable[Verdict]]
    meaning: str
    action: str
    seconds: float = SECONDS

    async def finding(self, server: Examined) -> Finding:
        """The line of the report."""
        try:
            verdict = await server.seen(self.judge, self.seconds)
        except LeftOut as left:
            verdict = left.verdict
        return Finding(
            check=self.name,
            status=verdict.status,
            seen=verdict.seen,
            meaning=self.meaning,
            action=self.action,
            to_do=verdict.to_do,
        )


JudgeT = TypeVar("JudgeT", bound=Callable[[Any], Awaitable[Verdict]])


def add_check(
    checks: list[Check], name: str, action: str, seconds: float = SECONDS
) -> Callable[[JudgeT], JudgeT]:
    """Make the decorated function the next of `checks`. Its docstring is what the line means.

    Args:
        checks: the checks of one kind of server, in the order of the report.
        name: begins the line of the report.
        action: what the scheduler does about it.
        seconds: longest time of the function.
    """

    def add(judge: JudgeT) -> JudgeT:
        meaning = inspect.getdoc(judge) or ""
        checks.append(
            Check(name=name, judge=judge, meaning=meaning, action=action, seconds=seconds)
        )
        return judge

    return add
