"""A run from its settings to its folder, as the command line and experiments use it."""

from aprilsched.extras import extra

with extra("cli"):
    import rich as rich
    import tyro as tyro
