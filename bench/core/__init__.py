"""What parts of the engine cost, each in one process."""
