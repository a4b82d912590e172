"""Fronts of the scheduler: for blocking code, in a process of its own, and as a Ray actor."""
