"""Publishers, which bring new weights and adapters to the engines."""
