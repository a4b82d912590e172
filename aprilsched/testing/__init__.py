"""The embedded engine behind SGLang's own HTTP API, for tests of whatever talks to SGLang.

Names, shapes and statuses are those that SGLang 0.5.21 answers. It is one process with no model:
what is not modelled is refused or ignored, never made up. Differences: streams are always
incremental, in the engine's own intervals; one prompt in a request; token ids beyond the
vocabulary, memory calls in a wrong order and a flush of a busy cache within an update are refused
(they kill a real server).
"""

from aprilsched.testing.server import SimServer

__all__ = ["SimServer"]
