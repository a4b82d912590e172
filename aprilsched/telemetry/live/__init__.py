"""A run while it goes on: a view that changes on a terminal, one line a batch elsewhere."""

from aprilsched.extras import extra

with extra("cli"):
    import rich as rich
