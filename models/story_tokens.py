"""Stories as sequences of token ids, in the form that a model reads."""

import random
from collections.abc import Callable, Iterator

from tokenizers import Tokenizer

from models.story_grammar import write_document

END_OF_TEXT = "<|endoftext|>"


def sequences(
    tokenizer: Tokenizer,
    rng: random.Random,
    length: int,
    write: Callable[[random.Random], str] = write_document,
) -> Iterator[list[int]]:
    """Yield sequences of `length` token ids.

    Every sequence begins with a new document. The documents of a sequence are each followed by the end-of-text token,
    and the last document is cut off at `length`.
    """
    while True:
        token_ids: list[int] = []
        while len(token_ids) < length:
            token_ids += tokenizer.encode(write(rng) + END_OF_TEXT).ids
        yield token_ids[:length]
