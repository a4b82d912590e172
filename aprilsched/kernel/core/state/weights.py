"""The policy versions of a run, and the update that brings a new one into the engines.

A token is of the version whose weights sampled it. While a request streams, a chunk is counted
under the version that its engine has at that moment. A chunk that arrives across a refit may have
tokens of both versions, and until the engine reports the versions of its tokens at the end of the
attempt (SGLang from 0.5.19 on) nobody can tell them apart. The report then replaces everything
that was noted before. Without such a report the rollout says ``versions_exact=False``.
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
    """The version of the trainer and the version of each engine in use, which is the trainer's or,
    with rolling refits, an older one."""

    def __init__(self, changed: dict[str, None]) -> None:
        self.trainer = 0
        self.engines: dict[str, int] = {}
        self.loads: dict[str, int] = {}
        """For each engine in use, the number of times that any engine came into use or took
        weights, at the last time that this one did."""
        self._loads = 0
        self._engines_of: Counter[int] = Counter()
        """Number of engines that have each version."""
        self._changed = changed

    def note(self, engine: str, version: int | None) -> None:
        """Note that the engine is in use with `version`, or, with None, out of use."""
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
        """Make `version` the trainer's; every engine in use must have it already.

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
        """The versions of the engines in use."""
        return self._engines_of.keys()


Answer = tuple[int | None, str]
"""The version that an engine says it has (None if its weights are inconsistent), and the cause if
its refit failed."""


class UpdateKind(StrEnum):
    """How a version reaches the engines."""

    PAUSING = "pausing"
    """All engines are paused together and load a full model."""
    ROLLING = "rolling"
    """The version becomes the trainer's at once, and each engine takes it alone, when it has no
    rollouts of an older version any more."""
    ADAPTER = "adapter"
    """The engines load an adapter while they run."""
    EXTERNAL = "external"
    """The trainer reports that the version was loaded without the scheduler. The engines are asked
    for it, and not paused."""
    FOLLOWED = "followed"
    """As external, but an engine has shown the version, and the trainer has reported nothing."""


class UpdatePhase(StrEnum):
    """The progress of an update."""

    WAITING = "waiting"
    """It waits for evaluations to end, and for requests that cannot wait inside the engines."""
    PREPARING = "preparing"
    """The engines become ready to load the version. Those that are to be paused may be."""
    LOADING = "loading"
    """The engines were told to load the version, or were asked for it."""


PHASES: dict[UpdateKind, tuple[UpdatePhase, ...]] = {
    UpdateKind.PAUSING: (UpdatePhase.WAITING, UpdatePhase.PREPARING, UpdatePhase.LOADING),
    UpdateKind.ROLLING: (UpdatePhase.WAITING,),
    UpdateKind.ADAPTER: (UpdatePhase.WAITING, UpdatePhase.PREPARING, UpdatePhase.LOADING),
    UpdateKind.EXTERNAL: (UpdatePhase.PREPARING, UpdatePhase.LOADING),
    UpdateKind.FOLLOWED: (UpdatePhase.PREPARING, UpdatePhase.LOADING),
}
"""The phases of each kind of update, in their order. :meth:`Update.enter` refuses any other. The
trainer can withdraw an update until it is loading."""


@dataclass(slots=True, kw_only=True)
class Update:
    """One update of the policy version, from the trainer's request to the last engine's answer."""

    version: int
    kind: UpdateKind
    phase: UpdatePhase = field(init=False)
    labelled: bool = True
    """The engines named the version of external weights from their first token on."""
    republishable: bool = False
    """The version can be published again later, to an engine that comes back."""
    acknowledges: tuple[int, ...] = ()
    """Indexes of the batches that the trainer has learned from to make this version."""
    refitting: frozenset[str] = frozenset()
    """The engines that were told to load the version; empty until they are told."""
    loading_since: float = 0.0
    """When they were told."""
    met: set[int] = field(default_factory=set[int])
    """Ids of the requests in flight at its start whose versions are uncertain only because of it,
    until their engine has reported its version. For external weights."""
    answers: dict[str, Answer] = field(default_factory=dict[str, Answer])
    """The answer of each engine that has answered, or that was lost before it could."""
    not_ready: Unmet[EngineControl] = field(default_factory=Unmet[EngineControl], repr=False)
    """Engines that it waits for before any is told."""

    def __post_init__(self) -> None:
        self.phase = PHASES[self.kind][0]

    def enter(self, phase: UpdatePhase) -> None:
        """Take the update to its next phase.

        Raises:
            InvariantViolation: if :data:`PHASES` has another phase next.
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
        """Whether every engine that was told to load the version has answered or is lost."""
        # Counted first, because this is asked after every event.
        told, answers = self.refitting, self.answers
        return bool(told) and len(told) <= len(answers) and told <= answers.keys()

    def took(self) -> frozenset[str]:
        """Engines that have the version."""
        return frozenset(
            engine
            for engine, (version, cause) in self.answers.items()
            if version == self.version and not cause
        )

    def failed(self) -> tuple[tuple[str, str], ...]:
        """Engines that do not have the version, each with the cause."""
        took = self.took()
        return tuple(
            (engine, cause or f"says it has version {version} after the refit to {self.version}")
            for engine, (version, cause) in self.answers.items()
            if engine not in took
        )


@dataclass(slots=True)
class Weights:
    """The policy versions of the run. Steps: ``refit``."""

    versions: PolicyVersionTracker
    """The version of the trainer and of each engine."""
    update: Update | None = None
    """The update that is under way."""
    in_parts: bool = False
    """An update that loads weights in parts was begun, and none has succeeded since: if this
    process ends, no engine's label can be trusted."""
    republishable: bool = False
    """The fleet's version can be published again, to an engine that comes back."""
    base: int = 0
    """The last version that was a full model and no adapter."""
    adapter: int | None = None
    """The version of the adapter that new requests sample with; None for the model itself."""
    adapters: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    """Versions of the adapters that are loaded on each engine."""

    @property
    def adapters_base(self) -> int | None:
        """The version of the full model that the fleet's adapters belong to; None without them."""
        return None if self.adapter is None else self.base

    @property
    def leaves_adapters(self) -> bool:
        """Whether a full model comes after adapters. Requests under an adapter are called back
        before it, because their tokens would have no version on another model."""
        return self.adapter is not None and self.update is not None and self.update.pauses
