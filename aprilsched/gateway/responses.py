"""The open responses of a gateway: each is a rollout, whose tokens come from the facts of the run.

A :class:`Response` is what the handler of one HTTP request waits for. Its tokens arrive with
``TokensReceived`` while the rollout generates, and its end with the delivery of the rollout, which
names the version of each token. What waits for a slow client is at most the rest of its response.

Invariants:
- A response ends exactly once: with its rollout, with an abort, or with the cause of its failure.
- The tokens of an ended response are those of its rollout.
- A rollout whose client has left is withdrawn, also if it is launched only later.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from aprilsched.core.messages import facts as of
from aprilsched.core.messages.facts import Fact
from aprilsched.core.state.ledger import Reason
from aprilsched.types import FinishReason, Prompt, Rollout, Segment

__all__ = ["Response", "Responses"]

_LEFT = "the client has disconnected"
_ABORTED = "the client has aborted it"


class Response:
    """One response that a client waits for.

    Attributes:
        rid: the client's name for it.
        key: its name in the run, which no other response has.
        token_ids: the tokens that have arrived, in order.
        logprobs: the log-probability of each of them.
        group_id: the group of its rollout; None before it is launched.
        finish: why it ended; None while it is open.
        segments: the versions of its tokens; known at its end.
        versions_exact: whether the engines could tell the version of every token.
        failure: the cause, if it has failed.
    """

    def __init__(self, rid: str, key: str, prompt_tokens: int) -> None:
        self.rid = rid
        self.key = key
        self.prompt_tokens = prompt_tokens
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.group_id: int | None = None
        self.unwanted = ""
        """Why nobody wants it any more; empty as long as somebody does."""
        self.finish: FinishReason | str | None = None
        self.segments: tuple[Segment, ...] = ()
        self.versions_exact = True
        self.failure = ""
        self._news = asyncio.Event()

    @property
    def over(self) -> bool:
        return self.finish is not None or bool(self.failure)

    async def news(self) -> None:
        """Wait for new tokens, or for the end; it returns at once if it is over."""
        await self._news.wait()
        if not self.over:
            self._news.clear()

    async def end(self) -> None:
        """Wait for the end."""
        while not self.over:
            await self.news()

    def arrive(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Take new tokens."""
        self.token_ids += token_ids
        self.logprobs += logprobs
        self._news.set()

    def complete(self, rollout: Rollout) -> None:
        """End with the delivered rollout."""
        self.token_ids = rollout.token_ids.tolist()
        self.logprobs = rollout.logprobs.tolist()
        self.segments = rollout.segments
        self.versions_exact = rollout.versions_exact
        self._finish(rollout.finish_reason)

    def abort(self, segments: tuple[Segment, ...], *, exact: bool) -> None:
        """End with the tokens that have arrived, whose versions are `segments`."""
        self.segments, self.versions_exact = segments, exact
        self._finish("abort")

    def fail(self, cause: str) -> None:
        """End without a result."""
        if not self.over:
            self.failure = cause
            self._news.set()

    def _finish(self, reason: FinishReason | str) -> None:
        if not self.over:
            self.finish = reason
            self._news.set()


class Responses:
    """The open responses by their names; a listener of the run that they belong to.

    Args:
        withdraw: tells the scheduler that nobody wants a group any more, and why.
        versions: the segments of the tokens that a group in flight has so far, and whether the
            version of each of them is known.
    """

    wants_tokens = True

    def __init__(
        self,
        *,
        withdraw: Callable[[int, str], None],
        versions: Callable[[int], tuple[tuple[Segment, ...], bool]],
    ) -> None:
        self._withdraw = withdraw
        self._versions = versions
        self._numbers = itertools.count()
        self._by_rid: dict[str, Response] = {}
        self._by_key: dict[str, Response] = {}
        """Responses whose rollout is not launched yet, those that nobody wants included."""
        self._by_group: dict[int, Response] = {}
        self._by_request: dict[int, Response] = {}
        self._requests: dict[int, set[int]] = {}
        """The requests of each group."""
        self._changed = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        """Number of responses that a client waits for or has not read to their end, and of rollouts
        that are still to be launched for nobody."""
        return len(self._by_rid) + sum(bool(r.unwanted) for r in self._by_key.values())

    @property
    def to_launch(self) -> int:
        """Number of rollouts that are not launched yet."""
        return len(self._by_key)

    def __contains__(self, rid: str) -> bool:
        return rid in self._by_rid

    # --- clients -------------------------------------------------------------------------------

    def open(self, rid: str, prompt: Callable[[str], Prompt]) -> tuple[Response, Prompt]:
        """A new response, and its prompt, which `prompt` makes with the name that it is given."""
        key = f"{rid}#{next(self._numbers)}"
        made = prompt(key)
        response = Response(rid, key, len(made.input_ids))
        self._by_rid[rid] = self._by_key[key] = response
        self._empty.clear()
        return response, made

    def abort(self, rid: str) -> None:
        """End a response with the tokens that it has; an unknown name is ignored."""
        response = self._by_rid.get(rid)
        if response is not None:
            self._give_up(response, _ABORTED)

    def abort_all(self) -> None:
        """End every response with the tokens that it has."""
        for rid in list(self._by_rid):
            self.abort(rid)

    def leave(self, response: Response) -> None:
        """Say that the client reads no more of it; its rollout is withdrawn, unless it is over."""
        if not response.over:
            self._give_up(response, _LEFT)
        if self._by_rid.get(response.rid) is response:
            del self._by_rid[response.rid]
        if not self._by_rid:
            self._empty.set()

    async def all_read(self) -> None:
        """Wait until no client waits for anything."""
        await self._empty.wait()

    def _give_up(self, response: Response, why: str) -> None:
        if response.over or response.unwanted:
            return
        response.unwanted = why
        if response.group_id is None:
            response.abort((), exact=True)
        else:
            segments, exact = self._versions(response.group_id)
            self._withdraw(response.group_id, why)
            if response.group_id not in self._by_group:
                response.abort(segments, exact=exact)

    # --- the run -------------------------------------------------------------------------------

    async def changed(self) -> None:
        """Wait until an engine has changed its mode, or has come or gone."""
        self._changed.clear()
        await self._changed.wait()

    def deliver(self, group_id: int, rollout: Rollout) -> None:
        """End the response of a group that was delivered."""
        response = self._forget(group_id)
        if response is not None:
            response.complete(rollout)

    def fail_all(self, cause: str) -> None:
        """End every response, because the run has ended."""
        for response in [*self._by_key.values(), *self._by_group.values()]:
            response.fail(cause)

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        """Take tokens, launches and drops; see :class:`~aprilsched.telemetry.base.Listener`."""
        for fact in facts:
            match fact:
                case of.TokensReceived(request_id=request_id, dropped=None):
                    response = self._by_request.get(request_id)
                    if response is not None:
                        response.arrive(fact.token_ids or (), fact.logprobs or ())
                case of.AttemptSent():
                    if fact.group_id in self._by_group:
                        self._by_request[fact.request_id] = self._by_group[fact.group_id]
                        self._requests.setdefault(fact.group_id, set()).add(fact.request_id)
                case of.GroupLaunched(key=str(key), evaluation_id=None):
                    self._launched(key, fact.group_id)
                case of.GroupDropped():
                    response = self._forget(fact.group_id)
                    if response is not None and fact.reason != Reason.WITHDRAWN:
                        response.fail(fact.cause)
                case of.EngineModeChanged() | of.EngineAdmitted() | of.EngineLost():
                    self._changed.set()
                case _:
                    pass

    def _launched(self, key: str, group_id: int) -> None:
        response = self._by_key.pop(key, None)
        if response is None:
            return
        response.group_id = group_id
        self._by_group[group_id] = response
        if response.unwanted:
            # The core takes this after the event that it is handling now.
            self._withdraw(group_id, response.unwanted)

    def _forget(self, group_id: int) -> Response | None:
        for request_id in self._requests.pop(group_id, ()):
            del self._by_request[request_id]
        return self._by_group.pop(group_id, None)
