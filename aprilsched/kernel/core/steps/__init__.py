"""The verbs of the core: each module handles the events of one subject and decides about it."""
