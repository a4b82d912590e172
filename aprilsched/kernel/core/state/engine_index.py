"""An index of the engines in use by version, mode and load.

In a fleet of a thousand, a scan of every engine after every event would take longer than everything
else. So an engine is filed again only after it has changed. The fleet control, the policy versions
and the records in flight note its name in :attr:`EngineIndex.changed`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from aprilsched.kernel.core.policies.placement import EngineLoads
from aprilsched.kernel.core.state.engine_control import EngineControl, Mode


class Kind(NamedTuple):
    """The key that an engine in use is filed under."""

    version: int
    leaves: bool
    """Whether the engine gets no more requests, because it is refitted separately."""
    mode: Mode
    idle: bool
    """Whether the engine has no open request."""

    @property
    def generates(self) -> bool:
        """Whether the engine has open requests and keeps them."""
        return not (self.idle or self.leaves or self.mode is Mode.REFITTING)


class EngineIndex:
    """Index of the engines in use.

    Args:
        engines: the record of each engine.
        versions: the version of each engine.
        opened: the number of open attempts on each engine.
        changed: names of engines whose record, version or number of attempts has changed since the
            last :meth:`refresh`. Code that changes one must add its name.
    """

    def __init__(
        self,
        engines: Mapping[str, EngineControl],
        versions: Mapping[str, int],
        opened: Mapping[str, int],
        changed: dict[str, None],
    ) -> None:
        self._engines, self._versions, self._opened = engines, versions, opened
        self._changed = changed
        self._filed: dict[str, tuple[Kind, int]] = {}
        self.kinds: dict[Kind, dict[str, EngineControl]] = {}
        """Engines of each kind, by name; no kind is empty."""
        self.requests: Counter[tuple[int, bool]] = Counter()
        """Number of open attempts by the engine's version and whether the engine leaves."""
        self.disconnected: dict[str, EngineControl] = {}
        """Engines to which a connection broke."""
        self._left_out = set[str]()
        self._accepting: dict[int, EngineLoads] = {}
        self._busy: dict[int, EngineLoads] = {}

    def leave_out(self, names: set[str]) -> None:
        """Exclude these engines, and no others, from :meth:`accepting`."""
        before, self._left_out = self._left_out, names & self._filed.keys()
        for name in self._left_out - before:
            self.accepting(self._versions[name]).put(name, None)
        for name in before - self._left_out:
            if name in self._filed:
                self._note_load(name, self._filed[name][0])

    def refresh(self) -> None:
        """File every changed engine again."""
        for name in self._changed:
            control, before = self._engines.get(name), self._filed.get(name)
            if control is None:
                self._remove(name)
                continue
            opened = self._opened[name]
            kind = Kind(self._versions[name], control.catching_up, control.mode, not opened)
            if before is None or before[0] != kind or self.kinds[kind][name] is not control:
                self._remove(name)
                self._file(name, control, kind, opened)
            elif before[1] != opened:
                self._filed[name] = (kind, opened)
                self.requests[kind[:2]] += opened - before[1]
                if kind.generates:
                    self.busy(kind.version).put(name, opened)
            if control.broken_connection:
                self.disconnected[name] = control
            self._note_load(name, kind)
        self._changed.clear()

    def _file(self, name: str, control: EngineControl, kind: Kind, opened: int) -> None:
        self._filed[name] = (kind, opened)
        self.kinds.setdefault(kind, {})[name] = control
        if opened:
            self.requests[kind[:2]] += opened
        if kind.generates:
            self.busy(kind.version).put(name, opened)

    def _note_load(self, name: str, kind: Kind) -> None:
        if kind.mode is Mode.RUNNING and not kind.leaves and name not in self._left_out:
            self.accepting(kind.version).put(name, self._opened[name])

    def _remove(self, name: str) -> None:
        if name not in self._filed:
            return
        kind, opened = self._filed.pop(name)
        self.disconnected.pop(name, None)
        del self.kinds[kind][name]
        if not self.kinds[kind]:
            del self.kinds[kind]
        self.requests[kind[:2]] -= opened
        if not self.requests[kind[:2]]:
            del self.requests[kind[:2]]
        self.accepting(kind.version).put(name, None)
        self.busy(kind.version).put(name, None)

    def accepting(self, version: int) -> EngineLoads:
        """Return the running engines of a version that take requests, with their loads."""
        return self._of_version(self._accepting, version)

    def busy(self, version: int) -> EngineLoads:
        """Return the staying engines of a version with open attempts, with their loads."""
        return self._of_version(self._busy, version)

    @staticmethod
    def _of_version(by_version: dict[int, EngineLoads], version: int) -> EngineLoads:
        if version not in by_version:
            for old in [v for v, places in by_version.items() if not places]:
                del by_version[old]
            by_version[version] = EngineLoads({})
        return by_version[version]

    def in_order(self, controls: list[EngineControl]) -> list[EngineControl]:
        """Return the given engines in the order in which they came into use."""
        if len(controls) < 2:
            return controls
        names = {control.name for control in controls}
        return [control for control in self._engines.values() if control.name in names]
