"""The headline figures of a run, each with one line that explains it."""

from __future__ import annotations

from aprilsched.analysis.report.report_data import Headline
from aprilsched.analysis.report.words import amount, nats, percent, seconds, signed_percent
from aprilsched.telemetry.figures import RunSummary

__all__ = ["headlines"]


def headlines(summary: RunSummary, utilization: float) -> list[Headline]:
    """The headline figures of a run whose engines were busy for the share `utilization` of their
    time."""
    return [
        *_speed(summary, utilization),
        *_price(summary),
        *_rewards(summary),
        *_alignment(summary),
        *_conservation(summary),
    ]


def _speed(summary: RunSummary, utilization: float) -> list[Headline]:
    steady = summary.steady_state
    return [
        Headline(
            key="delivered_tokens_per_s",
            label="Delivered tokens per second",
            value=summary.delivered_tokens_per_s,
            text=amount(summary.delivered_tokens_per_s),
            explanation="What reached the trainer, over all of the time; after the start (batches "
            f"up to {steady.burn_in:,}) {amount(steady.delivered_tokens_per_s)}.",
            better="higher",
            unit="rate",
        ),
        Headline(
            key="efficiency",
            label="Efficiency",
            value=summary.efficiency,
            text=percent(summary.efficiency),
            explanation="The shortest time any schedule could need for these responses, over the "
            "time taken (T_bound / T).",
            better="higher",
            unit="share",
        ),
        Headline(
            key="utilization",
            label="Engine utilization",
            value=utilization,
            text=percent(utilization),
            explanation="The share of the engines' slots and time in which responses grew or "
            "prompts were read.",
            better="higher",
            unit="share",
        ),
        Headline(
            key="seconds",
            label="Seconds",
            value=summary.seconds.wall,
            text=seconds(summary.seconds.wall),
            explanation=f"From the opened fleet to the end, on a {summary.clock} clock; an engine "
            f"was paused for {seconds(summary.seconds.pause)} of them.",
            better="lower",
            unit="seconds",
        ),
    ]


def _price(summary: RunSummary) -> list[Headline]:
    staleness, bias = summary.staleness, summary.bias
    reference = {
        "workload_mean": "the workload's mean",
        "run_after_burn_in": "the later batches",
        None: "the mean",
    }[bias.bias_reference]
    return [
        Headline(
            key="off_policy_token_share",
            label="Off-policy tokens",
            value=summary.off_policy_token_share,
            text=percent(summary.off_policy_token_share),
            explanation="Delivered tokens that an older policy sampled than the one they train.",
            better="lower",
            unit="share",
        ),
        Headline(
            key="staleness_mean",
            label="Staleness, mean",
            value=staleness.mean,
            text=f"{staleness.mean:.2f}",
            explanation="Versions between sampling a token and training on it.",
            better="lower",
            unit="versions",
        ),
        Headline(
            key="staleness_max",
            label="Staleness, largest",
            value=staleness.max,
            text=f"{staleness.max:,}",
            explanation="Of the oldest delivered token; "
            f"{staleness.max_trained:,} of those that count in the loss.",
            better="lower",
        ),
        Headline(
            key="length_bias",
            label="Length bias",
            value=bias.bias_estimate,
            text=signed_percent(bias.bias_estimate),
            explanation=f"How much longer the delivered responses are than {reference}; short "
            "ones come first, so a young run is negative.",
            better="zero",
            unit="share",
        ),
    ]


def _rewards(summary: RunSummary) -> list[Headline]:
    rewards = summary.rewards
    if rewards.mean is None and not rewards.parts:
        return []
    parts = ", ".join(f"{name}: {amount(mean, 3)}" for name, mean in rewards.parts.items())
    return [
        Headline(
            key="reward",
            label="Reward, mean",
            value=rewards.mean,
            text=amount(rewards.mean, 3),
            explanation=f"Of the delivered responses. Means of its parts: {parts}."
            if parts
            else "Of the delivered responses.",
            unit="reward",
        )
    ]


def _alignment(summary: RunSummary) -> list[Headline]:
    found = summary.alignment
    if found is None:
        return []
    return [
        Headline(
            key="alignment_k3",
            label="Mismatch of engine and trainer",
            value=found.whole.k3,
            text=nats(found.whole.k3),
            explanation="Estimated KL divergence of their policies under the same weights; it "
            "looks like off-policyness, and is not.",
            better="lower",
            unit="nats",
        )
    ]


def _conservation(summary: RunSummary) -> list[Headline]:
    rollouts, tokens = summary.rollouts, summary.tokens
    dropped = sum(rollouts.dropped.values())
    reasons = ", ".join(f"{name}: {n:,}" for name, n in rollouts.dropped.items())
    return [
        Headline(
            key="delivered",
            label="Responses delivered",
            value=rollouts.delivered,
            text=f"{rollouts.delivered:,}",
            explanation=f"Of {rollouts.launched:,} that were started; "
            f"{rollouts.in_flight:,} were in flight at the end.",
        ),
        Headline(
            key="dropped",
            label="Dropped",
            value=dropped,
            text=f"{dropped:,}",
            explanation=reasons or "Responses that were given up on purpose, with a reason.",
            better="lower",
        ),
        Headline(
            key="lost_or_duplicated",
            label="Lost, duplicated",
            value=rollouts.lost + rollouts.duplicated,
            text=f"{rollouts.lost:,}, {rollouts.duplicated:,}",
            explanation="Responses that disappeared, or were delivered twice: anything but 0 is a "
            "bug.",
            better="lower",
        ),
        Headline(
            key="reprefilled_tokens",
            label="Tokens recomputed",
            value=tokens.reprefilled,
            text=f"{tokens.reprefilled:,}",
            explanation="Tokens of contexts that engines computed again after a pause or a move; "
            f"{tokens.generated:,} tokens were generated.",
            better="lower",
        ),
    ]
