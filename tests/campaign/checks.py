"""Checks everything that the scheduler delivers, keeps and reports.

Every violation is a sentence in :attr:`Checks.complaints`. Nothing is raised here, so that one run
shows all of its errors.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from aprilsched import Batch, Rollout, SamplingParams
from aprilsched.errors import InvariantViolation, PromptsExhausted, RunEnded
from aprilsched.kernel.core.invariants import check as check_invariants
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages.facts import Fact, GroupLaunched, MemberLaunched
from aprilsched.kernel.core.state.ledger import FAILURES
from aprilsched.kernel.core.state.state import SchedulerState
from aprilsched.simulation.engine.toy_model import weights_key_of_version
from aprilsched.types import NO_VERSION, Sample, Unit
from tests.campaign.mix import Mix
from tests.campaign.prompts import prompt_of
from tests.campaign.truth import TruthModel, is_right, sampling_of, true_versions, wrong_rows


@dataclass
class Given:
    """A batch that the trainer was given."""

    fingerprint: str
    keys: list[Any]
    """The prompt's key of each group, or of each sample with its index."""
    units: tuple[Unit, ...]
    secured: bool
    """Whether a healthy store contained it at delivery, or has saved it since."""
    acknowledged: bool = False
    """It may be delivered again, but need not be."""
    version: int = 0
    """The trainer's version at the first delivery."""

    @property
    def samples(self) -> list[Sample]:
        """Its samples, if samples are delivered."""
        return [unit for unit in self.units if isinstance(unit, Sample)]

    @property
    def rollouts(self) -> list[int]:
        """The ids of its rollouts."""
        return [rollout.rollout_id for unit in self.units for rollout in unit.rollouts]


@dataclass
class Records:
    """What the trainer knows; it outlives the scheduler's process."""

    batches: dict[int, Given] = field(default_factory=dict[int, Given])
    expected: set[int] = field(default_factory=set[int])
    """Batches that must be delivered again first."""
    launched: set[int] = field(default_factory=set[int])
    """The training rollouts that were launched."""
    evaluated: set[int] = field(default_factory=set[int])
    """The groups of evaluations."""

    @property
    def acknowledged(self) -> set[int]:
        """The batches that need not be delivered again."""
        return {index for index, batch in self.batches.items() if batch.acknowledged}

    def copy(self) -> Records:
        """Copy the records, for a checkpoint of the trainer."""
        batches = {index: replace(batch) for index, batch in self.batches.items()}
        return Records(batches, set(self.expected), set(self.launched), set(self.evaluated))

    def killed(self) -> None:
        """Forget batches that were never stored: they may be generated again."""
        self.batches = {index: b for index, b in self.batches.items() if b.secured}
        self.expected = self.batches.keys() - self.acknowledged

    def expect_redelivery(self, *, with_store: bool) -> None:
        """Expect stored batches again that the trainer has not acknowledged."""
        saved = {i for i, b in self.batches.items() if b.secured or not with_store}
        self.expected = saved - self.acknowledged


class Checks:
    """A listener that checks the state after each event, and every delivery."""

    weights_key: Callable[[int], int] = staticmethod(weights_key_of_version)
    """The engines' key for the weights of a version."""

    def __init__(self, mix: Mix, records: Records, complain: Callable[[str], None]) -> None:
        self.mix = mix
        self.records = records
        self.state: SchedulerState | None = None
        self._complain = complain
        self._model = TruthModel(mix.machine.vocab_size)
        self._broken = False
        self.figures = Counter[str]()
        """Amounts of what was checked."""

    # --- as a listener ---------------------------------------------------------------------------

    def on_event(self, event: ev.Event, now: float) -> None:
        if isinstance(event, ev.Progress) or self.state is None or self._broken:
            return
        try:
            check_invariants(self.state)
        except InvariantViolation as error:
            self._broken = True
            self._complain(f"invariant after {type(event).__name__}: {error}")

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            if not isinstance(fact, GroupLaunched | MemberLaunched):
                continue
            if isinstance(fact, GroupLaunched):
                # Unsaved work of a killed process is launched again under the same ids.
                self.records.evaluated.discard(fact.group_id)
                launched = fact.rollout_ids
            else:
                launched = (fact.rollout_id,)
            if fact.evaluation_id is not None:
                self.records.evaluated.add(fact.group_id)
            else:
                self.records.launched.update(launched)

    # --- batches ---------------------------------------------------------------------------------

    def batch(self, batch: Batch, *, version: int, secured: bool, settings: dict[str, Any]) -> None:
        """Check a batch that the trainer took at `version`."""
        name = f"batch {batch.index}"
        known = self.records.batches.get(batch.index)
        shown = fingerprint(batch)
        samples = batch.samples if self.mix.samples else ()
        keys = [unit.prompt.key for unit in batch.units]
        if samples:
            keys = [(sample.prompt.key, sample.rollout.index) for sample in samples]
        if known is not None:
            if not batch.redelivered:
                self._complain(f"{name} was given a second time and does not say so")
            if known.fingerprint != shown:
                self._complain(f"{name} is delivered again and is another one: keys {keys}")
            self.records.expected.discard(batch.index)
            return
        if self.records.expected and not batch.redelivered:
            missing = sorted(self.records.expected)
            self._complain(f"{name} comes before batches {missing}, which must be given again")
            self.records.expected.clear()
        delivered = {key for other in self.records.batches.values() for key in other.keys}
        twice = [key for key in keys if key in delivered]
        if twice or len(set(keys)) != len(keys):
            self._complain(f"prompts {twice or keys} of {name} were delivered before")
        if samples:
            self._samples(batch, name)
        if not batch.redelivered and batch.version != version:
            self._complain(f"{name} is of version {batch.version}; the trainer has {version}")
        for unit in batch.units:
            sizes = {rollout.index for rollout in unit.rollouts}
            whole_group = isinstance(unit, Sample) or sizes == set(range(len(unit.rollouts)))
            if not whole_group or not unit.rollouts:
                self._complain(f"group {unit.group_id} of {name} is not whole: {sorted(sizes)}")
            for rollout in unit.rollouts:
                self.rollout(rollout, f"rollout {rollout.rollout_id} of {name}")
                self._content(rollout, unit)
                bound = settings["max_staleness"].bound
                if bound is not None and not batch.redelivered:
                    self._staleness(rollout, version, bound, name)
        self.records.batches[batch.index] = Given(shown, keys, batch.units, secured, False, version)

    def _samples(self, batch: Batch, name: str) -> None:
        """Check the siblings of new samples, also against those of earlier batches."""
        assert self.state is not None
        policies, staleness = self.state.config.policies, self.state.staleness.rule
        amount, siblings = policies.stop.amount, policies.siblings or 0
        # A batch that is taken in parts may end early.
        other = self.mix.has("streams") or staleness == "finish" or batch.redelivered
        other = other or self.state.prompts.exhausted or policies.stop.name != "samples"
        if not other and len(batch.samples) != amount:
            self._complain(f"{name} has {len(batch.samples)} samples; a batch has {amount}")
        dropped = {entry.rollout_id for entry in self.state.in_flight.ledger.entries}
        earlier = [s for given in self.records.batches.values() for s in given.samples]
        for place, sample in enumerate(batch.samples):
            own, ids = sample.rollout.rollout_id, [each.rollout_id for each in sample.siblings]
            self.figures["samples"] += 1
            self.figures["few"] += sample.few
            if own in ids or len(set(ids)) != len(ids) or len(ids) > siblings:
                self._complain(f"sample {own} of {name} has the siblings {ids}, of {siblings}")
            if batch.redelivered or self.mix.has("other_settings"):
                continue
            if sample.few != (len(ids) < siblings):
                self._complain(f"sample {own} of {name} has {len(ids)} siblings, few={sample.few}")
            for other in (*earlier, *batch.samples[:place]):
                if other.group_id == sample.group_id:
                    self._same_group(sample, other, dropped)

    def _same_group(self, sample: Sample, other: Sample, dropped: set[int]) -> None:
        """Check that two samples show one order of ended members, and the same rewards."""
        self.figures["pairs"] += 1
        rewards: dict[int, float | None] = {}
        for each in (sample, other):
            known = [(s.rollout_id, s.reward) for s in each.siblings]
            for rollout_id, reward in [*known, (each.rollout.rollout_id, each.reward)]:
                if rewards.setdefault(rollout_id, reward) != reward:
                    self._complain(f"rollout {rollout_id} has rewards {reward} and another one")
        orders = [
            [s.rollout_id for s in each.siblings if s.rollout_id != without.rollout.rollout_id]
            for each, without in ((sample, other), (other, sample))
        ]
        # A member that was lost has left the order of its group.
        if not dropped & {rollout_id for order in orders for rollout_id in order}:
            shorter, longer = sorted(orders, key=len)
            if longer[: len(shorter)] != shorter:
                self._complain(
                    f"samples {sample.unit_id} and {other.unit_id} of group {sample.group_id} have "
                    f"siblings of different orders: {orders}"
                )

    def _staleness(self, rollout: Rollout, version: int, bound: int, name: str) -> None:
        counted = rollout.versions[(rollout.versions != NO_VERSION) & rollout.loss_mask]
        if counted.size and version - int(counted.min()) > bound:
            self._complain(
                f"rollout {rollout.rollout_id} of {name} counts a token of version "
                f"{int(counted.min())} at version {version}; the bound is {bound}"
            )

    def evaluation(self, batch: Batch, asked: int, *, between: tuple[int, int]) -> None:
        """Check an evaluation, during which the trainer's version was within `between`."""
        self.figures["evaluations"] += 1
        found: set[int] = set()
        for rollout in batch.rollouts:
            truth = self.rollout(rollout, f"rollout {rollout.rollout_id} of an evaluation")
            found |= {int(v) for v in truth if v != NO_VERSION}
        if len(found) > 1:
            self._complain(f"an evaluation of version {batch.version} has versions {sorted(found)}")
        elif found and found != {batch.version}:
            self._complain(
                f"an evaluation reports version {batch.version}, sampled by {sorted(found)}"
            )
        if not between[0] <= batch.version <= between[1]:
            self._complain(f"an evaluation asked for within {between} is of {batch.version}")
        if len(batch.groups) > asked:
            self._complain(f"an evaluation of {asked} prompts has {len(batch.groups)} groups")

    def rollout(self, rollout: Rollout, name: str) -> Any:
        """Check the lengths of the arrays and the versions; return the true versions."""
        self.figures["rollouts"] += 1
        self.figures["tokens"] += len(rollout)
        arrays = (rollout.token_ids, rollout.logprobs, rollout.versions, rollout.loss_mask)
        lengths = set(map(len, arrays))
        if len(lengths) > 1:
            self._complain(f"{name} has arrays of lengths {sorted(lengths)}")
            return np.empty(0, dtype=np.int32)
        sampled = rollout.versions != NO_VERSION
        truth = true_versions(rollout.logprobs, sampled)
        wrong = np.flatnonzero(truth != rollout.versions)
        if not rollout.versions_exact:
            self.figures["inexact"] += 1
        elif wrong.size:
            first = int(wrong[0])
            self._complain(
                f"{name} reports version {int(rollout.versions[first])} for token {first}, which "
                f"version {int(truth[first])} sampled ({wrong.size} of {len(rollout)} are wrong)"
            )
        mixed = rollout.versions_exact and len(set(truth[sampled].tolist())) > 1
        mix = self.mix
        if mixed and mix.config().refit == "rolling" and not mix.has("other_settings"):
            self._complain(f"{name} has tokens of several versions with rolling refits")
        if rollout.versions_exact:
            self._rows(rollout, truth, name)
        edges = [0, *(segment.end for segment in rollout.segments)]
        starts = [segment.start for segment in rollout.segments]
        if edges != sorted(set(edges)) or starts != edges[:-1] or edges[-1] != len(rollout):
            self._complain(f"{name} of {len(rollout)} tokens has the segments {rollout.segments}")
        return truth

    def _rows(self, rollout: Rollout, truth: Any, name: str) -> None:
        if self.state and len(rollout.companions) != len(self.state.config.companions):
            self._complain(f"{name} has the companions {list(rollout.companions)}")
        for companion in rollout.companions.values():
            self.figures["rows"] += int(companion.exact.sum())
            self.figures["rows_of_another_pass"] += int((~companion.exact).sum())
        # With adapters the logprobs do not reveal the base weights.
        if not self.mix.has("adapters") and (wrong := wrong_rows(rollout, truth, self.weights_key)):
            self._complain(f"{name} {wrong}")

    def _content(self, rollout: Rollout, group: Unit) -> None:
        """Check that each token is the model's sample after the tokens before it."""
        mix = self.mix
        # Weights loaded by another client keep the keys of older ones in the cache. An earlier
        # life may also have left keys.
        mixed = mix.settings["straggler"] == "in_place" or mix.has("foreign")
        if mix.has("adapters") or mixed or rollout.stale_keys:
            return
        if (asked := self.asked(rollout, group)) is None:
            return
        if not mix.episodes and len(rollout) != asked[0].max_new_tokens:
            self._complain(
                f"rollout {rollout.rollout_id} has {len(rollout)} of "
                f"{asked[0].max_new_tokens} tokens"
            )
        self.figures["content_checked"] += 1
        if not any(is_right(rollout, each, self._model, self.weights_key) for each in asked):
            self._complain(f"rollout {rollout.rollout_id} of {group.prompt.key} has other tokens")

    def asked(self, rollout: Rollout, group: Unit) -> list[SamplingParams] | None:
        """Return the possible sampling of the rollout, or None if its prompt is a bad one."""
        if self.mix.episodes:
            return [SamplingParams(temperature=0.0)]
        key = group.prompt.key
        index = key if isinstance(key, int) else int(str(key).split()[1])
        prompt = prompt_of(self.mix, index, max(rollout.index + 1, 1))
        if not np.array_equal(rollout.prompt_ids, prompt.input_ids):
            return None
        # An evaluation may have one response of each prompt, which keeps its seed.
        return [*sampling_of(rollout, prompt, 2), *sampling_of(rollout, prompt, 1)]

    # --- the end of a life -----------------------------------------------------------------------

    def ended(self, error: RunEnded, state: SchedulerState) -> None:
        """Check the end of the prompts, of which `error` is the reason."""
        ledger, prompts = state.in_flight.ledger, state.prompts.cursor
        groups = {entry.group_id for entry in ledger.entries if entry.reason in FAILURES}
        failed = len(groups - self.records.evaluated)
        # A sample that fails does not fail its prompt, unless nothing else is left of that.
        if self.mix.samples:
            failed = min(failed, error.failed)
        if error.failed != failed or sum(error.causes.values()) != failed:
            self._complain(f"{failed} groups failed, and the error has {error.failed}: {error}")
        given = sum(len(batch.keys) for batch in self.records.batches.values())
        if self.mix.samples:
            # A prompt counts as delivered with the last of its samples, if that is not dropped.
            most = len({key for batch in self.records.batches.values() for key, _ in batch.keys})
            if error.delivered > most:
                self._complain(f"samples of {most} prompts were given, not of {error.delivered}")
        elif error.delivered < given:
            self._complain(f"{given} groups were given, and the error has {error.delivered}")
        bad = failed > state.config.retries.failed_share * prompts or (prompts and not given)
        if isinstance(error, PromptsExhausted) is bool(bad):
            self._complain(
                f"{given} of {prompts} groups given, {failed} failed, and it ends: {error}"
            )

    def end(self, state: SchedulerState) -> None:
        """Check that every prompt and every token is accounted for."""
        if self._broken:
            return
        try:
            check_invariants(state)
        except InvariantViolation as error:
            self._complain(f"invariant at the end: {error}")
        self._tokens(state)
        records = self.records
        there = set(state.in_flight.rollouts)
        there |= {each for given in records.batches.values() for each in given.rollouts}
        for delivered in state.delivery.unacknowledged.values():
            there |= {m.rollout_id for group in delivered.groups for m in group.members}
        there |= {entry.rollout_id for entry in state.in_flight.ledger.entries}
        if lost := records.launched - there:
            self._complain(f"launched rollouts that are nowhere: {sorted(lost)[:10]}")

    def _tokens(self, state: SchedulerState) -> None:
        counters = state.in_flight.counters
        held = sum(rollout.log.sampled_tokens for rollout in state.in_flight.rollouts.values())
        known = counters.tokens_delivered + counters.tokens_discarded + held
        if counters.tokens_generated != known:
            self._complain(
                f"{counters.tokens_generated} tokens were generated and {known} are known: "
                f"{counters.tokens_delivered} delivered, {counters.tokens_discarded} discarded, "
                f"{held} in flight"
            )


def fingerprint(batch: Batch) -> str:
    """Return a value that is equal for two deliveries of the same batch. Units that are taken one
    by one are in the order of acceptance; a batch has them in the order of completion."""
    found = hashlib.blake2b(digest_size=8)
    for unit in sorted(batch.units, key=lambda unit: unit.unit_id):
        found.update(f"{unit.group_id} {unit.prompt.key}".encode())
        if isinstance(unit, Sample):
            found.update(f"{unit.siblings} {unit.few}".encode())
        for rollout in unit.rollouts:
            found.update(f"{rollout.rollout_id} {rollout.index}".encode())
            found.update(rollout.token_ids.tobytes() + rollout.versions.tobytes())
            for companion in rollout.companions.values():
                found.update(companion.rows.values.tobytes() + companion.exact.tobytes())
    return found.hexdigest()
