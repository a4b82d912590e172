"""The verbs of the core: each module handles events and takes one kind of decision."""
