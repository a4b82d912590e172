"""Publishers: how new weights reach the engines."""
