"""Which policy version the trainer has, which each engine has, and which sampled a token.

A token is of the version whose weights sampled it. While a request streams, a chunk is booked
under the version that its engine has at that moment. A chunk that straddles a refit cannot be
told apart then: the request is *ambiguous* until the engine reports its own spans at the end
(SGLang from 0.5.18 on), which replace everything booked before. Without such a report the
rollout says so (``versions_exact=False``).
"""

from __future__ import annotations

from aprilsched.errors import InvariantViolation

__all__ = ["PolicyVersionTracker"]


class PolicyVersionTracker:
    """The version of the trainer and of each engine."""

    def __init__(self) -> None:
        self.trainer = 0
        self.engines: dict[str, int] = {}

    def start(self, version: int) -> None:
        """The fleet came up with `version`."""
        self.trainer = version

    def join(self, engine: str, version: int) -> None:
        """An engine is in use from now on; it has the fleet's `version`."""
        if version != self.trainer:
            raise InvariantViolation(
                f"{engine} joins with version {version} while the fleet is at {self.trainer}"
            )
        self.engines[engine] = version

    def leave(self, engine: str) -> None:
        """The engine is lost or quarantined."""
        self.engines.pop(engine, None)

    def refitted(self, engine: str, version: int) -> None:
        """The engine says that it has `version` now."""
        self.engines[engine] = version

    def publish(self, version: int) -> None:
        """The trainer goes on with `version`; every engine in use has it already.

        Raises:
            InvariantViolation: if an engine in use has another version.
        """
        stale = {name: has for name, has in self.engines.items() if has != version}
        if stale:
            raise InvariantViolation(f"version {version} published while engines have {stale}")
        self.trainer = version
