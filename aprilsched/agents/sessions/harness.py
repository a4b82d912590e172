"""Sessions: rollouts driven by a program that need not know aprilsched.

A :class:`Session` is one rollout with its own address. Requests of its harness there become turns
of the rollout. :class:`Sessions` is the scheduler's ``episode=``: it opens a session for each
rollout, passes it to a coroutine or to a launcher, and ends it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self

from aprilsched.agents.chat.tokenizer import ModelTokenizer, load_tokenizer
from aprilsched.agents.dialects.values import check_stops
from aprilsched.agents.serving.listener import Listener
from aprilsched.agents.serving.refusals import Unavailable
from aprilsched.agents.sessions.address import Keys, make_session_app
from aprilsched.agents.sessions.history import History, JsonObject, Mark, Question
from aprilsched.errors import ConfigError, EpisodeError, MemberLost
from aprilsched.kernel.shell.episodes import Turn, TurnOutput
from aprilsched.kernel.values.bounds import ABOVE_0, AT_LEAST_1, check_range, check_settings
from aprilsched.kernel.values.files import open_private, read_regular
from aprilsched.types import (
    BranchRule,
    EpisodeWait,
    FinishReason,
    Int32Array,
    Prompt,
    SamplingParams,
    Score,
)

_QUICK = 16384
"""Characters of a request that are compared and rendered within a millisecond."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of a session.

    Attributes:
        time_s: seconds until its harness must end; after that its member is lost.
        idle_s: seconds without a request from an external harness, tools included; after that its
            member is lost. They start when a launcher takes the session.
        score_s: seconds from the end of the harness to an announced score.
        turns: answers of a session; more are refused.
        tokens: sampled tokens of a session; None for no limit. The last answer is truncated.
        branches: branches of a session; more are refused.
        waiting: requests of a session that may wait for an earlier one; more are refused.
    """

    time_s: Annotated[float, ABOVE_0] = 3600.0
    idle_s: Annotated[float, ABOVE_0] = 600.0
    score_s: Annotated[float, ABOVE_0] = 7200.0
    turns: Annotated[int, AT_LEAST_1] = 500
    tokens: Annotated[int, AT_LEAST_1] | None = None
    branches: Annotated[int, AT_LEAST_1] = 64
    waiting: Annotated[int, AT_LEAST_1] = 64

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """The answer to one request.

    Attributes:
        message: the answer in OpenAI's form.
        question: its context.
        output: its tokens, with the version of each.
    """

    message: JsonObject
    question: Question
    output: TurnOutput

    @property
    def finish_reason(self) -> FinishReason | str:
        """ "stop", "length" or "tool_calls"."""
        calls = self.output.finish_reason == "stop" and self.message.get("tool_calls")
        return "tool_calls" if calls else self.output.finish_reason


class Session:
    """One rollout, as its harness sees it.

    A session answers its requests one at a time, in their order of arrival, because a rollout
    generates one turn at a time.

    Attributes:
        id: its name, which is the same in a resumed run.
        url: its address. An Anthropic client takes it as its base URL, and so does an OpenAI
            client, with or without ``/v1`` appended.
        key: the API key of that address, valid for nothing else.
        open_url: the address with the key in it, for clients that send none.
        prompt: the prompt of its rollout. The policy sees the harness's messages instead.
        index: index of the rollout in its group.
        turns: number of answers so far.
        tokens: number of sampled tokens so far.
        limits: its limits.
        check: called with each context, int32 [n]; an exception refuses the request.
    """

    def __init__(
        self,
        turn: Turn,
        prompt: Prompt,
        *,
        url: str,
        key: str,
        tokenizer: ModelTokenizer,
        limits: Limits,
        remote_images: bool = False,
    ) -> None:
        self.id = str(turn.rollout_id)
        self.url, self.key = url, key
        self.open_url = f"{url}.{key}"
        self.prompt, self.index = prompt, turn.index
        self.turns = self.tokens = 0
        self.limits = limits
        self.check: Callable[[Int32Array], object] | None = None
        self._remote_images = remote_images
        self._turn = turn
        self._made = turn.sampling
        """Parameters of the latest request."""
        self._tokenizer = tokenizer
        self._history = History(tokenizer, most_branches=limits.branches)
        self._lock = asyncio.Lock()
        self._recalled: set[Mark] = set()
        """Requests that were answered with turns from before the run was resumed."""
        self._size = 0
        """Characters of the latest chat request."""
        self._asking = 0
        self._heard = asyncio.get_running_loop().time()
        self._taken = asyncio.Event()
        self._fresh = False
        """Whether a launcher has it, and its harness has made no request yet."""
        self._end: asyncio.Future[float | Score | None] = asyncio.Future()
        self._score: asyncio.Future[float | Score] | None = None

    # --- messages and tokens ---------------------------------------------------------------------

    @property
    def messages(self) -> tuple[JsonObject, ...]:
        """The messages up to the latest answer, in OpenAI's form."""
        return self._history.messages

    @property
    def branches(self) -> list[tuple[JsonObject, ...]]:
        """The messages of each branch up to its last answer."""
        return self._history.branches

    @property
    def branched(self) -> int:
        """Number of branches that requests have started."""
        return self._history.branches_started

    @property
    def drift(self) -> int:
        """Number of tokens that would differ if the chat were tokenised again.

        Either the policy samples tokens that its tokenizer would not produce for their text, or the
        chat template renders earlier messages differently later. The rollout keeps the sampled
        tokens.
        """
        return self._history.drift

    @property
    def sampling(self) -> SamplingParams:
        """The trainer's sampling parameters."""
        return self._turn.sampling

    @property
    def goes_on(self) -> bool:
        """Whether its harness started before the run was resumed."""
        return self._turn.known > 0

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self._end.done()

    # --- requests --------------------------------------------------------------------------------

    async def chat(
        self,
        messages: Sequence[JsonObject],
        *,
        tools: Sequence[JsonObject] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Reply:
        """Answer a chat.

        Args:
            messages: all messages, in OpenAI's form.
            tools: definitions of tools, in OpenAI's form.
            max_tokens: maximum tokens of the answer; the rollout's limit applies as well.
            stop: texts of one token each that end the answer.
            options: variables of the chat template.

        Raises:
            ConfigError: if the request cannot be used, or the session has reached a limit.
            EpisodeError: if the session has ended.
        """
        size = len(repr((messages, tools, options)))
        # A request that starts another branch is tokenised in full; few requests do.
        work = size if size > _QUICK else abs(size - self._size)
        async with self._place():
            if len(self._recalled) < self._turn.known:
                await self._recall(messages, tools, options, size)
            question = await self._tokenizer.work_out(
                lambda: self._history.ask(messages, tools, options), size=work
            )
            self._size = size
            return await self._answer(question, max_tokens, stop)

    async def complete(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        raw: bool = False,
    ) -> Reply:
        """Continue a text or token ids; see :meth:`chat`.

        With `raw` the answer contains the texts of special tokens, including the one that ended it.
        """
        async with self._place():
            question = await self._tokenizer.work_out(
                lambda: self._history.continue_text(prompt, raw=raw), size=len(prompt)
            )
            return await self._answer(question, max_tokens, stop)

    @asynccontextmanager
    async def _place(self) -> AsyncGenerator[None]:
        """Hold the session for one request: it waits for earlier ones, and is not idle."""
        self._check_open()
        if self._asking >= self.limits.waiting:
            raise Unavailable(
                f"the session has {self._asking} open requests, which are answered one after the "
                "other; wait for them."
            )
        self._asking += 1
        self._fresh = False
        self._taken.set()
        try:
            async with self._lock:
                self._check_open()
                yield
        finally:
            self._asking -= 1
            self._heard = asyncio.get_running_loop().time()

    def _check_open(self) -> None:
        if self.over:
            raise EpisodeError("the session has ended, and answers no more requests.")

    async def _recall(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None,
        options: JsonObject | None,
        size: int,
    ) -> None:
        """Restore the answers that a harness received before the run was resumed."""
        for place in self._history.unknown(messages, tools, options):
            question = await self._tokenizer.work_out(
                lambda earlier=messages[:place]: self._history.ask(earlier, tools, options),
                size=size,
            )
            # The harness may have seen more of an unfinished turn than was saved, and would not
            # match its end.
            if self._turn.knows(question.ids, whole=True):
                await self._answer(question, None, ())

    async def _answer(
        self, question: Question, max_tokens: int | None, stop: Sequence[str]
    ) -> Reply:
        if self.check is not None:
            self.check(question.ids)
        for each in question.media if not self._remote_images else ():
            if not str(each.source).startswith("data:"):
                raise ConfigError(
                    f"the URL of an image must start with data:, got {str(each.source)[:40]!r}; "
                    "Sessions(remote_images=True) lets engines fetch others."
                )
        sampling = self._turn.sampling
        most = sampling.max_new_tokens
        limits = self.limits
        if question.mark not in self._recalled and self._turn.knows(question.ids):
            self._recalled.add(question.mark)
        else:
            if self.turns >= limits.turns:
                raise ConfigError(f"the session has had its {limits.turns} turns; end it.")
            if limits.tokens is not None:
                if self.tokens >= limits.tokens:
                    raise ConfigError(f"the session has had its {limits.tokens} tokens; end it.")
                most = min(most, limits.tokens - self.tokens)
        check_range(AT_LEAST_1, max_tokens=max_tokens)
        if max_tokens is not None:
            most = min(most, max_tokens)
        ends = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends |= self._tokenizer.ends
        own = sampling.extra.get("stop") or ()
        check_stops(stop)
        for each in stop:
            if each in ([own] if isinstance(own, str) else own):
                continue  # The engines check the trainer's own stop strings.
            ids = self._tokenizer.encode(each, special=False)
            if len(ids) != 1:
                raise ConfigError(
                    f"the stop text {each[:40]!r} is {len(ids)} tokens; give texts of one token, "
                    "or none."
                )
            ends.update(ids)
        sampling = self._sampling_until(most, tuple(sorted(ends)))
        self._history.start(question)
        output = await self._turn.generate(question.ids, sampling, question.media, branch=True)
        self.turns += 1
        self.tokens += len(output.token_ids)
        message = await self._tokenizer.work_out(
            lambda: self._history.answered(question, output.token_ids),
            size=len(output.token_ids),
            is_required=True,
        )
        return Reply(message=message, question=question, output=output)

    def _sampling_until(self, most: int, ends: tuple[int, ...]) -> SamplingParams:
        """Return the trainer's parameters with the length and the stop conditions of an answer.

        New ones are validated as a whole, so the previous ones are reused if they are the same, as
        in most requests of a session.
        """
        made = self._made
        if (made.max_new_tokens, made.stop_token_ids) != (most, ends):
            trainers = self._turn.sampling
            least = min(most, trainers.min_new_tokens)
            self._made = made = replace(
                trainers, max_new_tokens=most, min_new_tokens=least, stop_token_ids=ends
            )
        return made

    # --- its end ---------------------------------------------------------------------------------

    def waits_for(self, what: EpisodeWait) -> None:
        """Set what it waits for between requests; see :meth:`aprilsched.Turn.waits_for`."""
        self._turn.waits_for(what)

    def on_end(self, function: Callable[[], object]) -> None:
        """Call `function` once when the session ends; see :meth:`aprilsched.Turn.on_end`."""
        self._turn.on_end(function)

    def done(self, score: float | Score | None = None, *, later: bool = False) -> None:
        """Report that the harness has ended, with its score if it has one.

        With `later` the score will come by :meth:`score`. A second report changes nothing.
        """
        if later and not self.over:
            self._score = asyncio.Future()
        self._report(lambda: self._end.set_result(score))

    def score(self, score: float | Score) -> None:
        """Set the announced score, or end the session with this one."""
        if self._score is None:
            self.done(score)
        elif not self._score.done():
            self._score.set_result(score)

    def failed(self, why: str) -> None:
        """Report that the harness has failed by its own fault, so its group is dropped."""
        self._report(lambda: self._end.set_exception(EpisodeError(why)))

    def lost(self, why: str) -> None:
        """Report the harness as gone through no fault of its own.

        Its member is lost, and its group continues (``retries.member``).
        """
        self._report(lambda: self._end.set_exception(MemberLost(why)))

    def _report(self, report: Callable[[], None]) -> None:
        if not self._end.done():
            report()
            # Mark the error as retrieved: there may be no waiter.
            self._end.exception()

    @property
    def taken(self) -> bool:
        """Whether a launcher has it, or its harness has made a request."""
        return self._taken.is_set()

    def take(self) -> None:
        """Note that a launcher has it, or that its harness reconnects by itself."""
        self.waits_for("tools")
        self._heard, self._fresh = asyncio.get_running_loop().time(), True
        self._taken.set()

    def give_back(self) -> bool:
        """Undo :meth:`take`; return False if no other launcher may take it.

        That is the case if it has ended, or if its harness has made a request.
        """
        if not self._fresh or self.over:
            return False
        self._taken.clear()
        self.waits_for("agent")
        return True

    async def saved(self) -> None:
        """Wait until the store has its rollout; see :meth:`aprilsched.Turn.saved`."""
        await self._turn.saved()

    async def recorded(self) -> None:
        """Wait until the store has its end, unless its score is still to come."""
        if self._score is not None and not self._score.done():
            return
        await self._turn.recorded.wait()
        await self._turn.saved()

    async def reported(self) -> float | Score | None:
        """Wait for the report of an external harness.

        It may be idle for at most ``limits.idle_s`` after a launcher has taken the session.

        Raises:
            MemberLost: if it sends nothing for too long, or is lost.
            EpisodeError: if it has failed.
        """
        loop, idle = asyncio.get_running_loop(), self.limits.idle_s
        while not self._end.done():
            if not self._taken.is_set():
                waiting = asyncio.ensure_future(self._taken.wait())
                try:
                    await asyncio.wait([waiting, self._end], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waiting.cancel()
                continue
            left = idle if self._asking else self._heard + idle - loop.time()
            if left <= 0:
                self.lost(f"its harness has asked for nothing for {idle:g} s")
                break
            await asyncio.wait([self._end], timeout=left)
        return self.report

    @property
    def report(self) -> float | Score | None:
        """The score that :meth:`done` received.

        Raises:
            MemberLost: if it was reported as lost.
            EpisodeError: if it was reported as failed.
        """
        return self._end.result()

    async def scored(self, score: float | Score | None) -> float | Score | None:
        """Return `score`, or wait for the announced score.

        Raises:
            MemberLost: if the announced score does not come in time.
        """
        if self._score is None:
            return score
        self.waits_for("score")
        try:
            async with asyncio.timeout(self.limits.score_s):
                return await self._score
        except TimeoutError as error:
            raise MemberLost(f"its score has not come within {self.limits.score_s:g} s") from error


Harness = Callable[[Session, Prompt], Awaitable[float | Score | None]]
Judge = Callable[[Session, Prompt], Awaitable[float | Score | None]]


class Sessions:
    """Gives every rollout a URL; an async context manager around the scheduler's.

    Pass it as ``episode=`` to a :class:`~aprilsched.RolloutScheduler`.

    Args:
        harness: ``async harness(session, prompt)`` runs an agent at ``session.url`` and may return
            the reward. With None, :meth:`next` hands the sessions to a launcher.
        tokenizer: the model's tokenizer, or its folder.
        reward: ``async reward(session, prompt)`` scores a session that has ended without a score,
            by its messages and other attributes. It may be slow.
        branches: which branches of a session become training data: the branch of the "last"
            answer, the "longest" one, or "all", which trains each token once. The reward is the
            reward of the whole session.
        limits: limits of a session.
        host: address to listen at; any but loopback lets other machines in.
        port: port to listen at; 0 for any free one. A harness that must find its session again
            after a restart needs a fixed one.
        public_url: the base URL that harnesses use, if it differs from the address.
        remote_images: whether requests may name images by http and https URLs. The engines fetch
            them, so an agent could read what only their network can reach.
        secret: the secret that keys are derived from, or its file, which is created if missing. A
            resumed run needs the same secret; None makes a new one.

    Attributes:
        launcher_key: API key of the launchers' calls.

    Raises:
        ConfigError: if a setting cannot be used.
    """

    def __init__(
        self,
        harness: Harness | None = None,
        *,
        tokenizer: ModelTokenizer | Path | str,
        reward: Judge | None = None,
        branches: BranchRule = "last",
        limits: Limits | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        public_url: str | None = None,
        remote_images: bool = False,
        secret: bytes | Path | None = None,
    ) -> None:
        if not isinstance(tokenizer, ModelTokenizer):
            tokenizer = load_tokenizer(Path(tokenizer))
        if branches not in ("last", "longest", "all"):
            raise ConfigError(f"branches is {branches!r}; give last, longest or all.")
        self.tokenizer = tokenizer
        self._harness, self._reward = harness, reward
        self._branches: BranchRule = branches
        self._limits = limits or Limits()
        self._listener = Listener(host, port)
        self._public_url = public_url
        self._remote_images = remote_images
        self._keys = Keys(_secret_of(secret))
        self.launcher_key = self._keys.launcher
        self._sessions: dict[str, Session] = {}
        self._starting: set[str] | None = None if harness is None else set()
        """Sessions of the prior process that will be open again; None while they are unknown. A
        harness that runs in this process has none from a prior one."""
        self._waiting: asyncio.Queue[Session] = asyncio.Queue()

    @property
    def url(self) -> str:
        """The base URL for harnesses and launchers."""
        return (self._public_url or self._listener.url).rstrip("/")

    async def __aenter__(self) -> Self:
        await self._listener.open(make_session_app(self, self._keys))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._listener.close()

    def get(self, session_id: str) -> Session | None:
        """Return the open session with this id."""
        return self._sessions.get(session_id)

    def awaits(self, session_id: str) -> bool:
        """Return whether a session that is not open may continue later.

        Either the scheduler is not open yet, or it has closed and another one may resume its run.
        """
        return self._starting is None or session_id in self._starting

    @property
    def ready(self) -> bool:
        """Whether the scheduler is open."""
        return self._starting is not None

    @property
    def judges(self) -> bool:
        """Whether a function scores the sessions that have no score; it may be slow."""
        return self._reward is not None

    def run_opened(self, rollouts: Collection[int]) -> None:
        """Note that the scheduler is open; see
        :class:`~aprilsched.kernel.shell.episodes.FollowsRun`."""
        self._starting = {str(each) for each in rollouts} - self._sessions.keys()

    def run_closed(self, *, goes_on: bool) -> None:
        """Note that the scheduler closes."""
        self._starting = None if goes_on and self._harness is None else set()

    async def next(self, within: float | None = None) -> Session:
        """Wait for a session that no launcher has taken yet.

        Its harness or the launcher reports the end: :meth:`Session.done`, :meth:`Session.failed` or
        :meth:`Session.lost`.

        Raises:
            TimeoutError: if none comes within `within` seconds.
        """
        while True:
            async with asyncio.timeout(within):
                session = await self._waiting.get()
            if session.over or session.taken:
                continue
            session.take()
            try:
                # Otherwise a restart could give the rollout's id to another rollout.
                await session.saved()
            except asyncio.CancelledError:
                self.offer_again(session)
                raise
            return session

    def offer_again(self, session: Session) -> None:
        """Offer a session to another launcher, because its launcher did not receive it."""
        if session.give_back():
            self._waiting.put_nowait(session)

    async def __call__(self, turn: Turn, prompt: Prompt) -> Score:
        """Run a rollout as a session."""
        if not self._listener.listening:
            raise EpisodeError("Sessions are not open; use them as `async with sessions:`.")
        name = str(turn.rollout_id)
        session = Session(
            turn,
            prompt,
            url=f"{self.url}/sessions/{name}",
            key=self._keys.of(name),
            tokenizer=self.tokenizer,
            limits=self._limits,
            remote_images=self._remote_images,
        )
        turn.branches = self._branches
        # An external harness keeps its answers, and after a restart may only report its end.
        turn.keeps_known = self._harness is None
        self._sessions[name] = session
        if self._starting is not None:
            self._starting.discard(name)
        try:
            score = await session.scored(await self._run(session, prompt))
            if score is None and self._reward is not None:
                session.waits_for("score")
                score = await self._reward(session, prompt)
            return _with_figures(score, session)
        finally:
            del self._sessions[name]
            session.lost("its rollout has ended")

    async def _run(self, session: Session, prompt: Prompt) -> float | Score | None:
        limit = asyncio.timeout(self._limits.time_s)
        try:
            async with limit:
                if self._harness is not None:
                    score = await self._harness(session, prompt)
                    return session.report if score is None and session.over else score
                if session.goes_on:
                    # A harness that is already running reconnects by itself.
                    session.take()
                else:
                    session.waits_for("agent")
                    self._waiting.put_nowait(session)
                return await session.reported()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise MemberLost(
                f"its harness has not ended within {self._limits.time_s:g} s"
            ) from error


def _with_figures(score: float | Score | None, session: Session) -> Score:
    """Return the score of a session with the session's figures in its ``info``."""
    as_score = score if isinstance(score, Score) else Score(reward=score)
    figures = {
        "turns": session.turns,
        "drift": session.drift,
        "branches": session.branched,
    }
    return replace(as_score, info={"session": figures, **as_score.info})


def _secret_of(given: bytes | Path | None) -> bytes:
    if given is None:
        return secrets.token_bytes(32)
    if isinstance(given, bytes):
        found = given
    else:
        try:
            # Readable by its owner only, and never over an existing file.
            with open(given, "xb", opener=open_private) as file:
                file.write(secrets.token_bytes(32))
        except FileExistsError:
            pass
        except OSError as error:
            raise ConfigError(f"the secret of sessions cannot be kept ({error}).") from error
        try:
            found = read_regular(given)
        except OSError as error:
            raise ConfigError(f"the secret of sessions cannot be read ({error}).") from error
    if len(found) < 16:
        raise ConfigError(f"the secret of sessions has {len(found)} bytes; give 16 or more.")
    return found
