"""pytest fixtures that give the tests of other projects SGLang-compatible servers.

One line in a project's top ``conftest.py``, or in a test module, is enough::

    pytest_plugins = ["aprilsched.testing.fixtures"]

Checks of :mod:`aprilsched.testing.contract` that fail then say which values they compared.
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
    """What the fixture `start_sglang_server` gives."""

    def __call__(self, server: SimServer | None = None) -> ThreadedServer:
        """Start `server`, or one with the default settings."""
        ...


@pytest.fixture
def start_sglang_server() -> Iterator[StartServer]:
    """A function that starts servers, which are stopped after the test."""
    with ExitStack() as running:

        def start(server: SimServer | None = None) -> ThreadedServer:
            return running.enter_context(ThreadedServer(server))

        yield start


@pytest.fixture
def sglang_server(start_sglang_server: StartServer) -> ThreadedServer:
    """A started server with the default settings, which is stopped after the test."""
    return start_sglang_server()
