"""The nouns of the core: what a scheduler knows. Nothing in here decides anything."""
