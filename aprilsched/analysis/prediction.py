"""Compares the figures of a recorded run with those of its replay over the same batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from aprilsched.analysis.lengths_of_run import RecordedRun
from aprilsched.telemetry.figures import BatchFigures, RunSummary, SteadyState


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictionError:
    """Relative error of each figure (replayed / recorded - 1); 0 if both are 0, and None if one is
    not known."""

    burn_in: int
    """Number of batches that are left out at the start."""
    batches: int
    """Number of batches that are compared after those."""
    delivered_tokens_per_s: float | None
    efficiency: float | None
    off_policy_share: float | None
    seconds_a_batch: float | None


def prediction_error(
    recorded: RunSummary, replayed: RunSummary, *, burn_in: int
) -> PredictionError:
    """The error of a replay under the run's own settings, over the batches that both have."""
    end = min(recorded.batches, replayed.batches)
    real = steady_state_of(recorded.per_batch[:end], burn_in)
    guess = steady_state_of(replayed.per_batch[:end], burn_in)
    return PredictionError(
        burn_in=burn_in,
        batches=real.batches,
        delivered_tokens_per_s=_error(guess.delivered_tokens_per_s, real.delivered_tokens_per_s),
        efficiency=_error(guess.efficiency, real.efficiency),
        off_policy_share=_error(guess.off_policy_token_share, real.off_policy_token_share),
        seconds_a_batch=_error(guess.mean_batch_seconds, real.mean_batch_seconds),
    )


def recorded_summary(
    record: RecordedRun,
    *,
    batches: int,
    burn_in: int,
    bound: Callable[[Sequence[int], Sequence[int]], float],
) -> RunSummary:
    """The run's own summary, with the per-batch and steady-state figures of its first `batches`.

    Args:
        bound: gives T_bound in seconds for the lengths of prompts and responses. The efficiency of
            the recorded run and of the replay are computed with the same model, which also works
            for a run on servers.
    """
    pairs = zip(record.summary.per_batch, record.batches, strict=True)
    figures = [_bounded(one, bound(batch.prompts, batch.lengths)) for one, batch in pairs]
    figures = figures[:batches]
    return replace(
        record.summary, per_batch=figures, steady_state=steady_state_of(figures, burn_in)
    )


def steady_state_of(batches: Sequence[BatchFigures], burn_in: int) -> SteadyState:
    """The figures over `batches`, without the first `burn_in`."""
    kept = batches[burn_in:]
    seconds = sum(batch.seconds for batch in kept)
    tokens = sum(batch.tokens for batch in kept)
    bounds = [batch.t_bound for batch in kept if batch.t_bound is not None]
    return SteadyState(
        burn_in=burn_in,
        batches=len(kept),
        mean_batch_seconds=_ratio(seconds, len(kept)),
        mean_length=_ratio(
            sum(batch.mean_length * batch.rollouts for batch in kept),
            sum(batch.rollouts for batch in kept),
        ),
        delivered_tokens_per_s=_ratio(
            tokens, seconds + sum(batch.trainer_seconds for batch in kept)
        ),
        efficiency=_ratio(sum(bounds), seconds) if len(bounds) == len(kept) else None,
        off_policy_token_share=_ratio(
            sum(batch.off_policy_token_share * batch.tokens for batch in kept), tokens
        ),
    )


def _bounded(figures: BatchFigures, bound: float) -> BatchFigures:
    return replace(figures, t_bound=bound, efficiency=_ratio(bound, figures.seconds))


def _error(replayed: float | None, recorded: float | None) -> float | None:
    if replayed is None or recorded is None:
        return None
    if not recorded:
        return 0.0 if not replayed else None
    return replayed / recorded - 1


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
