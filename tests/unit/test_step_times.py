"""Tests that step times are learnt from the chunks of engines that stream as SGLang does: the first
token of a response arrives after its prefill pass, and then every 64th."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.shell.step_times import StepTimes
from aprilsched.planning import Planner
from aprilsched.planning.step_times.model import H200_QWEN3_4B, StepTimeModel
from tests.support.table import each_row

INTERVAL = 64
EXPERTS = StepTimeModel(t0=17.2e-3, t1=15e-6, t2=34e-9, prefill_pass=44e-3, prefill_rate=65_700.0)


@dataclass
class Engine:
    """An engine with `slots` slots; its listener receives the facts that a scheduler would send."""

    timing: StepTimeModel
    listener: StepTimes
    slots: int = 256
    every: int = 1
    """Number of steps between two passes, each of which reads 5 contexts; with 1, passes read all
    contexts that are queued. A server has few of them where its KV pool is full."""
    steps: int = 0
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    now: float = 0.0
    sent: int = 0
    queue: list[list[int]] = field(default_factory=list[list[int]])
    """Id, context, tokens of the attempt and tokens left of each request, as in `running`."""
    running: list[list[int]] = field(default_factory=list[list[int]])

    def tell(self, *facts: of.Fact) -> None:
        self.listener.on_facts(facts, self.now)

    def send(self, context: int, left: int) -> None:
        self.sent += 1
        self.queue.append([self.sent, context, 0, left])
        self.tell(
            of.AttemptSent(
                engine="e", request_id=self.sent, attempt=1, rollout_id=self.sent, group_id=1,
                tokens=context, max_new_tokens=9999,
            )
        )  # fmt: skip

    def end(self, request: list[int]) -> None:
        if received := request[2] % INTERVAL:
            self.tell(of.TokensReceived(request_id=request[0], tokens=received))
        self.tell(of.AttemptEnded(request_id=request[0], outcome="finished"))

    def prefill(self) -> None:
        """Passes of whole contexts."""
        self.steps += 1
        most = 5 if self.every > 1 else len(self.queue)
        while most and self.queue and (not self.running or self.steps % self.every == 0):
            tokens, passed = 0, list[list[int]]()
            while most and self.queue and (not passed or tokens + self.queue[0][1] <= 8192):
                most -= 1
                passed.append(self.queue.pop(0))
                tokens += passed[-1][1]
            self.now += self.timing.prefill_seconds(tokens)
            for request in passed:
                request[2] += 1
                self.tell(of.TokensReceived(request_id=request[0], tokens=1))
            self.running += passed

    def step(self) -> None:
        kv = sum(context + tokens for _, context, tokens, _ in self.running)
        self.now += self.timing.step_seconds(len(self.running), kv)
        for request in self.running:
            request[2] += 1
            if request[2] % INTERVAL == 0:
                new = INTERVAL - (request[2] == INTERVAL)
                self.tell(of.TokensReceived(request_id=request[0], tokens=new))
        for request in [each for each in self.running if each[2] >= each[3]]:
            self.running.remove(request)
            self.end(request)

    def run(self, steps: int, refill: int) -> None:
        """Decode `steps` steps, and send `refill` requests whenever `refill` slots are free."""
        for _ in range(steps):
            while self.slots - len(self.running) - len(self.queue) >= refill:
                for length in np.minimum(6000, 700 * self.random.lognormal(0, 0.9, refill)):
                    self.send(100, 2 + int(length))
            self.prefill()
            self.step()

    def update(self, *, called_back: bool) -> None:
        """New weights: the contexts are read again, of new attempts or of those that stay."""
        before, self.running = self.running, []
        if called_back:
            for request in before:
                self.end(request)
        self.tell(of.EngineModeChanged(engine="e", start="running", finish="pausing",
                                       pause="retract"))  # fmt: skip
        self.now += 0.01
        self.tell(of.EngineModeChanged(engine="e", start="continuing", finish="running"))
        if called_back:
            for _, context, tokens, left in before:
                self.send(context + tokens, left - tokens)
            return
        contexts = sum(context + tokens for _, context, tokens, _ in before)
        self.now += self.timing.prefill_seconds(contexts)
        self.running = before


@each_row(
    ("called_back", "every"), [(True, 1), (False, 1), (True, 8)], ids=["back", "inside", "full"]
)
@each_row("true", [EXPERTS, replace(H200_QWEN3_4B, t0=7e-3)], ids=["moe", "dense"])
def test_passes_after_an_update_do_not_count_as_slow_steps(
    true: StepTimeModel, called_back: bool, every: int
) -> None:
    planner = Planner(inline=True)
    engine = Engine(true, StepTimes(planner), every=every)
    for _ in range(6):
        engine.run(600, refill=16)
        engine.update(called_back=called_back)
    for running, context in ((256, 600), (256, 900), (200, 800)):
        right = true.step_seconds(running, running * context)
        found = planner.model.step_seconds(running, running * context)
        assert found == pytest.approx(right, rel=0.09)
