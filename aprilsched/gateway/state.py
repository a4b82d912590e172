"""The key under which the handlers find their gateway in the application."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from aprilsched.gateway.server import Gateway

__all__ = ["GATEWAY"]

GATEWAY: web.AppKey[Gateway] = web.AppKey("gateway")
