"""The embedded engine behind SGLang's own HTTP API, for tests of programs that talk to SGLang.

Names, shapes and statuses are those of SGLang 0.5.23. The server is one process without a real
model; what it does not model it refuses or ignores and never invents. Differences to SGLang:
streams are always incremental, in the engine's own intervals; a request has one prompt; token ids
beyond the vocabulary, memory calls in a wrong order and a flush of a busy cache within an update
are refused (they kill a real server).
"""

from aprilsched.testing.served import DrawnLengths
from aprilsched.testing.server import SimServer
from aprilsched.testing.threaded import ThreadedServer

__all__ = ["DrawnLengths", "SimServer", "ThreadedServer"]
