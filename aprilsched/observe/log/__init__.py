"""events.jsonl: everything that happens in a run and is decided, one line each."""

from aprilsched.observe.log.writing import EventLog

__all__ = ["EventLog"]
