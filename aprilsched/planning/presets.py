"""Known recipes as settings. Each one sets the values that its source sets, and no others.

A recipe takes a configuration to change, ``april(SchedulerConfig(batch_groups=64))``, and has a
name on the command line. None of them changes what happens to stragglers (`straggler`), which is
"abort" in most of the sources. None of them sets `delivery` either: those that defer no groups
combine with both, as ``replace(april(config), delivery="samples")``. What each costs at the age of
its tokens, compared with single samples, is in docs/scheduling.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from aprilsched.config import LengthBuckets, Pool, SchedulerConfig, Staleness

__all__ = [
    "PRESETS",
    "Preset",
    "april",
    "areal",
    "auto",
    "copris",
    "on_policy",
    "pool",
    "rollpacker",
    "slime",
    "sync",
]

Preset: TypeAlias = Callable[[SchedulerConfig], SchedulerConfig]


def sync(config: SchedulerConfig) -> SchedulerConfig:
    """Wait for every last response.

    Source: synchronous on-policy RL, PPO and GRPO as first published.
    Known cost: engines decode a few stragglers, and then nothing, at the end of each batch.
    """
    return replace(config, pace="synchronous", over_provision=1.0, refill="wave")


def april(config: SchedulerConfig) -> SchedulerConfig:
    """Launch twice the batch, deliver the first half, and carry the rest.

    Source: APRIL (arXiv 2509.18521), with the ratio of its experiments: 64 prompts for a batch
    of 32.
    Known cost: every carried rollout is prefilled again at each refit, and three quarters of the
    tokens are off-policy on its own example.
    """
    return replace(config, over_provision=2.0, refill="wave")


def slime(config: SchedulerConfig) -> SchedulerConfig:
    """Launch half a batch more than needed, and carry what is left over.

    Source: THUDM/slime, ``--partial-rollout`` with an ``--over-sampling-batch-size`` above the
    batch size, which is a free choice there (1.5 batches here).
    Known cost: the same as APRIL's, but less of both. Its ``--mask-offpolicy-in-partial-rollout``
    is not part of this: it leaves carried tokens, which are those of long responses, out of the
    loss.
    """
    return replace(config, over_provision=1.5, refill="wave")


def areal(config: SchedulerConfig) -> SchedulerConfig:
    """Keep generating while the trainer trains, up to four versions stale, one group at a time.

    Source: AReaL (arXiv 2505.24298), ``max_head_offpolicyness=4`` as in its documentation, and
    one batch's worth of rollouts at the same time.
    Known cost: a prefill pass for each group that is admitted, everything in flight prefilled
    again at each update, and the highest off-policy share for its speed.
    """
    return replace(
        config,
        pace="asynchronous",
        over_provision=1.0,
        refill=Pool(together=1),
        max_staleness=replace(config.policies.staleness, bound=4),
    )


def copris(config: SchedulerConfig) -> SchedulerConfig:
    """Constant concurrency: a pool of one and a half batches, carried rollouts first.

    Source: CoPRIS (arXiv 2511.05589), which keeps a fixed number of rollouts in flight, ends the
    batch early and resumes unfinished ones first; its number is a setting (1.5 batches here).
    Known cost: the whole pool is interrupted at each update. It also makes a prefill pass for each
    group, because groups are started one by one.
    """
    return replace(config, over_provision=1.5, refill=Pool(together=1))


def pool(config: SchedulerConfig) -> SchedulerConfig:
    """Keep one batch's worth generating, refilled four groups at a time.

    Source: the constant pool of fully asynchronous trainers, with coalesced refills.
    Known cost: nearly everything is in flight at a refit, so it recomputes most and is most stale.
    """
    return replace(config, over_provision=1.0, refill=Pool(together=4))


def rollpacker(config: SchedulerConfig) -> SchedulerConfig:
    """Let a quarter more groups race than a batch takes, and gather the losers in long batches.

    Source: RollPacker (arXiv 2509.21009), tail batching by prompts with its ratio of 1.25. Its race
    of responses within a prompt is not part of this, because it censors lengths.
    Known cost: no token is stale, but the losers' tokens are discarded. Their prompts are sampled
    again, so the delivered responses stay biased towards short ones. ``max_staleness=None`` keeps
    the tokens and has no such bias.
    """
    fresh = Staleness(0, rule="restart")
    config = replace(config, pace="synchronous", over_provision=1.25, refill="tail")
    return replace(config, max_staleness=fresh)


def on_policy(config: SchedulerConfig) -> SchedulerConfig:
    """Wait for every response of a batch, whose prompts have similar expected lengths.

    Source: this project. Length buckets with batches that are waited for. Four batches of prompts
    are open. One response of each prompt is sampled in the tail of a batch and discarded, and its
    length is remembered.
    Known cost: discarded tokens are a tenth of the delivered ones, each batch contains either short
    or long responses, and prompts need keys. No token is stale, and lengths are not biased.
    """
    return replace(
        config,
        pace="synchronous",
        over_provision=1.0,
        refill=LengthBuckets(store=4.0, probe_after=0.97),
        max_staleness=Staleness(0, rule="restart"),
    )


def auto(config: SchedulerConfig) -> SchedulerConfig:
    """Choose the ratio, the refill rule and the pace during the run.

    Source: this project. It takes the schedule with the least mean staleness within 1 % of the
    best by `objective`, by trials on lengths like those seen, and chooses again when lengths
    drift (:mod:`aprilsched.planning`).
    Known cost: 2 to 16 s of CPU for each choice, of which there are four in the first 27 batches.
    It needs a step-time model of the engines.
    """
    # Weights that the trainer loads itself are followed on a pace that never continues its engines.
    pace = config.pace if config.follow_weights else "auto"
    return replace(config, over_provision="auto", pace=pace)


PRESETS: dict[str, Preset] = {
    "sync": sync,
    "april": april,
    "slime": slime,
    "areal": areal,
    "copris": copris,
    "pool": pool,
    "rollpacker": rollpacker,
    "on_policy": on_policy,
    "auto": auto,
}
"""The recipes by name."""
