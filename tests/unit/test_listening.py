"""A server that stops leaves nothing open, whoever connects or does not read at that moment."""

from __future__ import annotations

import gc
import json
import socket
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

import pytest

from aprilsched.testing import SimServer
from aprilsched.testing.threaded import ThreadedServer


@contextmanager
def nothing_left() -> Generator[None]:
    """Fails if something that was opened in the block is left for the garbage collector."""
    with pytest.MonkeyPatch.context() as patch:
        left: list[object] = []

        def note(unraisable: sys.UnraisableHookArgs) -> None:
            left.append(unraisable.exc_value)

        patch.setattr("sys.unraisablehook", note)
        yield
        gc.collect()
    assert left == []


def connected(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect((host, int(port)))
    return client


def test_a_client_that_does_not_read_leaves_nothing_open():
    body = {"input_ids": [1, 2, 3], "stream": True, "return_logprob": True}
    body |= {"sampling_params": {"max_new_tokens": 100_000, "ignore_eos": True}}
    content = json.dumps(body).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: here\r\nContent-Length: {len(content)}\r\n\r\n"
    with (
        nothing_left(),
        ExitStack() as clients,
        ThreadedServer(SimServer(time_scale=0.0001)) as server,
    ):
        client = clients.enter_context(connected(server.url))
        client.sendall(head.encode() + content)
        # What the client takes is less than what two buffers hold, so the server is kept waiting
        # with the rest.
        assert client.recv(1024).startswith(b"HTTP/1.1 200")


def test_clients_that_connect_while_the_server_stops_leave_nothing_open():
    with nothing_left():
        for _ in range(30):
            with ExitStack() as clients, ThreadedServer() as server:
                for _ in range(20):
                    clients.enter_context(connected(server.url))
