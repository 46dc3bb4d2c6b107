"""Model outputs, whole and in pieces, for tests of the parsers of chat outputs."""
