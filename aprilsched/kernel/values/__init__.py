"""Values that all parts share, and the checks of them."""
