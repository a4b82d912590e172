"""Five hundred agents at once, through refits, dead engines and a killed trainer; see README.md.

Each agent is an external harness. It has two contexts, calls tools with heavy-tailed durations, and
returns to its session after the trainer's process is killed, even if it has finished. As everywhere
in the campaign, the logprob of a token encodes the version of the weights that sampled it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from aprilsched import (
    Prompt,
    RolloutScheduler,
    SamplingParams,
    SchedulerConfig,
    SimFleet,
    SimPublisher,
    SqliteStore,
)
from aprilsched.agents.chat.tokenizer import ModelTokenizer, load_tokenizer
from aprilsched.agents.dialects.anthropic import Messages
from aprilsched.agents.dialects.openai import Chats
from aprilsched.agents.dialects.values import Dialect
from aprilsched.agents.serving.bodies import decode
from aprilsched.agents.sessions import Limits, Session, Sessions
from aprilsched.agents.sessions.asking import ask, render_events, render_whole
from aprilsched.config import Health
from aprilsched.errors import EpisodeError
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.simulation.engine import SimConfig, SimEngine
from aprilsched.simulation.engine.toy_model import ContextState, ToyModel
from aprilsched.types import NO_VERSION, Batch, Float32Array, Int32Array, Rollout
from tests.campaign.history import History, Outcome, recorded
from tests.campaign.truth import TruthModel, true_versions
from tests.support.tiny_tokenizer import CALL, ODD_CALLS, bytes_tokenizer

GROUPS, SIZE = 66, 8
TURNS = 20
REFITS, EVERY_S = 10, 2.0
DEAD = {2: 0, 6: 1}
"""The engine that is killed before a refit, by the number of the refit."""
ODD = "odd calls"
"""Every second seed; its policy samples tool calls of all forms."""
KILLED = 4
"""The refit after which the trainer's process is killed."""
_FIRST_LETTER = 5 + ord("a")
"""As one token of the byte tokenizer of the tests."""
_FIRST_CALL = 5 + 256
_CALLS = [CALL, *(each for each in ODD_CALLS if len(each) < 250)]
"""Tokens of the seeds with odd calls: a valid call, and malformed ones."""


class Letters(TruthModel):
    """Samples letters only, because random special tokens would end texts early."""

    def sample(
        self, states: Sequence[ContextState], counts: Sequence[int], key: int
    ) -> list[tuple[Int32Array, Float32Array]]:
        blocks = super().sample(states, counts, key)
        return [(self.shown(ids).astype(np.int32), logprobs) for ids, logprobs in blocks]

    def shown(self, ids: Int32Array) -> Int32Array:
        """Return the tokens that replace those of the toy model."""
        return _FIRST_LETTER + ids % 26


class _OddCalls(Letters):
    """Samples calls too: each is one token, on average one in forty."""

    def shown(self, ids: Int32Array) -> Int32Array:
        return np.where(ids % 40, super().shown(ids), _FIRST_CALL + ids // 40 % len(_CALLS))


class _Fleet(SimFleet):
    """Four engines whose logprobs are the version of their weights."""

    def __init__(self, model: Callable[[int], ToyModel]) -> None:
        super().__init__(4)
        machine = SimConfig(stream_interval=8, model=model)
        self.engines = tuple([SimEngine(f"sim-{i}", machine) for i in range(4)])


@dataclass
class _Agent:
    """An external harness and its knowledge. It speaks a dialect, without the socket."""

    dialect: type[Dialect]
    drawn: np.random.Generator
    contexts: list[list[Any]]
    turns: int
    heard: list[list[int]] = field(default_factory=list[list[int]])
    """The tokens of each answer."""
    asking: tuple[int, int] | None = None
    """The context and the number of tokens of the open request."""
    ended: bool = False

    async def run(self, session: Session) -> None:
        """Run every turn, or stop when the trainer is gone."""
        while len(self.heard) < self.turns:
            if self.asking is None:
                self.asking = int(self.drawn.random() < 0.15), int(self.drawn.integers(1, 120))
            number, most = self.asking
            messages = self.contexts[number]
            sent = json.dumps({"messages": messages, "max_tokens": most}).encode()
            asked = self.dialect.parse(decode(sent, self.dialect.body))
            try:
                reply = await ask(self.dialect, session, asked)
            except EpisodeError:
                return
            self.heard.append(reply.output.token_ids.tolist())
            render_events(self.dialect, asked, reply)
            whole = msgspec.json.decode(
                msgspec.json.encode(render_whole(self.dialect, asked, reply))
            )
            if self.dialect is Chats:
                answer = whole["choices"][0]["message"]
            else:
                answer = {"role": "assistant", "content": whole["content"]}
            messages += [answer, {"role": "user", "content": "and?"}]
            self.asking = None
            await asyncio.sleep(float(min(30, self.drawn.lognormal(-1, 1.5))))
        session.done(float(self.turns))
        self.ended = True


@dataclass
class _Campaign:
    """The agents, and the successive processes of the trainer."""

    outcome: Outcome
    history: History
    folder: Path
    tokenizer: ModelTokenizer
    agents: dict[str, _Agent] = field(default_factory=dict[str, _Agent])
    figures: Counter[str] = field(default_factory=Counter[str])

    async def run(self) -> None:
        """Run one life that is killed, and one that resumes and delivers the batch."""
        killed = await self._life(SqliteStore(self.folder / "store", inline=True), first=True)
        self.outcome.ending.append("killed")
        await self._life(killed, first=False)
        self.outcome.ending.append("batch")
        self.figures["sessions"] = len(self.agents)
        self.figures["turns"] = sum(len(agent.heard) for agent in self.agents.values())
        self.outcome.figures = dict(self.figures)

    async def _life(self, store: SqliteStore, *, first: bool) -> SqliteStore:
        """One process of the trainer: until it is killed, which leaves a store, or to the batch."""
        model = _OddCalls if ODD in self.outcome.kinds else Letters
        fleet, agents = _Fleet(model), set[asyncio.Task[None]]()
        refits = range(KILLED + 1) if first else range(KILLED + 1, REFITS)
        sessions = Sessions(
            tokenizer=self.tokenizer,
            secret=self.folder / "secret",
            branches="all",
            limits=Limits(idle_s=120),
        )
        config = SchedulerConfig(
            batch_groups=GROUPS,
            group_size=SIZE,
            pace="asynchronous",
            over_provision=1.0,
            straggler="abort",
            max_staleness=REFITS + 1,
            save_interval_s=0.5,
            health=Health(stall_s=60),
            sampling=SamplingParams(max_new_tokens=200, ignore_eos=True),
        )
        prompt = np.asarray([1, 2], np.int32)
        prompts = [Prompt(input_ids=prompt, metadata={"task": f"{i}"}) for i in range(GROUPS)]
        async with (
            sessions,
            RolloutScheduler(
                fleet,
                prompts,
                episode=sessions,
                config=config,
                store=store,
                listeners=[self.history],
            ) as rollouts,
        ):
            launcher = asyncio.create_task(self._launch(sessions, agents))
            try:
                for number in refits:
                    await asyncio.sleep(EVERY_S)
                    if number in DEAD:
                        fleet.engines[DEAD[number]].crash()
                    await rollouts.update_weights(SimPublisher())
                    open_now = sum([not task.done() for task in agents])
                    most = max(self.figures["sessions_at_once"], open_now)
                    self.figures["sessions_at_once"] = most
                if first:
                    await asyncio.sleep(EVERY_S / 2)
                    return left_behind(store, self.folder / "killed")
                self._check(await rollouts.next_batch(), rollouts)
            finally:
                launcher.cancel()
                # Let the sessions end the agents that wait for an answer.
                await asyncio.sleep(0)
                tools = [task for task in agents if not task.done()]
                for task in tools:
                    task.cancel()
        for task in agents:
            if not task.cancelled() and (error := task.exception()) is not None:
                self.outcome.complaints.append(f"an agent got {error!r}")
        return store

    async def _launch(self, sessions: Sessions, tasks: set[asyncio.Task[None]]) -> None:
        """Resume the agents of the previous life, and start one for each new session."""
        for name, agent in self.agents.items():
            # A finished agent reports again, because its report may not have been saved.
            while (session := sessions.get(name)) is None and not agent.ended:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            if session is not None:
                tasks.add(asyncio.create_task(agent.run(session)))
        while True:
            session = await sessions.next()
            if session.id in self.agents:
                continue  # No answer was saved, and its agent has returned.
            drawn = np.random.default_rng([self.outcome.seed, int(session.id)])
            task = session.prompt.metadata["task"]
            agent = self.agents[session.id] = _Agent(
                dialect=Messages if int(session.id) % 2 else Chats,
                drawn=drawn,
                contexts=[
                    [{"role": "user", "content": f"task {task}"}],
                    [{"role": "system", "content": "help"}],
                ],
                turns=int(drawn.integers(2, TURNS + 1)),
            )
            tasks.add(asyncio.create_task(agent.run(session)))

    # --- against the truth -----------------------------------------------------------------------

    def _check(self, batch: Batch, rollouts: RolloutScheduler) -> None:
        delivered = list(batch.rollouts)
        if len(delivered) != GROUPS * SIZE:
            self._complain(f"{len(delivered)} rollouts are in the batch")
        for rollout in delivered:
            self._check_one(rollout, self.agents[str(rollout.rollout_id)])
        counters = rollouts.state.in_flight.counters
        ledger = rollouts.state.in_flight.ledger
        # Answers that were received whole, but saved in part.
        started = ledger.tokens[Reason.RESTARTED]
        if ledger.rollouts or set(ledger.tokens) - {Reason.RESTARTED}:
            self._complain(f"the ledger has {ledger.rollouts} and {ledger.tokens}")
        if counters.tokens_generated != counters.tokens_delivered + started:
            self._complain(f"generated tokens are neither delivered nor counted: {counters}")

    def _check_one(self, rollout: Rollout, agent: _Agent) -> None:
        """Compare a session with the truth, and with the answers that its agent received."""
        kept: list[int] = []
        versions: set[int] = set()
        for each in (rollout, *rollout.branches):
            truth = true_versions(each.logprobs, each.versions != NO_VERSION)
            if (wrong := int((truth != each.versions).sum())) or not rollout.versions_exact:
                self._complain(f"session {rollout.rollout_id} has {wrong} wrong versions")
            kept += each.token_ids[each.loss_mask].tolist()
            versions |= set(each.versions[each.loss_mask].tolist())
        heard = Counter([i for ids in agent.heard for i in ids])
        # After a kill, an answer from just before it is known as text only.
        lost = heard - Counter(kept)
        if Counter(kept) - heard:
            self._complain(f"session {rollout.rollout_id} has tokens that its agent never received")
        self.figures["tokens"] += len(kept)
        self.figures["tokens_heard_and_not_saved"] += lost.total()
        self.figures["sessions_of_several_versions"] += len(versions) > 1
        self.figures["sampled_calls"] += sum(each >= _FIRST_CALL for each in kept)
        if rollout.info["session"]["branches"] > len(agent.contexts):
            self._complain(f"session {rollout.rollout_id} has left a context of its agent")

    def _complain(self, text: str) -> None:
        self.outcome.complaints.append(text)


def left_behind(store: SqliteStore, to: Path) -> SqliteStore:
    """Return what kill -9 would leave now: a copy of the files, open or not."""
    to.mkdir()
    for file in store.path.parent.glob(f"{store.path.name}*"):
        shutil.copy(file, to / file.name)
    return SqliteStore(to / store.path.name, inline=True)


def run(seed: int) -> Outcome:
    """Run a seed. Complaints are in the outcome; nothing is raised."""
    outcome, history = Outcome(seed, kinds=["kills"]), History()
    if seed % 2:
        outcome.kinds.append(ODD)
    with tempfile.TemporaryDirectory() as named:
        folder = Path(named)
        tokenizer = load_tokenizer(bytes_tokenizer(folder / "tokenizer", parses=True, words=_CALLS))
        campaign = _Campaign(outcome, history, folder, tokenizer)
        return recorded(outcome, history, campaign.run())
