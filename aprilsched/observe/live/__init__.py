"""The live view of a run: a changing frame on a terminal, or one line for each batch."""

from aprilsched.kernel.values.extras import extra

with extra("cli"):
    import rich as rich
