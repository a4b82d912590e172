"""The key of the application under which the handlers find their engine."""

from __future__ import annotations

from aiohttp import web

from aprilsched.testing.served import ServedEngine

__all__ = ["SERVED"]

SERVED: web.AppKey[ServedEngine] = web.AppKey("served", ServedEngine)
