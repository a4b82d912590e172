"""Every exception that aprilsched raises, for those who catch them.

::

    AprilschedError
    ├── ConfigError            a setting, prompt or sampling parameter of the caller is wrong
    │   └── MissingExtra       a package that only some parts need is not installed
    ├── EngineError            one engine failed; .engine names it
    │   ├── EngineUnreachable  nothing was sent; the call may be repeated
    │   ├── EngineProtocolError  the protocol does not allow the engine's answer
    │   ├── EngineRejected     the engine answered with an error status
    │   │   └── EngineBusy     it has no room for a request now; sending it again later is safe
    │   ├── ControlTimeout     the engine did not answer a control call in time
    │   ├── EngineRestarted    another process answers than the one that was opened
    │   ├── EngineTaken        another scheduler, gateway or trainer controls the engine too
    │   └── InconsistentWeights  an update failed halfway; the weights are neither old nor new
    ├── RefitError             no engine took the new weights; the old version stays in use
    ├── FleetLost              no engine is left to generate on, and none came back in time
    ├── RunEnded               no further batch comes; it counts what was delivered and failed
    │   ├── RunGivenUp         too many groups failed, or none was delivered
    │   └── PromptsExhausted   the prompts have ended, as they should
    ├── TurnRefused            the engines refuse one turn of an episode, which may continue
    ├── EpisodeError           an episode used its turn in a way that cannot be recorded
    ├── MemberLost             raised by user code: its rollout is lost, and its group may continue
    ├── CallbackError          the caller's code raised CancelledError, StopIteration or the like
    ├── RunFolderError         a run folder is missing, in use or unreadable
    ├── StoreError             a store or checkpoint cannot be read, written or used
    ├── SchedulerClosed        the scheduler was used outside of its ``async with`` block
    └── InvariantViolation     aprilsched has a bug: its state is one that must not occur

A failed rollout, reward or prompt raises no exception. It becomes an entry of the ledger
(:mod:`aprilsched.kernel.core.state.ledger`) with its cause.
"""

from collections import Counter
from collections.abc import Mapping

__all__ = [
    "AprilschedError",
    "CallbackError",
    "ConfigError",
    "ControlTimeout",
    "EngineBusy",
    "EngineError",
    "EngineProtocolError",
    "EngineRejected",
    "EngineRestarted",
    "EngineTaken",
    "EngineUnreachable",
    "EpisodeError",
    "FleetLost",
    "InconsistentWeights",
    "InvariantViolation",
    "MemberLost",
    "MissingExtra",
    "PromptsExhausted",
    "RefitError",
    "RunEnded",
    "RunFolderError",
    "RunGivenUp",
    "SchedulerClosed",
    "StoreError",
    "TurnRefused",
]


class AprilschedError(Exception):
    """Base of all errors raised by this package."""


class ConfigError(AprilschedError, ValueError):
    """A setting, prompt or sampling parameter is wrong; the message names the change."""


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
    """The engine gave an answer that the protocol does not allow."""


class EngineRejected(EngineError):
    """The engine answered with an HTTP error status."""

    def __init__(self, engine: str, message: str, *, status: int) -> None:
        super().__init__(engine, message)
        self.status = status


class EngineBusy(EngineRejected):
    """The engine has no room for a request now, and does not have it; it may be sent again.

    Attributes:
        retry_after_s: seconds that the engine asks to wait; None if it does not.
    """

    def __init__(
        self, engine: str, message: str, *, status: int, retry_after_s: float | None = None
    ) -> None:
        super().__init__(engine, message, status=status)
        self.retry_after_s = retry_after_s


class ControlTimeout(EngineError):
    """The engine did not answer a pause, flush, refit or continue call in time."""


class EngineRestarted(EngineError):
    """Another process answers at the engine's address than the one that was opened."""


class EngineTaken(EngineError):
    """Another scheduler, gateway or trainer controls the engine; two owners would mix weights."""


class InconsistentWeights(EngineError):
    """The engine's weights are neither the old nor the new ones; only a full refit repairs them."""


class RefitError(AprilschedError):
    """No engine took the new weights. Generation continues under the old version where an engine
    surely has it still; otherwise it waits for an update that succeeds, as the message says."""


class FleetLost(AprilschedError):
    """Every engine is lost and none came back within ``health.fleet_wait_s``."""


class RunEnded(AprilschedError):
    """No further batch comes; the counts are those of the whole run, also if it was resumed.

    Attributes:
        delivered: number of groups that were delivered.
        failed: number of groups that failed, and of prompts that cannot be used. Groups that the
            accept function rejected, or that became too stale, are not among them.
        causes: number of failed groups by cause, the most frequent cause first.
    """

    def __init__(
        self, message: str, *, delivered: int = 0, causes: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(message)
        self.delivered = delivered
        self.causes = dict(Counter(causes or {}).most_common())
        self.failed = sum(self.causes.values())


class RunGivenUp(RunEnded):
    """Too many groups failed: ``retries.failed_groups`` in a row, or at the end of the prompts more
    than the share ``retries.failed_share``; or the prompts have ended and no group was delivered.

    Its ``__cause__`` is the exception of the user's function, if that was the cause.
    """


class PromptsExhausted(RunEnded):
    """The prompts have ended, and what did not fail was delivered; `async for` ends without this
    error."""


class TurnRefused(AprilschedError):
    """The engines refuse the request of a turn, such as a context that is too long.

    The rollout is as it was before the turn, and the episode may ask for another one. If it raises
    instead, its rollout is lost, and ``retries.member`` decides what becomes of its group.
    """


class EpisodeError(AprilschedError):
    """An episode asked for something that cannot be recorded as one token sequence."""


class MemberLost(AprilschedError):
    """Raised by user code: an episode or a reward function says that its rollout is lost by no
    fault of its own, for example because its sandbox is gone. ``retries.member`` says what becomes
    of its group."""


class CallbackError(AprilschedError):
    """The caller's function raised an exception that asyncio reserves; it is the ``__cause__``.

    CancelledError, StopIteration, GeneratorExit and SystemExit have a meaning for asyncio itself,
    so the scheduler's tasks must not raise them.
    """

    def __init__(self, what: str, error: BaseException) -> None:
        super().__init__(
            f"{what} raised {error!r}; catch it there, or raise an ordinary exception instead."
        )


class RunFolderError(AprilschedError):
    """A run folder is missing, already in use, or cannot be read."""


class StoreError(AprilschedError):
    """A store or checkpoint cannot be opened, read or written; the message names a remedy."""


class SchedulerClosed(AprilschedError, RuntimeError):
    """The scheduler is not open; use it inside ``async with RolloutScheduler(...)``."""


def closed_meanwhile() -> SchedulerClosed:
    """The error for a call that was waiting when the scheduler was closed, or came later."""
    return SchedulerClosed(
        "the scheduler is closed, so it returns nothing; call it inside its block."
    )


class InvariantViolation(AprilschedError, AssertionError):
    """An internal invariant does not hold; this is a bug in aprilsched."""
