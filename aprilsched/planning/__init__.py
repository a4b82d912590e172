"""Chooses a schedule: predicts what each candidate would do with the observed lengths."""

from aprilsched.planning.planner import Planner

__all__ = ["Planner"]
