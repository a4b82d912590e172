"""Finds the address of this machine that engines can reach, from the engines' names."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

__all__ = ["address_towards"]

LOOPBACK = "127.0.0.1"
_ANY_PORT = 9


def address_towards(engines: Iterable[str]) -> str:
    """The address of this machine's interface towards the engines of these names (host:port).

    It is loopback if all engines are on loopback or have names of another form. Nothing is sent:
    the operating system is asked for its route to the first engine that is elsewhere.
    """
    for name in engines:
        host, separator, port = name.split("/")[0].rpartition(":")
        host = host.strip("[]")
        if not (separator and port.isdigit()) or _is_loopback(host):
            continue
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(
                host, _ANY_PORT, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0])
        except OSError:
            continue  # The call to the engine will give a better error.
    return LOOPBACK


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
