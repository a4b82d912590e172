"""A run while it goes on: a view that changes on a terminal, one line a batch elsewhere."""
