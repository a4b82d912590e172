"""Listeners: what they see of a run, and never touch."""
