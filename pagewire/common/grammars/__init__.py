"""Grammars that outputs must match: what they allow next, token by token, over llguidance. Both services use it.

A grammar is a kind (the protos' names of `GrammarKind` in lower case), a text, and the tokens that end an output. What
comes of it is a function of these, the tokenizer and the tokens consumed: limits are counted in steps of the library's
work and not in time, so that every process finds the same.
"""

from pagewire.common.grammars.mask_queue import MaskJob, MaskQueue
from pagewire.common.grammars.matcher import (
    GrammarCache,
    GrammarCompiler,
    GrammarDeadEndError,
    GrammarError,
    GrammarLimitError,
    Matcher,
    version,
)

__all__ = [
    "GrammarCache",
    "GrammarCompiler",
    "GrammarDeadEndError",
    "GrammarError",
    "GrammarLimitError",
    "MaskJob",
    "MaskQueue",
    "Matcher",
    "version",
]
