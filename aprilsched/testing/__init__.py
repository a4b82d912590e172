"""The embedded engine behind SGLang's own HTTP API, for tests of programs that talk to SGLang.

Names, shapes and statuses match SGLang 0.5.23. The server is one process without a real model;
features that it does not model are refused or ignored, never invented. Differences from SGLang:
streams are always incremental, at the engine's intervals; a request has one prompt; token ids
beyond the vocabulary, memory calls in a wrong order and a flush of a busy cache during an update
are refused (they kill a real server).
"""

from aprilsched.testing.served import DrawnLengths
from aprilsched.testing.server import SimServer
from aprilsched.testing.threaded import ThreadedServer

__all__ = ["DrawnLengths", "SimServer", "ThreadedServer"]
