"""A run from its settings to its folder, as the command line and experiments use it."""
