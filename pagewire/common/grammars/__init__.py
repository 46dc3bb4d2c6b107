"""Grammars that constrain an output token by token, based on llguidance. Both services use this package.

A grammar consists of a kind (a name of the protos' `GrammarKind` in lower case), a text, and the tokens that end an
output. Its results depend only on these, on the tokenizer, and on the consumed tokens. Limits count steps of the
library's work, not time, so every process gets the same results.
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
