"""What the shell and the core say to each other: events in, commands out."""
