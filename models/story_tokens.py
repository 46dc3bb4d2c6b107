"""Stories as sequences of token ids, as a model reads them."""

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
    """Documents one after another, each with its end, cut at `length`. Every sequence begins with a document."""
    while True:
        token_ids: list[int] = []
        while len(token_ids) < length:
            token_ids += tokenizer.encode(write(rng) + END_OF_TEXT).ids
        yield token_ids[:length]
