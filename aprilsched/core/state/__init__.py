"""The nouns of the core: what a scheduler knows. Nothing here decides anything."""
