"""HTTP to one server, whatever its program: address, limits, sockets, errors, event streams, calls.

- Control calls have their own pool, so that an abort never waits behind generations.
- A control call is repeated after a failure to connect and, where repeating it is harmless, after
  a dropped connection. A generation is never repeated here.
- Answers are not decompressed, redirects are not followed, cookies are not kept, and proxies from
  the environment are not used.
- A process that is out of file descriptors waits for some; its servers do not count as failed.
- Keys exist only in the headers of the two sessions: not in a repr, a log line or an error.
- The duration of a generation has no limit: the scheduler exists for stragglers, and a paused
  stream is silent for as long as the pause lasts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated

from aprilsched.kernel.values.bounds import ABOVE_0, AT_LEAST_0, AT_LEAST_1, check_settings

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpLimits:
    """Bounds for one server; times are in seconds.

    Args:
        connect_timeout: time to open one connection.
        control_timeout: time for a pause, continue, abort or probe, retries included.
        flush_timeout: time until a flush that the server refuses as "busy" must have succeeded.
        update_timeout: time to load one version of the weights.
        abort_timeout: time for the abort of a generation that was left early.
        max_connections: number of generations in flight on one server; 0 for any number. With a
            bound, each has its own connection.
        max_answer_bytes: bytes of one whole control answer, and bytes of a streamed answer beyond
            what its tokens account for (an event that does not end, empty events, comments).
        max_unfinished_bytes: bytes of incomplete events in all streams of the server.
    """

    connect_timeout: Annotated[float, ABOVE_0] = 10.0
    control_timeout: Annotated[float, ABOVE_0] = 30.0
    flush_timeout: Annotated[float, ABOVE_0] = 60.0
    update_timeout: Annotated[float, ABOVE_0] = 900.0
    abort_timeout: Annotated[float, ABOVE_0] = 2.0
    max_connections: Annotated[int, AT_LEAST_0] = 0
    max_answer_bytes: Annotated[int, AT_LEAST_1] = 64 * 2**20
    max_unfinished_bytes: Annotated[int, AT_LEAST_1] = 2**30

    def __post_init__(self) -> None:
        check_settings(self)
