"""How long and how much the adapter waits for, opens and reads; all of it can be set.

There is no limit on how long a generation takes: a long tail is what the scheduler exists
for, and a paused stream is silent for as long as the pause.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from aprilsched.errors import ConfigError

__all__ = ["SGLangLimits"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SGLangLimits:
    """Bounds for one server; times in seconds.

    Args:
        connect_timeout: to open one connection.
        control_timeout: for pause, continue, abort and the probes, retries included.
        flush_timeout: until a flush that is refused as "busy" must have succeeded.
        update_timeout: to load one version of the weights.
        abort_timeout: for the last word about a generation that was left early.
        max_connections: generations in flight on one server; 0 for any number.
        max_answer_bytes: for one whole control answer, and for what a streamed answer sends
            beyond what its tokens account for (an event that does not end, empty ones, comments).
        max_unfinished_bytes: of events that are not whole yet, in all streams of the server.
    """

    connect_timeout: float = 10.0
    control_timeout: float = 30.0
    flush_timeout: float = 60.0
    update_timeout: float = 900.0
    abort_timeout: float = 2.0
    max_connections: int = 0
    max_answer_bytes: int = 64 * 2**20
    max_unfinished_bytes: int = 2**30

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "max_connections":
                if value < 0:
                    raise ConfigError(f"max_connections is {value}; give 0 (any number) or more.")
            elif not value > 0:
                raise ConfigError(f"{field.name} is {value}; give a number above 0.")
