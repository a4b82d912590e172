"""The figures of a run, computed from its facts."""
