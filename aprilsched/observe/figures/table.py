"""Every figure of a run in progress, by its name.

Prometheus and the trackers receive the figures in this table, and the reference is generated from
it. It combines the batch figures and token counts of :mod:`~aprilsched.observe.figures.figures`,
which summary.json, the live view and the report also use, with figures that only a run in progress
has. Names correspond: ``staleness_max`` in summary.json is ``batch/staleness_max`` in a tracker and
``aprilsched_batch_staleness_max_versions`` in Prometheus.

Invariants, checked by a test: names and units follow the convention of Prometheus, and only figures
in the table are exposed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias, get_args

from aprilsched.kernel.core.state.ledger import Counters, Reason
from aprilsched.observe.figures.engine_time import BUSY, PARTS, EngineState, EngineUsage, Part
from aprilsched.observe.figures.figures import (
    BatchFigures,
    Figure,
    ForecastFigures,
    Measured,
    figures_in,
)
from aprilsched.observe.figures.live_figures import LiveFigures
from aprilsched.observe.figures.run_figures import TokenFigures

Labelled: TypeAlias = Mapping[tuple[str, ...], float]
Value: TypeAlias = float | Labelled | None
"""A figure, or one value for each combination of its labels; None if unknown."""

_SHORT_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_LONG_SECONDS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
_LENGTHS = tuple(float(2**power) for power in range(4, 18))
_VERSIONS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
_STATES: tuple[EngineState, ...] = get_args(EngineState)


@dataclass(kw_only=True, slots=True)
class Clients:
    """A gateway's counts of its clients, which appear in no fact.

    Attributes:
        responses: returns the number of open responses.
        paused: returns whether a client has paused the gateway.
        streams: number of open streams; a stream may carry several responses.
        refusals: number of requests answered with an error, by reason.
        requests: number of requests that have ended, by HTTP status; see `gateway/requests`.
    """

    responses: Callable[[], int]
    paused: Callable[[], bool]
    streams: int = 0
    refusals: Counter[str] = field(default_factory=Counter[str])
    requests: Counter[str] = field(default_factory=Counter[str])


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """The sources from which figures are read, while the lock of `figures` is held.

    Attributes:
        updates: number of updates that ended, by outcome.
        seconds: seconds of each engine by part, as exported to Prometheus.
        spent: seconds of all engines between the last two batches, by part; empty while no batch
            is being delivered.
        clients: the counts of a gateway; None without a gateway.
    """

    figures: LiveFigures
    updates: Mapping[str, int] = field(default_factory=dict[str, int])
    seconds: Labelled = field(default_factory=dict[tuple[str, ...], float])
    spent: Mapping[Part, float] = field(default_factory=dict[Part, float])
    clients: Clients | None = None


def values_at(figure: Figure, moment: Moment) -> Labelled:
    """Return the values of a figure by labels; empty if unknown, and for a histogram."""
    found: Value = None if figure.of is None else figure.of(moment)
    if found is None:
        return {}
    return found if isinstance(found, Mapping) else {(): found}


def _of_batches() -> Iterator[Figure]:
    """Yield the figures of the latest batch."""
    for name, each in figures_in(BatchFigures).items():
        if each.of is not None and (each.tracked or each.exposed):
            yield replace(each, name=f"batch/{name}", of=_batch(lambda b, of=each.of: of([b])))


def _of_tokens() -> Iterator[Figure]:
    """Yield the counts of tokens."""
    for name, each in figures_in(TokenFigures).items():
        if each.of is not None:
            yield replace(each, name=f"run/tokens_{name}", of=_counted(each.of))


def _counted(take: Callable[[Counters], float]) -> Callable[[Moment], float]:
    """Return the source of a count of the whole run."""
    return lambda moment: take(moment.figures.counters)


def _batch(take: Callable[[Measured], float | None]) -> Callable[[Moment], float | None]:
    """Return the source of a figure of the latest batch."""
    return lambda m: None if m.figures.batch is None else take(m.figures.batch)


def _forecast(take: Callable[[ForecastFigures], float | None]) -> Callable[[Moment], float | None]:
    """Return the source of a figure of the latest batch's forecast."""
    return _batch(lambda batch: None if batch.forecast is None else take(batch.forecast))


def _engines(take: Callable[[EngineUsage], float | None]) -> Callable[[Moment], Value]:
    """Return the source of a figure of each engine."""

    def of(moment: Moment) -> Value:
        found = {name: take(each) for name, each in moment.figures.state.engines.items()}
        return {(name,): value for name, value in found.items() if value is not None}

    return of


def _states(moment: Moment) -> Value:
    used = moment.figures.state.engines
    return {(n, state): state == each.state for n, each in used.items() for state in _STATES}


def _in_flight(moment: Moment) -> float:
    counters = moment.figures.counters
    return counters.launched - counters.delivered - moment.figures.ledger.rollouts.total()


def _dropped(moment: Moment) -> Value:
    return {(reason.value,): moment.figures.ledger.rollouts[reason] for reason in Reason}


def _share(*parts: Part) -> Callable[[Moment], float | None]:
    def of(moment: Moment) -> float | None:
        total = sum(moment.spent.values())
        return sum(moment.spent[part] for part in parts) / total if total > 0 else None

    return of


def _clients(take: Callable[[Clients], Value]) -> Callable[[Moment], Value]:
    """Return the source of a figure of a gateway's clients."""
    return lambda moment: None if moment.clients is None else take(moment.clients)


def _rollout_seconds(moment: Moment) -> Value:
    batch = moment.figures.batch
    found = {} if batch is None else batch.figures.rollout_seconds
    return {(part,): seconds for part, seconds in found.items()}


# fmt: off
_FIGURES: tuple[Figure, ...] = (
    # --- rollouts and tokens -------------------------------------------------------------------
    Figure(name="run/rollouts_launched", kind="counter", of=_counted(lambda c: c.launched),
           help="Rollouts launched, those of evaluations included."),
    Figure(name="run/rollouts_delivered", kind="counter", of=_counted(lambda c: c.delivered),
           help="Rollouts handed to the trainer, in batches and evaluations."),
    Figure(name="run/rollouts_dropped", kind="counter", labels=("reason",), of=_dropped,
           help="Rollouts dropped on purpose, by the ledger's reason."),
    Figure(name="run/rollouts_in_flight", of=_in_flight,
           help="Rollouts launched, and neither delivered nor dropped yet."),
    Figure(name="run/units_ready", of=lambda m: m.figures.state.units_ready,
           help="Complete groups, or single samples, that wait for their batch."),
    Figure(name="run/request_retries", kind="counter", of=_counted(lambda c: c.retries),
           help="Attempts sent again after one that failed."),
    Figure(name="run/rollouts_regenerated", kind="counter", of=_counted(lambda c: c.regenerated),
           help="Rollouts launched in the place of a lost member of their group."),
    Figure(name="run/turns_refused", kind="counter", of=_counted(lambda c: c.turns_refused),
           help="Turns of episodes that engines refused, such as those beyond the context."),
    Figure(name="run/teardowns_failed", kind="counter", of=_counted(lambda c: c.teardowns_failed),
           help="Functions for the end of an episode that raised or did not end in time."),
    *_of_tokens(),
    # --- batches -------------------------------------------------------------------------------
    Figure(name="run/batches_delivered", kind="counter", of=_counted(lambda c: c.batches),
           help="Batches handed to the trainer."),
    *_of_batches(),
    Figure(name="batch/forecast_seconds", unit="seconds",
           of=_forecast(lambda f: f.seconds_forecast),
           help="What automatic scheduling expected of the seconds; absent without a "
                "forecast, like the other ones."),
    Figure(name="batch/forecast_efficiency", unit="share",
           of=_forecast(lambda f: f.efficiency_forecast),
           help="What it expected of the efficiency."),
    Figure(name="batch/efficiency_beside_forecast", unit="share",
           of=_forecast(lambda f: f.efficiency),
           help="T_bound over the seconds, by the step times of the forecast."),
    Figure(name="batch/forecast_off_policy_token_share", unit="share",
           of=_forecast(lambda f: f.off_policy_token_share_forecast),
           help="What it expected of the share of tokens that an older version sampled."),
    Figure(name="batch/reward", of=_batch(lambda b: b.figures.rewards.mean),
           help="Mean reward of the rollouts; absent without rewards. A tracker also has the "
                "mean of each named part of the reward, as `batch/reward/NAME`."),
    Figure(name="batch/rollout_seconds", unit="seconds", labels=("part",), of=_rollout_seconds,
           help="Mean seconds of a rollout by what it was at. They add up to the time from its "
                "launch to its delivery, which a tracker has."),
    Figure(name="batch/duration_seconds", kind="histogram", unit="seconds",
           buckets=_LONG_SECONDS,
           help="From one delivery to the next, without the time that the engines stood "
                "still for the trainer."),
    Figure(name="batch/wait_seconds", kind="histogram", unit="seconds",
           buckets=_LONG_SECONDS,
           help="The trainer's wait for its batch, from the call to the delivery."),
    Figure(name="run/response_length_tokens", kind="histogram", unit="tokens",
           buckets=_LENGTHS,
           help="Lengths of the responses delivered in batches."),
    Figure(name="run/rollout_staleness_versions", kind="histogram", unit="versions",
           buckets=_VERSIONS,
           help="Of each rollout delivered in a batch: the consuming version minus that of "
                "its oldest token."),
    # --- updates -------------------------------------------------------------------------------
    Figure(name="run/policy_version", of=lambda m: m.figures.state.version, tracked=False,
           help="The policy version of the fleet."),
    Figure(name="run/updates", kind="counter", labels=("outcome",), tracked=False,
           of=lambda m: {(outcome,): n for outcome, n in m.updates.items()},
           help="Updates of the weights that ended; failed ones reached no engine."),
    Figure(name="run/update_duration_seconds", kind="histogram", unit="seconds",
           buckets=_SHORT_SECONDS,
           help="From the call for a new version to its end."),
    Figure(name="run/pause_duration_seconds", kind="histogram", unit="seconds",
           buckets=_SHORT_SECONDS,
           help="An engine's pause, from the call to the answer of the continue call."),
    Figure(name="run/refit_duration_seconds", kind="histogram", unit="seconds",
           buckets=_SHORT_SECONDS,
           help="An engine's refit: new weights come in."),
    # --- engines -------------------------------------------------------------------------------
    Figure(name="run/engine_up", labels=("engine",), tracked=False,
           of=_engines(lambda e: e.state != "lost"),
           help="1 while the engine is in use, 0 while it is lost or on standby."),
    Figure(name="run/engine_state", labels=("engine", "state"), tracked=False, of=_states,
           help="1 for the state that the engine is in, 0 for the others."),
    Figure(name="run/engine_version", labels=("engine",), tracked=False,
           of=_engines(lambda e: e.version),
           help="The policy version of the engine; absent while its weights are "
                "inconsistent."),
    Figure(name="run/engine_losses", kind="counter", labels=("engine",),
           of=_engines(lambda e: e.losses),
           help="How often the engine was taken out of use."),
    Figure(name="run/engine_tokens_generated", kind="counter", labels=("engine",),
           tracked=False, of=_engines(lambda e: e.tokens),
           help="Tokens that arrived from the engine."),
    Figure(name="run/requests_in_flight", labels=("engine",),
           of=_engines(lambda e: e.in_flight),
           help="Requests that are with the engine."),
    Figure(name="run/engine_slots", labels=("engine",), tracked=False,
           of=_engines(lambda e: e.capacity),
           help="Slots that the engine's seconds are divided by: the requests that it runs at "
                "once, or the most that it had if it does not report this limit."),
    Figure(name="run/engine_seconds", kind="counter", unit="seconds", tracked=False,
           labels=("engine", "part"), of=lambda m: m.seconds,
           help="The engine's wall time by part: busy, or idle for a cause."),
    # --- clients of a gateway ------------------------------------------------------------------
    Figure(name="gateway/open_responses", tracked=False, of=_clients(lambda c: c.responses()),
           help="Responses that a client of a gateway waits for or reads, or may claim after a "
                "restart."),
    Figure(name="gateway/paused", tracked=False, of=_clients(lambda c: c.paused()),
           help="1 from a client's pause call to its continue call; idle engines stay running."),
    Figure(name="gateway/open_streams", tracked=False, of=_clients(lambda c: c.streams),
           help="Requests to a gateway whose answer is being streamed."),
    Figure(name="gateway/requests", kind="counter", labels=("status",), tracked=False,
           of=_clients(lambda c: {(status,): n for status, n in c.requests.items()}),
           help="Requests to a gateway that have ended, by HTTP status, or that of the error in a "
                "stream; 499 if the client disconnected first."),
    Figure(name="gateway/request_seconds", kind="histogram", unit="seconds",
           buckets=_LONG_SECONDS,
           help="From a request to a gateway to the end of its answer."),
    Figure(name="gateway/refusals", kind="counter", labels=("reason",), tracked=False,
           of=_clients(lambda c: {(reason,): n for reason, n in c.refusals.items()}),
           help="Requests to a gateway that were answered with an error, by reason; an error in a "
                "stream counts too."),
    Figure(name="gateway/first_token_seconds", kind="histogram", unit="seconds",
           buckets=_SHORT_SECONDS,
           help="From a request to a gateway to the first token of a response to it."),
    # --- shares of the engines' time -----------------------------------------------------------
    Figure(name="engines/busy", unit="share", exposed=False, of=_share(*BUSY),
           help="Share of the engines' time since the batch before in which slots decode."),
    *(
        Figure(name=f"engines/{part}", unit="share", exposed=False, of=_share(part),
               help=f"Share of that time. {meaning}")
        for part, meaning in PARTS.items()
    ),
)
# fmt: on


_TRAINERS = frozenset(
    {"run/batches_delivered", "run/units_ready", "run/turns_refused", "run/teardowns_failed"}
)


def exposed(name: str, *, gateway: bool) -> bool:
    """Return whether Prometheus gets the figure; a gateway has none that needs a trainer."""
    of_trainer = name in _TRAINERS or name.startswith("batch/")
    return FIGURES[name].exposed and not (gateway and of_trainer)


FIGURES: dict[str, Figure] = {figure.name: figure for figure in _FIGURES}
"""The figures by name, in the order in which they are shown."""
