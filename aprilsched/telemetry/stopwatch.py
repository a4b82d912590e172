"""Time spent in states that several things can be in at once."""

from __future__ import annotations

__all__ = ["Stopwatch"]


class Stopwatch:
    """Sums up how long each key was running. Starting twice and stopping what stands is harmless:
    an engine may be lost in the middle of a pause, and confirm its continue afterwards."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._total = 0.0

    def start(self, key: str, now: float) -> None:
        self._since.setdefault(key, now)

    def stop(self, key: str, now: float) -> None:
        since = self._since.pop(key, None)
        if since is not None:
            self._total += now - since

    def stop_all(self, now: float) -> None:
        for key in list(self._since):
            self.stop(key, now)

    def total(self, now: float) -> float:
        """Seconds of all keys together, those still running included."""
        return self._total + sum(now - since for since in self._since.values())
