"""The messages between the core and the shell: events in, commands and facts out."""
