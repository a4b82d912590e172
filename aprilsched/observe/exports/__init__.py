"""Exports to other tools: Prometheus, experiment trackers, trace viewers."""
