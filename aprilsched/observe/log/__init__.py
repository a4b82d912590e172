"""events.jsonl: all events and decisions of a run, one per line."""

from aprilsched.observe.log.writing import EventLog

__all__ = ["EventLog"]
