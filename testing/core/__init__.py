"""A worker in plain Python, the grammars that it supports, oracles and recorded histories, for tests of the core."""
