"""Outputs as models spell them, whole and in pieces, for tests of their parsers."""
