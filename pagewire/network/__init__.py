"""Networks as their files describe them, before any weight is read, so that a model can be refused before anything is
started that computes."""
