"""The open responses of a gateway: each is a rollout that receives its tokens from the run's facts.

A :class:`Response` is what the handler of one HTTP request waits for. Its tokens arrive with
``TokensReceived`` while the rollout generates, and it ends with ``RolloutFinished``, when the
version of each token is known. At most the rest of its response is buffered for a slow client.

With a store, the rollouts of the prior process exist when a gateway starts. Their responses are
*unclaimed* until a client sends the same rid again with the same prompt.

Invariants:
- A response ends exactly once: with its rollout, with an abort, or with the cause of its failure.
- The tokens of an ended response are the tokens of its rollout.
- A rollout whose client has disconnected is withdrawn, even if it is launched later.
- The store forgets a rollout only after its client has read it or has disconnected.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from aprilsched.errors import ConfigError
from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.core.messages.facts import Fact
from aprilsched.kernel.core.state.assembly import rollout_of
from aprilsched.kernel.core.state.ledger import BUSY, REFUSED, Reason
from aprilsched.kernel.core.state.records import GroupRecord, RolloutRecord
from aprilsched.kernel.core.state.state import SchedulerState
from aprilsched.kernel.values.companions import CompanionRows, Rows
from aprilsched.types import Batch, FinishReason, Group, Prompt, Rollout, SamplingParams, Segment

_LEFT = "the client has disconnected"
_ABORTED = "the client has aborted it"
_NAMELESS = "its request had no rid, so no client can request it after the restart"
_NEWER = "another request has its rid"
_GRAMMARS = frozenset({"ebnf", "json_schema", "regex", "structural_tag"})
_BROKEN_OFF = (
    "its server broke it off, and {} holds for a whole response, which cannot go on at another "
    "server; send the request again"
)
_REFUSED, _FAILED, _UNAVAILABLE = 400, 500, 503


@dataclass(frozen=True, kw_only=True, eq=False)
class NewResponse:
    """One requested response.

    Attributes:
        rid: the client's request id; None if it sends none.
        prompt: its prompt, without a key.
        group: name shared by the responses that belong together; empty for none.
    """

    rid: str | None
    prompt: Prompt
    group: str = ""


@dataclass
class Kept:
    """A delivered batch, which the store keeps until the clients of all its responses have left."""

    batch: Batch
    unread: int

    def read(self) -> None:
        """Note that one of the clients has left."""
        self.unread -= 1
        if not self.unread:
            self.batch.acknowledge()


@dataclass(eq=False)
class Response:
    """One response that a client waits for."""

    rid: str
    """The client's request id."""
    key: str
    """Its name in the run, which is unique."""
    prompt: Prompt
    group: str = ""
    """Name shared by the responses that belong together; empty for none."""
    token_ids: list[int] = field(default_factory=list[int])
    """The tokens that have arrived, in order."""
    logprobs: list[float] = field(default_factory=list[float])
    group_id: int | None = None
    """The group of its rollout; None before launch."""
    member: RolloutRecord | None = None
    """Its rollout; None before launch."""
    unwanted: str = ""
    """Why no client wants it; empty while a client does."""
    finish: FinishReason | str | None = None
    """Why it ended; None while it is open."""
    message: str = "Aborted"
    """Why it was aborted, as the client reads it."""
    segments: tuple[Segment, ...] = ()
    """The versions of its tokens; known at its end."""
    companions: Mapping[str, CompanionRows] = field(default_factory=dict[str, CompanionRows])
    """The companion rows that it requested; known at its end."""
    versions_exact: bool = True
    """Whether the engines reported the version of every token."""
    failure: str = ""
    """The cause, if it has failed."""
    status: int = _FAILED
    """The HTTP status of a failure."""
    asked_at: float | None = None
    """Time of the client's request, in seconds of the monotonic clock; None before."""
    left: bool = False
    """Whether its client will read no more of it."""
    kept: Kept | None = None
    """Its batch in the store, until the client has left."""
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt.input_ids)

    @property
    def over(self) -> bool:
        return self.finish is not None or bool(self.failure)

    def rows(self, name: str, start: int, end: int) -> Rows | None:
        """Return the rows `begin` to `end` of a companion that have arrived; None before launch."""
        known = self.companions.get(name)
        if known is not None:
            found = known.rows.part(min(start, len(known.rows)))
        elif self.member is not None:
            found = self.member.log.companions[name].since(start)
        else:
            return None
        return found.part(0, min(end - start, len(found)))

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
        """Add new tokens; tokens that arrive after the end are dropped."""
        if self.over:
            return
        self.token_ids += token_ids
        self.logprobs += logprobs
        self._news.set()

    def complete(self, rollout: Rollout) -> None:
        """End with the rollout, which is complete."""
        if self.over:
            return
        self.token_ids = rollout.token_ids.tolist()
        self.logprobs = rollout.logprobs.tolist()
        self.segments = rollout.segments
        self.companions = rollout.companions
        self.versions_exact = rollout.versions_exact
        self._finish(rollout.finish_reason)

    def abort(self, message: str) -> None:
        """End with the tokens that have arrived."""
        member = self.member
        if not self.over and member is not None:
            # The record of a dropped rollout lacks tokens that are still on their way.
            self.segments = member.log.segments()
            self.companions = member.log.companion_rows(prompt=self.prompt_tokens)
            sure = member.request is None or not member.request.unsure
            self.versions_exact = member.log.exact and sure
        self.message = message
        self._finish("abort")

    def fail(self, cause: str, status: int = _FAILED) -> None:
        """End without a result."""
        if not self.over:
            self.failure, self.status = cause, status
            self._news.set()

    def _finish(self, reason: FinishReason | str) -> None:
        if not self.over:
            self.finish = reason
            self._news.set()


class Responses:
    """The open responses by their names; a listener of the run that they belong to.

    Args:
        withdraw: cancels a group that no client wants, with the cause.
        state: the scheduler's state, read-only.
        first_token: called with the seconds from a request to its first token.
    """

    wants_tokens = True

    def __init__(
        self,
        *,
        withdraw: Callable[[int, str], None],
        state: Callable[[], SchedulerState],
        first_token: Callable[[float], None],
    ) -> None:
        self._first_token = first_token
        self.foreign = False
        """Whether the store has rollouts that no gateway launched."""
        self._withdraw = withdraw
        self._state = state
        self._next = 0
        """Number of the next response; it makes the keys unique."""
        self._by_rid: dict[str, Response] = {}
        self._unclaimed: dict[str, Response] = {}
        """Responses of the prior process that no client has claimed yet."""
        self._by_key: dict[str, Response] = {}
        """Responses whose rollout is not launched yet, including those that no client wants."""
        self._by_group: dict[int, Response] = {}
        self._by_request: dict[int, Response] = {}
        self._requests: dict[int, set[int]] = {}
        """The requests of each group."""
        self._changed = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        """Return the number of responses that are open, unread or unclaimed.

        Rollouts that are still to be launched count even if no client wants them.
        """
        unwanted = sum(bool(r.unwanted) for r in self._by_key.values())
        return len(self._by_rid) + len(self._unclaimed) + unwanted

    @property
    def unclaimed(self) -> int:
        """Number of responses of the prior process that no client has claimed yet."""
        return len(self._unclaimed)

    @property
    def to_launch(self) -> int:
        """Number of rollouts that are not launched yet."""
        return len(self._by_key)

    # --- clients -------------------------------------------------------------------------------

    def new(self, asked: Sequence[NewResponse]) -> int:
        """Return how many of these responses are not from the prior process."""
        return sum(ask.rid not in self._unclaimed for ask in asked)

    def open(self, asked: Sequence[NewResponse]) -> tuple[list[Response], list[Prompt]]:
        """Return the requested responses, all or none, and the prompts that need a launch.

        A response from the prior process continues and needs none.

        Raises:
            ConfigError: if a name is in use, or belongs to a response with another prompt.
        """
        names = Counter(ask.rid for ask in asked)
        for ask in asked:
            if ask.rid is None:
                continue
            if ask.rid in self._by_rid or names[ask.rid] > 1:
                raise ConfigError(f"Duplicate request ID detected: {ask.rid}")
            known = self._unclaimed.get(ask.rid)
            if known is not None and not _same(known.prompt, ask.prompt):
                raise ConfigError(
                    f"rid {ask.rid} is that of a response from before the restart, with another "
                    "prompt or other sampling parameters; choose another rid."
                )
        responses: list[Response] = []
        prompts: list[Prompt] = []
        for ask in asked:
            response = self._unclaimed.pop(ask.rid, None) if ask.rid is not None else None
            if response is None:
                key = f"{ask.rid or ''}#{self._next}"
                self._next += 1
                rid = uuid.uuid4().hex if ask.rid is None else ask.rid
                response = Response(rid, key, replace(ask.prompt, key=key), ask.group)
                self._by_key[key] = response
                prompts.append(response.prompt)
            response.group = ask.group
            response.asked_at = time.monotonic()
            self._by_rid[response.rid] = response
            responses.append(response)
        self._empty.clear()
        return responses, prompts

    def abort(self, rid: str) -> None:
        """End a response with its tokens so far, or all responses of a body with this name.

        An unknown name is ignored.
        """
        if rid in self._by_rid:
            self.end(self._by_rid[rid], _ABORTED)
        elif rid in self._unclaimed:
            self._drop(self._unclaimed.pop(rid), _ABORTED)
        else:
            self.abort_group(rid)

    def abort_all(self) -> None:
        """End every response with its tokens so far."""
        for rid in [*self._by_rid, *self._unclaimed]:
            self.abort(rid)

    def abort_group(self, name: str) -> None:
        """End every response of a group with its tokens so far."""
        for response in list(self._by_rid.values()):
            if response.group == name:
                self.end(response, _ABORTED)

    def end_all(self, why: str) -> None:
        """End every response that a client waits for, with its tokens so far.

        `why` is the cause in the ledger, and the message in the response.
        """
        for response in list(self._by_rid.values()):
            self.end(response, why, why)

    def interrupt_all(self, cause: str) -> None:
        """End every response without a result, and leave the rollouts to the store."""
        for response in self._by_rid.values():
            response.fail(cause, _UNAVAILABLE)

    def expire(self, cause: str) -> None:
        """Give up the responses of the prior process that no client has claimed."""
        unclaimed, self._unclaimed = self._unclaimed, {}
        for response in unclaimed.values():
            self._drop(response, cause)

    def end(self, response: Response, why: str, message: str = "Aborted") -> None:
        """End a response with its tokens so far.

        `why` is the cause in the ledger, and `message` that in the response.
        """
        if response.over or response.unwanted:
            return
        response.unwanted = why
        response.abort(message)
        if response.group_id is not None:
            self._withdraw(response.group_id, why)

    def leave(self, response: Response) -> None:
        """Note that the client reads no more of it; withdraw its rollout unless it is over."""
        if not response.over:
            self.end(response, _LEFT)
        self._read(response)
        if self._by_rid.get(response.rid) is response:
            del self._by_rid[response.rid]
        if not self._by_rid:
            self._empty.set()

    async def all_read(self) -> None:
        """Wait until no client waits for anything."""
        await self._empty.wait()

    def _drop(self, response: Response, why: str) -> None:
        """Give up a response that no client waits for."""
        self.end(response, why)
        self._read(response)

    def _read(self, response: Response) -> None:
        """Note that no client will read more of it, so that the store may forget it at its end."""
        response.left = not response.failure
        if response.left and response.kept is not None:
            response.kept.read()
            response.kept = None

    # --- the run -------------------------------------------------------------------------------

    async def changed(self) -> None:
        """Wait until an engine changes its mode, joins, leaves or ends a request."""
        self._changed.clear()
        await self._changed.wait()

    def deliver(self, batch: Batch) -> None:
        """Take a batch; its groups of one have ended."""
        kept = Kept(batch, 1)
        for group in batch.groups:
            response = self._forget(group.group_id)
            if response is None:
                continue
            response.complete(group.rollouts[0])
            if not response.left:
                response.kept = kept
                kept.unread += 1
        kept.read()

    def restore(self, batch: Batch) -> None:
        """Take a batch of the prior process that will be delivered again."""
        for group in batch.groups:
            response = self._known(group)
            if response is not None:
                response.complete(group.rollouts[0])
                self._by_group[group.group_id] = response

    def fail_all(self, cause: str) -> None:
        """End every response, because the run has ended."""
        for response in [*self._by_key.values(), *self._by_group.values()]:
            response.fail(cause, _UNAVAILABLE)

    def fail_waiting(self, cause: str, *, everything: bool) -> None:
        """End every response without tokens, or `everything`, because no server can generate."""
        for response in self._by_rid.values():
            if not response.over and (everything or not response.token_ids):
                self._break_off(response, cause)

    def _break_off(self, response: Response, cause: str) -> None:
        """End a response without a result, and withdraw its rollout."""
        response.fail(cause, _UNAVAILABLE)
        response.unwanted = cause
        if response.group_id is not None:
            self._withdraw(response.group_id, cause)

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        """Take tokens, launches and drops; see
        :class:`~aprilsched.kernel.shell.listener.Listener`."""
        for fact in facts:
            match fact:
                case of.TokensReceived(request_id=request_id, dropped=None):
                    response = self._by_request.get(request_id)
                    if response is not None:
                        if fact.token_ids and not response.token_ids and response.asked_at:
                            self._first_token(time.monotonic() - response.asked_at)
                        response.arrive(fact.token_ids or (), fact.logprobs or ())
                case of.AttemptSent():
                    response = self._by_group.get(fact.group_id)
                    if response is not None:
                        self._by_request[fact.request_id] = response
                        self._requests.setdefault(fact.group_id, set()).add(fact.request_id)
                        self._check_grammar(response)
                case of.GroupLaunched(evaluation_id=None):
                    self._launched(fact)
                case of.RolloutFinished():
                    self._finished(fact)
                case of.GroupDropped():
                    self._dropped(fact)
                case (
                    of.EngineModeChanged()
                    | of.EngineAdmitted()
                    | of.EngineLost()
                    # Withdrawing requests may leave an engine idle without a change of mode.
                    | of.AttemptEnded()
                ):
                    self._changed.set()
                case _:
                    pass

    def _launched(self, fact: of.GroupLaunched) -> None:
        record = self._state().in_flight.groups.get(fact.group_id)
        response = self._by_key.pop(str(fact.key), None)
        if response is None and record is not None:
            response = self._known(record)
        if response is None:
            return
        response.group_id = fact.group_id
        self._by_group[fact.group_id] = response
        if record is not None:
            (response.member,) = record.members
            log = response.member.log
            if log.size:
                response.arrive(log.token_ids.tolist(), log.logprobs().tolist())
        if response.unwanted:
            # The core handles this after the current event.
            self._withdraw(fact.group_id, response.unwanted)

    def _check_grammar(self, response: Response) -> None:
        """Fail a response that the engine would continue with a fresh grammar.

        The grammar would restart after the tokens so far, and the text would be a prefix followed
        by a complete document.
        """
        sampling = response.prompt.sampling
        if not (isinstance(sampling, SamplingParams) and response.token_ids) or response.over:
            return
        if grammar := sorted(_GRAMMARS & sampling.extra.keys()):
            self._break_off(response, _BROKEN_OFF.format(*grammar))

    def _known(self, group: Group | GroupRecord) -> Response | None:
        """Return a response of the prior process by its group of one; None if not a gateway's."""
        prompt = group.prompt
        members = group.rollouts if isinstance(group, Group) else group.members
        rid, mark, number = str(prompt.key).rpartition("#")
        if not (mark and number.isdecimal() and len(members) == 1):
            self.foreign = True
            return None
        self._next = max(self._next, int(number) + 1)
        response = Response(rid, str(prompt.key), prompt)
        if not rid:
            self._drop(response, _NAMELESS)
            return response
        other = self._unclaimed.get(rid)
        if other is not None and int(other.key.rpartition("#")[2]) > int(number):
            self._drop(response, _NEWER)
            return response
        self._unclaimed[rid] = response
        if other is not None:
            self._drop(other, _NEWER)
        return response

    def _finished(self, fact: of.RolloutFinished) -> None:
        response = self._by_group.get(fact.group_id)
        if response is not None and response.member is not None:
            response.complete(rollout_of(response.member))

    def _dropped(self, fact: of.GroupDropped) -> None:
        response = self._forget(fact.group_id)
        if response is None:
            return
        if self._unclaimed.get(response.rid) is response:
            del self._unclaimed[response.rid]
        if fact.reason == Reason.STALE:
            response.abort(fact.cause)
        elif fact.reason != Reason.WITHDRAWN:
            refused = fact.reason == Reason.FAILED and fact.cause.startswith(REFUSED)
            failed = _UNAVAILABLE if BUSY in fact.cause else _FAILED
            response.fail(fact.cause, _REFUSED if refused else failed)

    def _forget(self, group_id: int) -> Response | None:
        for request_id in self._requests.pop(group_id, ()):
            del self._by_request[request_id]
        return self._by_group.pop(group_id, None)


def _same(one: Prompt, other: Prompt) -> bool:
    """Return whether two prompts request the same response."""
    same = one.sampling == other.sampling and one.media == other.media
    same = same and one.companions == other.companions
    return same and np.array_equal(one.input_ids, other.input_ids)
