"""How fast a GPU is, and what the host does for it."""
