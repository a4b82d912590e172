"""pytest fixtures that provide SGLang-compatible servers to the tests of other projects.

One line in a project's top ``conftest.py``, or in a test module, is enough::

    pytest_plugins = ["aprilsched.testing.fixtures"]

Failed checks of :mod:`aprilsched.testing.contract` then show the compared values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Protocol

import pytest

from aprilsched.testing.server import SimServer
from aprilsched.testing.threaded import ThreadedServer

pytest.register_assert_rewrite("aprilsched.testing.contract", "aprilsched.testing.contract")


class StartServer(Protocol):
    """The type of the fixture `start_sglang_server`."""

    def __call__(self, server: SimServer | None = None) -> ThreadedServer:
        """Start `server`, or one with the default settings."""
        ...


@pytest.fixture
def start_sglang_server() -> Iterator[StartServer]:
    """Provide a function that starts servers; they are stopped after the test."""
    with ExitStack() as running:

        def start(server: SimServer | None = None) -> ThreadedServer:
            return running.enter_context(ThreadedServer(server))

        yield start


@pytest.fixture
def sglang_server(start_sglang_server: StartServer) -> ThreadedServer:
    """Provide a running server with the default settings; it is stopped after the test."""
    return start_sglang_server()
