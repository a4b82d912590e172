"""Choosing a schedule: what each candidate would do with lengths like those seen, and the pick."""

from aprilsched.planning.planner import Planner

__all__ = ["Planner"]
