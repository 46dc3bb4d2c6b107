"""A worker in plain Python, the grammars it understands, oracles and histories, for tests of the core."""
