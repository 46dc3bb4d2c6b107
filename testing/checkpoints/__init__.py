"""Checkpoints that are made on the spot, with random weights."""
