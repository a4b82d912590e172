"""Every exception that aprilsched raises, one type for each boundary.

::

    AprilschedError
    ├── ConfigError            the caller's settings, prompts or sampling parameters
    │   └── MissingExtra       a package that only some parts need is not installed
    ├── EngineError            one engine: .engine names it
    │   ├── EngineUnreachable  nothing was sent; the call may be repeated
    │   ├── EngineProtocolError  the answer is not what the protocol allows
    │   ├── EngineRejected     the engine answered with an error status
    │   ├── ControlTimeout     a control call did not answer in time
    │   ├── EngineRestarted    another process answers than the one that was opened
    │   └── TornWeights        an update began and did not end well; neither old nor new
    ├── RefitError             no engine took the new weights; the old version goes on
    ├── FleetLost              no engine is left to generate on, and none came back in time
    ├── RunGivenUp             group after group failed, and none was accepted
    ├── PromptsExhausted       the prompts have ended and everything was delivered
    ├── EpisodeError           an episode used its turn in a way that cannot be recorded
    ├── CallbackError          the caller's code raised CancelledError, StopIteration or the like
    ├── RunFolderError         a run folder is missing, taken or unreadable
    ├── StoreError             a store or checkpoint cannot be read, written or used
    ├── SchedulerClosed        the scheduler was used outside of its ``async with`` block
    └── InvariantViolation     a bug in aprilsched: state that must not be, was

A failed rollout, reward or prompt is no exception: it is an entry of the ledger
(:mod:`aprilsched.core.state.ledger`) with its cause.
"""

__all__ = [
    "AprilschedError",
    "CallbackError",
    "ConfigError",
    "ControlTimeout",
    "EngineError",
    "EngineProtocolError",
    "EngineRejected",
    "EngineRestarted",
    "EngineUnreachable",
    "EpisodeError",
    "FleetLost",
    "InvariantViolation",
    "MissingExtra",
    "PromptsExhausted",
    "RefitError",
    "RunFolderError",
    "RunGivenUp",
    "SchedulerClosed",
    "StoreError",
    "TornWeights",
]


class AprilschedError(Exception):
    """Base of all errors raised by this package."""


class ConfigError(AprilschedError, ValueError):
    """A setting, prompt or sampling parameter is wrong; the message says what to change."""


class MissingExtra(ConfigError, ImportError):
    """A package that only some parts need is not installed; the message names the extra."""


class EngineError(AprilschedError):
    """Something went wrong with one engine."""

    def __init__(self, engine: str, message: str) -> None:
        super().__init__(f"{engine}: {message}")
        self.engine = engine


class EngineUnreachable(EngineError):
    """The connection failed before anything was sent, so repeating the call is safe."""


class EngineProtocolError(EngineError):
    """The engine answered with something the protocol does not allow."""


class EngineRejected(EngineError):
    """The engine answered with an HTTP error status."""

    def __init__(self, engine: str, message: str, *, status: int) -> None:
        super().__init__(engine, message)
        self.status = status


class ControlTimeout(EngineError):
    """A pause, flush, refit or continue call did not answer within its time."""


class EngineRestarted(EngineError):
    """Behind the engine's address is another process than the one that was opened."""


class TornWeights(EngineError):
    """The engine's weights are neither the old nor the new ones; only a whole refit mends it."""


class RefitError(AprilschedError):
    """No engine took the new weights; generation goes on under the old version."""


class FleetLost(AprilschedError):
    """Every engine is lost and none came back within ``fleet_wait_s``."""


class RunGivenUp(AprilschedError):
    """Group after group failed and none was accepted; the ledger has every cause."""


class PromptsExhausted(AprilschedError):
    """The prompts have ended and everything was delivered; `async for` just ends."""


class EpisodeError(AprilschedError):
    """An episode asked for something that cannot be recorded as one token sequence."""


class CallbackError(AprilschedError):
    """A function that the caller gave raised what is no ordinary exception; its cause is that.

    CancelledError, StopIteration, GeneratorExit and SystemExit mean something to asyncio itself,
    so they must not travel through the scheduler's tasks as they are.
    """

    def __init__(self, what: str, error: BaseException) -> None:
        super().__init__(
            f"{what} raised {error!r}; catch it there, or raise an ordinary exception instead."
        )


class RunFolderError(AprilschedError):
    """A run folder is missing, already taken, or cannot be read."""


class StoreError(AprilschedError):
    """A store or checkpoint cannot be opened, read or written; the message says what to do."""


class SchedulerClosed(AprilschedError, RuntimeError):
    """The scheduler is not open; use it inside ``async with RolloutScheduler(...)``."""


class InvariantViolation(AprilschedError, AssertionError):
    """An internal invariant does not hold: a bug in aprilsched."""
