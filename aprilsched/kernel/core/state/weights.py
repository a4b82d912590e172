"""The policy versions of a run, and the update that brings a new one into the engines.

A token belongs to the version whose weights sampled it. While a request streams, a chunk counts
under its engine's current version. A chunk that arrives across a refit may contain tokens of both
versions, which cannot be distinguished until the engine reports the version of each token at the
end of the attempt (SGLang from 0.5.19 on). The report replaces all provisional versions of the
attempt. Without a report the rollout has ``versions_exact=False``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from aprilsched.errors import InvariantViolation
from aprilsched.kernel.core.state.engine_control import EngineControl
from aprilsched.kernel.core.state.queues import Unmet


class PolicyVersionTracker:
    """The versions of the trainer and of each engine in use.

    An engine in use has the trainer's version or, with rolling refits, an older one.
    """

    def __init__(self, changed: dict[str, None]) -> None:
        self.trainer = 0
        self.engines: dict[str, int] = {}
        self.loads: dict[str, int] = {}
        """Sequence number of each engine's latest load: a counter over all engines that come into
        use or take weights."""
        self._loads = 0
        self._engines_of: Counter[int] = Counter()
        """Number of engines that have each version."""
        self._changed = changed

    def note(self, engine: str, version: int | None) -> None:
        """Record that the engine is in use with `version`, or out of use if None."""
        before = self.engines.get(engine)
        if before is not None:
            self._engines_of[before] -= 1
            if not self._engines_of[before]:
                del self._engines_of[before]
        if version is None:
            self.engines.pop(engine, None)
            self.loads.pop(engine, None)
        else:
            self._loads += 1
            self.engines[engine], self.loads[engine] = version, self._loads
            self._engines_of[version] += 1
        self._changed[engine] = None

    def publish(self, version: int) -> None:
        """Make `version` the trainer's; every engine in use must already have it.

        Raises:
            InvariantViolation: if an engine in use has another version.
        """
        stale = {name: has for name, has in self.engines.items() if has != version}
        if stale:
            raise InvariantViolation(f"version {version} published while engines have {stale}")
        self.trainer = version

    @property
    def mixed(self) -> bool:
        """Whether an engine in use has another version than the trainer's."""
        return any(version != self.trainer for version in self._engines_of)

    @property
    def present(self) -> Collection[int]:
        """Versions of the engines in use."""
        return self._engines_of.keys()


Answer = tuple[int | None, str]
"""The version that an engine reports (None if its weights are inconsistent), and the cause if its
refit failed."""


class UpdateKind(StrEnum):
    """How a version reaches the engines."""

    PAUSING = "pausing"
    """All engines are paused together and load a full model."""
    ROLLING = "rolling"
    """The version becomes the trainer's at once, and each engine loads it separately, once it has
    no rollouts of an older version left."""
    ADAPTER = "adapter"
    """The engines load an adapter while they run."""
    EXTERNAL = "external"
    """The trainer reports that the version was loaded without the scheduler. The engines are
    queried for it, and not paused."""
    FOLLOWED = "followed"
    """As EXTERNAL, but without a report by the trainer: an engine has shown the version."""


class UpdatePhase(StrEnum):
    """The progress of an update."""

    WAITING = "waiting"
    """The update waits for evaluations, and for requests that cannot wait inside the engines."""
    PREPARING = "preparing"
    """The engines become ready to load the version, and may be paused if the update needs it."""
    LOADING = "loading"
    """The engines load the version, or are queried for it."""


PHASES: dict[UpdateKind, tuple[UpdatePhase, ...]] = {
    UpdateKind.PAUSING: (UpdatePhase.WAITING, UpdatePhase.PREPARING, UpdatePhase.LOADING),
    UpdateKind.ROLLING: (UpdatePhase.WAITING,),
    UpdateKind.ADAPTER: (UpdatePhase.WAITING, UpdatePhase.PREPARING, UpdatePhase.LOADING),
    UpdateKind.EXTERNAL: (UpdatePhase.PREPARING, UpdatePhase.LOADING),
    UpdateKind.FOLLOWED: (UpdatePhase.PREPARING, UpdatePhase.LOADING),
}
"""The phases of each kind of update, in order; :meth:`Update.enter` refuses any other. The trainer
can withdraw an update until it is loading."""


@dataclass(slots=True, kw_only=True)
class Update:
    """One update of the policy version, from the trainer's request to the last engine's answer."""

    version: int
    kind: UpdateKind
    phase: UpdatePhase = field(init=False)
    labelled: bool = True
    """Whether engines reported the version of external weights from their first token on."""
    republishable: bool = False
    """Whether the version can be published again later, to an engine that rejoins."""
    acknowledges: tuple[int, ...] = ()
    """Indexes of the batches that the trainer has learned from to make this version."""
    refitting: frozenset[str] = frozenset()
    """Engines that have to load the version; empty until the loading starts."""
    loading_since: float = 0.0
    """Start of the loading."""
    met: set[int] = field(default_factory=set[int])
    """For external weights: ids of the requests in flight at the start whose versions are uncertain
    only because of this update, until their engine has reported its version."""
    answers: dict[str, Answer] = field(default_factory=dict[str, Answer])
    """Answers by engine, including engines lost before they could answer."""
    not_ready: Unmet[EngineControl] = field(default_factory=Unmet[EngineControl], repr=False)
    """Engines that the start of the loading waits for."""

    def __post_init__(self) -> None:
        self.phase = PHASES[self.kind][0]

    def enter(self, phase: UpdatePhase) -> None:
        """Move the update to its next phase.

        Raises:
            InvariantViolation: if `phase` is not the next one in :data:`PHASES`.
        """
        if (self.phase, phase) not in pairwise(PHASES[self.kind]):
            raise InvariantViolation(
                f"the {self.kind} update to version {self.version} cannot go from {self.phase} to "
                f"{phase}"
            )
        self.phase = phase

    @property
    def pauses(self) -> bool:
        """Whether the engines are paused while the version is loaded."""
        return self.kind is UpdateKind.PAUSING

    @property
    def external(self) -> bool:
        """Whether the version was loaded without the scheduler."""
        return self.kind in (UpdateKind.EXTERNAL, UpdateKind.FOLLOWED)

    @property
    def answered(self) -> bool:
        """Whether every engine that has to load the version has answered or is lost."""
        # The counts are compared first, because this runs after every event.
        asked, answers = self.refitting, self.answers
        return bool(asked) and len(asked) <= len(answers) and asked <= answers.keys()

    def took(self) -> frozenset[str]:
        """Return the engines that have the version."""
        return frozenset(
            engine
            for engine, (version, cause) in self.answers.items()
            if version == self.version and not cause
        )

    def failed(self) -> tuple[tuple[str, str], ...]:
        """Return the engines that do not have the version, each with the cause."""
        took = self.took()
        return tuple(
            (engine, cause or f"reports version {version} after the refit to {self.version}")
            for engine, (version, cause) in self.answers.items()
            if engine not in took
        )


@dataclass(slots=True)
class Weights:
    """The policy versions of the run. Steps: ``refit``."""

    versions: PolicyVersionTracker
    """Versions of the trainer and of each engine."""
    update: Update | None = None
    """The current update; None without one."""
    in_parts: bool = False
    """Whether an update that loads weights in parts has started, or one has failed and left no
    engine in use, and none has succeeded since. If this process ends then, no engine's label can be
    trusted."""
    republishable: bool = False
    """Whether the fleet's version can be published again, to an engine that rejoins."""
    base: int = 0
    """Latest version that is a full model, not an adapter."""
    adapter: int | None = None
    """Version of the adapter that new requests sample with; None for the model itself."""
    adapters: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    """Versions of the adapters loaded on each engine."""

    @property
    def adapters_base(self) -> int | None:
        """Version of the full model that the fleet's adapters belong to; None without adapters."""
        return None if self.adapter is None else self.base

    @property
    def leaves_adapters(self) -> bool:
        """Whether the current update replaces adapters by a full model.

        Requests under an adapter are aborted before it, because their tokens would have no version
        on another model.
        """
        return self.adapter is not None and self.update is not None and self.update.pauses
