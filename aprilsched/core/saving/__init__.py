"""What of a scheduler outlives its process: taken as cuts, kept by a store, restored from it."""
