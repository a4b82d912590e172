"""The core decides everything about rollouts: events in, commands and facts out. See README.md.

:class:`~aprilsched.kernel.core.scheduler.Scheduler` takes an event and its time
(``handle(event, now)``) and returns what to do. The coordinator carries the commands out with real
engines, and the simulation with modelled ones. The core has no asyncio, no clock, no I/O and no
logging.
"""
