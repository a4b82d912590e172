"""Decisions only: events in, commands out. No asyncio, no clock, no I/O, no logging.

:class:`~aprilsched.core.scheduler.Scheduler` is told what happened and when
(``handle(event, now)``) and answers with what to do. The coordinator carries the commands out
against real engines, a simulator against modelled ones.
"""
