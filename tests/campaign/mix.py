"""Draws from a seed what its run does: the kinds of chaos, and every setting.

Every part of a run draws from a generator of its own, `draw(role)`. So a kind can be switched off
without changing the others, which helps to reduce a failure to its cause.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from aprilsched import SchedulerConfig
from aprilsched.config import (
    Dispatch,
    Health,
    LengthBuckets,
    Pool,
    Retries,
    Samples,
    Staleness,
    Timeouts,
    Tokens,
)
from aprilsched.planning.step_times.model import H200_QWEN3_4B
from aprilsched.simulation.engine import SimConfig
from aprilsched.simulation.engine.toy_model import KvTier
from tests.campaign.truth import COMPANIONS, TruthModel

KINDS: dict[str, float] = {
    # Engines.
    "restarts": 0.5,
    "moments": 0.5,
    "crashes": 0.25,
    "foreign": 0.2,
    "slow_engines": 0.15,
    "membership": 0.2,
    # The trainer.
    "polls": 0.6,
    "evaluations": 0.5,
    "cancels": 0.4,
    "sleep": 0.2,
    "adapters": 0.12,
    "checkpoints": 0.25,
    "restores": 0.1,
    "close": 0.2,
    "idle_trainer": 0.2,
    # The caller's functions.
    "raising": 0.5,
    "bad_returns": 0.25,
    "broken_functions": 0.1,
    "bad_publishers": 0.4,
    "bad_sources": 0.2,
    "bad_prompts": 0.15,
    "dry_sources": 0.3,
    "turn_timeouts": 0.6,
    "misused_turns": 0.2,
    # Batch sizes.
    "stops": 0.5,
    # The store.
    "slow_store": 0.5,
    "failing_store": 0.25,
    "kills": 0.4,
    "other_settings": 0.4,
    # The trainer again: at the end, so that the other kinds of each seed stay the same.
    "streams": 0.4,
}
"""Every kind of chaos, and the share of the seeds that have it unless it is asked for.

restarts: engines restart at random times with old weights or version 0. moments: they do so at the
worst moments (around a send, a pause, a refit, a continue, a delivery). crashes: they die and come
back later. foreign: another client loads weights. slow_engines: they slow down, or hang.
membership: they join and leave. polls: next_batch() under timeouts. evaluations: at any moment.
cancels: of update_weights, evaluate and checkpoint. sleep: asleep() blocks. adapters: versions are
adapters. checkpoints: at any moment, also where they cannot be written. restores: a later life
starts from a checkpoint. close: at any moment. idle_trainer: long times without a call. raising:
rewards, accept and episodes raise any exception. bad_returns: they return invalid values.
broken_functions: from some call on they always raise, return None, or take ten minutes.
bad_publishers: they raise, return nothing, lie, dawdle. bad_sources: reading prompts raises.
bad_prompts: prompts are of a wrong type, or outside the vocabulary. stops: batches are filled by
samples or tokens. dry_sources: no prompt for a long time, or forever. turn_timeouts:
around turn.generate. misused_turns: two at a time, other contexts, bad ids. slow_store: durable
writes are slower than the poll. failing_store: they fail now and then. kills: the process dies and
another one resumes. other_settings: it does so with other settings. streams: groups are taken
one by one, and some of these batches end early by next_batch() or an update.
"""

TIERED = 0.4
"""Share of the seeds whose engines have a tier of cached KV that survives flushes, restarts and the
trainer's process. All engines share it."""
PAGE = 2
"""Tokens in one of its pages; prompts are short."""
SAMPLED = 1 / 3
"""Share of the seeds that deliver single samples."""


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Everything that a seed decides before the run starts."""

    seed: int
    kinds: frozenset[str]
    engines: int
    machine: SimConfig
    refit_seconds: float
    pause_seconds: float
    prompts: int
    batches: int
    lives: int
    median: float
    reward: str
    """"none", "rollout", "group"."""
    plain: bool
    """Rewards are plain functions, in threads."""
    accepts: bool
    episodes: bool
    store: str
    """"none", "memory", "sqlite"."""
    inline_store: bool
    async_source: bool
    update_every: int
    train_s: float
    settings: dict[str, Any]
    companions: bool
    """Whether companion rows are requested with the tokens."""

    @property
    def samples(self) -> bool:
        """Whether single samples are delivered."""
        return self.settings["delivery"] == "samples"

    def has(self, kind: str) -> bool:
        return kind in self.kinds

    def draw(self, role: str) -> random.Random:
        """The generator of one part of the run."""
        return random.Random(f"{self.seed}/{role}")

    def described(self) -> str:
        """The most important settings, in one line."""
        names = ("delivery", "stop", "refill", "over_provision", "straggler", "pace")
        names = (*names, "max_staleness")
        shown = [f"{name} {self.settings[name]}" for name in names]
        shown += [f"{self.engines} engines", f"store {self.store}", f"reward {self.reward}"]
        shown += ["KV tier"] * (self.machine.tier is not None)
        return ", ".join(shown + ["accept"] * self.accepts + ["episodes"] * self.episodes)

    def config(self) -> SchedulerConfig:
        settings = dict(self.settings)
        if self.has("adapters"):
            settings["refit"] = "together"  # adapters are refused otherwise
        settings["companions"] = COMPANIONS if self.companions else ()
        return SchedulerConfig(**settings)

    def of_next_life(self, life: int) -> Mix:
        """Return the run after a restart, with other settings if the seed has them."""
        if not self.has("other_settings"):
            return self
        draw = self.draw(f"settings of life {life}")
        if draw.random() < 0.3:
            return self
        reward = draw.choice(["none", "rollout", "group"]) if draw.random() < 0.4 else self.reward
        accepts = not self.accepts if draw.random() < 0.2 else self.accepts
        settings = _settings(draw, stops=self.has("stops"))
        if self.samples:
            settings = _of_samples(settings, self.draw(f"samples of life {life}"))
            reward = reward if self.episodes and reward == "none" else "rollout"
        if draw.random() < 0.5:  # only a few differ
            some = draw.sample(_INDEPENDENT, draw.randrange(1, 4))
            settings = self.settings | {name: settings[name] for name in some}
        return replace(self, settings=settings, reward=reward, accepts=accepts)

    @staticmethod
    def of(
        seed: int,
        *,
        only: Collection[str] | None = None,
        without: Collection[str] = (),
        companions: bool = False,
    ) -> Mix:
        """Draw the mix of a seed.

        Args:
            only: the kinds that every seed has, instead of drawing them.
            without: kinds that no seed has.
            companions: whether companion rows are requested with the tokens.
        """
        draw = random.Random(f"{seed}/kinds")
        drawn = {kind: draw.random() < share for kind, share in KINDS.items()}
        if only is not None:
            drawn = {kind: kind in only for kind in KINDS}
        kinds = frozenset(kind for kind, on in drawn.items() if on and kind not in without)
        # From a generator of its own, so that each seed keeps everything else.
        tiered = random.Random(f"{seed}/tier").random() < TIERED
        draw = random.Random(f"{seed}/mix")
        machine = SimConfig(
            # 25 tokens/s for each response: timeouts and bounds of the scheduler take few tokens.
            timing=replace(H200_QWEN3_4B, t0=0.04),
            max_running=draw.choice([2, 6, 64]),
            kv_tokens=draw.choice([1_500, 4_000, 1_000_000]),
            stream_interval=draw.choice([1, 8, 16, 64]),
            vocab_size=512,
            stream_at_pause=draw.random() < 0.5,
            tier=KvTier(page=PAGE) if tiered else None,
            model=TruthModel,
        )
        mix = Mix(
            seed=seed,
            kinds=kinds,
            engines=draw.choice([1, 1, 2, 2, 3, 4]),
            machine=machine,
            refit_seconds=draw.choice([0.0, 0.05, 1.0]),
            pause_seconds=draw.choice([0.002, 0.02, 0.5]),
            prompts=draw.choice([12, 24, 48, 48, 96]),
            batches=draw.choice([4, 6, 8, 10]),
            lives=draw.choice([2, 2, 3, 4]) if "kills" in kinds or "restores" in kinds else 1,
            median=draw.choice([15.0, 30.0, 60.0]),
            reward=draw.choice(["none", "rollout", "rollout", "group"]),
            plain=draw.random() < 0.3,
            accepts=draw.random() < 0.4,
            episodes=draw.random() < 0.35,
            store=(
                draw.choice(["memory", "memory", "memory", "memory", "sqlite"])
                if kinds & {"kills", "slow_store", "failing_store"}
                else draw.choice(["none", "none", "memory"])
            ),
            inline_store="slow_store" not in kinds and draw.random() < 0.7,
            async_source=draw.random() < 0.6,
            update_every=draw.choice([1, 1, 1, 2, 3]),
            train_s=draw.choice([0.0, 0.1, 2.0, 20.0]),
            settings=_settings(draw, stops="stops" in kinds),
            companions=companions,
        )
        draw = random.Random(f"{seed}/samples")
        if draw.random() >= SAMPLED:
            return mix
        reward = "none" if mix.episodes and mix.reward == "none" else "rollout"
        return replace(mix, settings=_of_samples(mix.settings, draw), reward=reward)


def _settings(draw: random.Random, *, stops: bool) -> dict[str, Any]:
    """Draw an allowed combination of configuration fields."""
    groups, size = draw.choice([1, 2, 3, 4]), draw.choice([1, 2, 3, 4])
    refit = draw.choice(["together", "together", "rolling"])
    pace = draw.choice(["synchronous", "asynchronous", "synchronous", "asynchronous", "auto"])
    straggler = draw.choice(["retract", "in_place", "abort", "run"])
    refill: Any = draw.choice(["wave", "wave", "pool", "pool", "rounds"])
    over_provision: Any = draw.choice([1.0, 1.25, 1.5, 2.0, 3.0, "auto"])
    if refit == "rolling":
        pace, straggler = "asynchronous", "run"
        over_provision = 1.5 if over_provision == "auto" else over_provision
        refill = "pool" if refill == "rounds" else refill
    if refill == "rounds":
        pace = "auto" if pace == "auto" else "synchronous"
        straggler = straggler if straggler == "retract" else "abort"
        refill = LengthBuckets(
            store=draw.choice([1.0, 2.5, 5.0]),
            probes=draw.choice([0, 1, 2]),
            oldest=draw.choice([1, 4, 16]),
        )
    elif refill == "pool":
        refill = Pool(together=draw.choice([1, 2, 4]), until=draw.choice([0.25, 0.5, 1.0]))
    stop: Any = draw.choice(["groups", "samples", "tokens"]) if stops else "groups"
    if stop == "samples":
        counts = [groups * size, groups * size * 2, max(1, groups * size - 1)]
        stop = Samples(draw.choice(counts)) if draw.random() < 0.75 else stop
    elif stop == "tokens":
        stop = Tokens(draw.choice([1, 60, 200, 600]))
    bound = draw.choice([None, None, 0, 1, 2, 4])
    rule: Any = draw.choice(["mask", "evict", "finish"])
    return {
        "delivery": "groups",
        "batch_groups": groups,
        "group_size": size,
        "over_provision": "auto" if pace == "auto" else over_provision,
        "refill": refill,
        "stop": stop,
        "straggler": straggler,
        "kv_after_refit": draw.choice(["auto", *_KV[straggler]]),
        "pace": pace,
        "refit": refit,
        "max_staleness": Staleness(bound, rule="mask" if bound is None else rule),
        "ready_batches": draw.choice([1, 2]),
        "save_interval_s": draw.choice([0.05, 1.0, 10.0]),
        "dispatch": Dispatch(
            placement=draw.choice(["prefix", "spread"]),
            max_in_flight=draw.choice([None, None, groups * size, groups * size + 3]),
            rate=draw.choice([5, 100, 2000]),
        ),
        "retries": Retries(
            attempts=draw.choice([1, 3]),
            interruptions=draw.choice([2, 16]),
            failed_groups=draw.choice([8, 64]),
        ),
        "health": Health(
            stall_s=draw.choice([5.0, 60.0]),
            slow_share=draw.choice([0.0, 0.2]),
            fleet_wait_s=draw.choice([5.0, 120.0, 600.0]),
        ),
        "timeouts": Timeouts(control_s=draw.choice([2.0, 120.0]), refit_s=draw.choice([5.0, 60.0])),
    }


def _of_samples(settings: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Return the settings with delivery by samples, without what that refuses."""
    size = draw.choice([2, 3, 4])
    changed = settings | {
        "delivery": "samples",
        "group_size": size,
        "siblings": draw.choice([None, *range(1, size)]),
        "retries": replace(
            settings["retries"],
            member=draw.choice(["again", "shrink", "drop_group"]),
            smallest_group=draw.choice([1, 2]),
        ),
    }
    if isinstance(settings["refill"], LengthBuckets):
        changed["refill"] = "wave"
    restarts = changed["refill"] == "wave" and changed["pace"] == "synchronous"
    if restarts and settings["max_staleness"].bound is not None and draw.random() < 0.4:
        changed["over_provision"] = 1.0
        changed["max_staleness"] = Staleness(settings["max_staleness"].bound, rule="restart")
    return changed


_KV = {
    "retract": ["recompute"],
    "in_place": ["keep", "apart"],
    "abort": ["recompute", "apart"],
    "run": ["recompute", "apart"],
}
_INDEPENDENT = (
    "max_staleness",
    "ready_batches",
    "save_interval_s",
    "retries",
    "health",
    "timeouts",
)
"""Settings that may change without the others."""
