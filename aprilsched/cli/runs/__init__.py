"""Makes a run from settings to its run folder, for the command line and the experiments."""

from aprilsched.kernel.values.extras import extra

with extra("cli"):
    import rich as rich
    import tomli_w as tomli_w
