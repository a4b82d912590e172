"""Tests the core under random events while another client pauses, loads and restarts its servers.

Each simulated server has its own weights and label. The scheduler learns them only from answers,
token labels and version spans. Each token id encodes the label under which it was sampled, so the
versions of a batch can be checked against it.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from aprilsched.config import Health, Retries, SchedulerConfig, Staleness
from aprilsched.errors import ConfigError
from aprilsched.kernel.core.config import Pace
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.policies.straggler import StragglerRule
from aprilsched.kernel.core.state.weights import UpdateKind
from aprilsched.types import Batch, SamplingParams, VersionSpan
from tests.property.conftest import RecordSteps
from tests.property.test_core_interleavings import LENGTHS, Interleavings, steps_of
from tests.support.driver import Driver, Key

pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")

ENGINES = ("a", "b", "c")
_EACH = 10_000
"""Token ids of one label."""


def label_of(token_id: int) -> int:
    """The label under which a server sampled the token."""
    return token_id // _EACH - 1


@dataclass
class Servers(Driver):
    """A driver whose engines answer with what they have."""

    labels: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ENGINES, 0))
    broken: set[str] = field(default_factory=set[str])
    """Servers with inconsistent weights."""
    held: set[str] = field(default_factory=set[str])
    """Servers that another client has paused."""
    sampled: dict[Key, list[int]] = field(default_factory=lambda: defaultdict[Key, list[int]](list))
    """The label of each token of an attempt."""

    def version_of(self, engine: str) -> int | None:
        return None if engine in self.broken else self.labels[engine]

    def verify(self, version: int | None = -1) -> None:
        super().verify(self.version_of(self.verifications[0].engine))

    def answer_refit(self, **failures: tuple[int | None, str]) -> None:
        refit, update = self.refits[0], self.state.weights.update
        if refit.external:
            # Nothing is loaded: each server reports its version, or first receives a label.
            received = not refit.followed and update is not None and not update.labelled
            for name in refit.engines if received else ():
                self.labels[name] = refit.version
            named = {name for name in refit.engines if self.labels[name] == refit.version}
            if not refit.followed:
                self.broken -= named
            failures = {
                name: (self.version_of(name), "names its weights otherwise")
                for name in refit.engines
                if self.version_of(name) != refit.version
            }
        for name in refit.engines:
            has = failures.get(name, (refit.version, ""))[0]
            if has is None:
                self.broken.add(name)
            elif not refit.external:
                self.labels[name] = has
                self.broken.discard(name)
        super().answer_refit(**failures)

    def answer_control(self) -> Any:
        command = super().answer_control()
        if type(command).__name__ == "Continue":
            self.held.discard(command.engine)
        return command

    def progress(self, key: Key, count: int, *, first: int = 100, label: int | None = None) -> None:
        engine = self.sends[key].engine
        if engine in self.held:
            return
        shown = self.labels[engine]
        self.sampled[key] += [shown] * count
        super().progress(key, count, first=_EACH * (shown + 1), label=shown)

    def spans(self, key: Key) -> tuple[VersionSpan, ...]:
        """Return the version spans that the server reports at the end of an attempt."""
        spans: list[VersionSpan] = []
        for place, label in enumerate(self.sampled[key]):
            if spans and spans[-1].version == label:
                spans[-1] = VersionSpan(version=label, start=spans[-1].start, end=place + 1)
            else:
                spans.append(VersionSpan(version=label, start=place, end=place + 1))
        return tuple(spans)

    def finish(
        self, key: Key, count: int = 3, *, spans: tuple[VersionSpan, ...] | None = None
    ) -> None:
        if self.sends[key].engine in self.held:
            return
        self.progress(key, count)
        if key in self.sends:
            super().finish(key, 0, spans=self.spans(key))

    def interrupt(
        self,
        key: Key,
        *,
        spans: tuple[VersionSpan, ...] | None = None,
        busy: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().interrupt(key, spans=self.spans(key), busy=busy, retry_after_s=retry_after_s)

    def come_back(self, engine: str, version: int | None = -1) -> None:
        """Restart a server: it is not paused, and its weights are complete."""
        self.held.discard(engine)
        self.broken.discard(engine)
        if version is not None:
            self.labels[engine] = max(0, version)
        super().come_back(engine, self.labels[engine])

    def see(self, engine: str) -> None:
        """The watch asks the server."""
        if self.state.config.follow_weights and self.state.fleet.control.of(engine) is not None:
            self.feed(
                ev.VersionSeen(
                    engine=engine, version=self.version_of(engine), paused=engine in self.held
                )
            )


class Foreign(Interleavings):
    driver: Servers  # pyright: ignore[reportIncompatibleVariableOverride]

    @initialize(
        straggler=st.sampled_from(["retract", "in_place", "abort", "run"]),
        pace=st.sampled_from(["synchronous", "asynchronous"]),
        follows=st.booleans(),
        ratio=st.sampled_from([1.0, 2.5]),
        bound=st.sampled_from([None, 0, 2]),
        supply=st.sampled_from([9, 10_000]),
        takes=st.booleans(),
    )
    def open_run(  # type: ignore[override]
        self,
        straggler: StragglerRule,
        pace: Pace,
        follows: bool,
        ratio: float,
        bound: int | None,
        supply: int,
        takes: bool,
    ) -> None:
        config = SchedulerConfig(
            batch_groups=2,
            group_size=2,
            over_provision=ratio,
            straggler=straggler,
            pace=pace,
            max_staleness=Staleness(bound),
            retries=Retries(attempts=2, interruptions=4, failed_groups=10**9),
            health=Health(stall_s=20, fleet_wait_s=60),
            sampling=SamplingParams(max_new_tokens=1_000_000),
        )
        with suppress(ConfigError):  # It would end the pauses of others at each batch.
            config = replace(config, follow_weights=follows)
        self.driver = Servers(  # pyright: ignore[reportIncompatibleVariableOverride]
            config, supply=supply, engines=ENGINES, takes=takes
        )
        self.driver.auto_verify = False
        self.adapters = False
        self.evaluations = 0
        self.checked = 0
        self.recovering = False

    # --- what the other client does ------------------------------------------------------------

    @rule(engines=st.sets(st.sampled_from(ENGINES), min_size=1))
    def foreign_pause(self, engines: set[str]) -> None:
        self.driver.held |= engines

    @rule(engines=st.sets(st.sampled_from(ENGINES), min_size=1))
    def foreign_continue(self, engines: set[str]) -> None:
        self.driver.held -= engines

    @rule(
        engines=st.sampled_from([("a",), ("c",), ("a", "b"), ENGINES, ENGINES]),
        label=st.sampled_from([-1, 0, 1, 1, 2, "none", "a word"]),
    )
    def foreign_load(self, engines: tuple[str, ...], label: int | str) -> None:
        """Whole weights, with a number as label, with the label as it was, or with a word, which
        counts as version 0."""
        for engine in engines:
            if label == "a word":
                self.driver.labels[engine] = 0
            elif isinstance(label, int):
                version = self.driver.state.weights.versions.trainer + label
                self.driver.labels[engine] = max(0, version)
        event("another client has loaded weights")

    @rule(engine=st.sampled_from(ENGINES))
    def see(self, engine: str) -> None:
        self.driver.see(engine)

    @rule(labelled=st.booleans(), behind=st.sampled_from([1, 1, 2]))
    def told_afterwards(self, labelled: bool, behind: int) -> None:
        """Let the trainer report what it loaded; the scheduler sets the label if it set none."""
        driver = self.driver
        state = driver.state
        if state.fleet.sleep is not None:
            return
        update = state.weights.update
        if update is None or update.kind is UpdateKind.FOLLOWED:
            version = state.weights.versions.trainer + behind
            driver.feed(ev.UpdateRequested(version=version, external=True, labelled=labelled))

    @precondition(lambda self: any(self.driver.state.fleet.control.all()))
    @rule(choice=st.integers(0, 99), label=st.sampled_from([-2, -1, 0, 1]))
    def restart_server(self, choice: int, label: int) -> None:
        """A server is restarted with another label, and comes back at once."""
        engines = [control.name for control in self.driver.state.fleet.control.all()]
        engine = engines[choice % len(engines)]
        self.driver.feed(ev.EngineLost(engine=engine, cause="was restarted"))
        version = self.driver.state.weights.versions.trainer + label
        self.driver.come_back(engine, version)

    # --- what is held --------------------------------------------------------------------------

    def _check_labels(self, batch: Batch) -> None:
        for rollout in batch.rollouts:
            if rollout.versions_exact:
                sampled = [label_of(int(each)) for each in rollout.token_ids]
                assert rollout.versions.tolist() == sampled, "a token has a version not its own"
                event("an exact rollout was delivered")
            crossed = len(set(rollout.versions.tolist())) > 1
            if crossed:
                event("a rollout of several versions was delivered")

    @invariant()
    def tokens_have_the_versions_that_their_servers_showed(self) -> None:
        if hasattr(self, "driver"):
            while self.checked < len(self.driver.batches):
                self._check_labels(self.driver.batches[self.checked])
                self.checked += 1

    def _serve_one(self) -> None:
        # An engine may finish requests of other weights, and is on standby then.
        if not self.recovering and not self.driver.state.fleet.control.engines:
            self._recover()
        super()._serve_one()

    def _recover(self) -> None:
        self.recovering = True
        super()._recover()
        self.recovering = False

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            # The other client has left, and every server has the fleet's weights again.
            self.driver.held.clear()
            for name in self.driver.state.fleet.control.engines:
                self.driver.labels[name] = self.driver.state.weights.base
        super().teardown()
        if hasattr(self, "driver"):
            self.tokens_have_the_versions_that_their_servers_showed()
            for batch in self.driver.evaluations.values():
                self._check_labels(batch)
                versions = {int(v) for rollout in batch.rollouts for v in rollout.versions}
                assert versions <= {batch.version}, "an evaluation of two versions"


@pytest.mark.parametrize("least", LENGTHS)
def test_random_interleavings_with_foreign_weights(record_steps: RecordSteps, least: int):
    record_steps("interleavings with foreign weights", steps_of(Foreign, least))
