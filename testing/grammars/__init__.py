"""Grammars of every kind, and tokenizers of every supported shape."""
