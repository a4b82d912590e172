"""What both shells share: the loop around the core, its listeners, calls of the caller's code."""
