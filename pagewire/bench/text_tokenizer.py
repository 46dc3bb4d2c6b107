"""Reads a model's tokenizer, to make texts of given lengths in tokens. It loads the `tokenizers` package."""

import random
from pathlib import Path

from pagewire.errors import CommandError
from pagewire.hosting.model_source import locate

MAX_ADJUSTMENTS = 10


class TextTokenizer:
    """A model's tokenizer. `chat_template` is the model's, or None."""

    def __init__(self, model: str) -> None:
        """Loads the tokenizer of a directory, a GGUF file or a hub id. Raises CommandError if there is none."""
        from scheduler_service.serving.model_info import read_model_info
        from scheduler_service.serving.tokenizer import load_tokenizer

        try:
            info = read_model_info(locate(model, with_weights=False).directory)
            if info.tokenizer_path is None:
                raise ValueError(f"{Path(info.directory) / 'tokenizer.json'} is missing")
            self._tokenizer = load_tokenizer(info.tokenizer_path)
        except ValueError as error:
            raise CommandError(f"--tokenizer: {error}") from None
        self.chat_template = info.chat_template
        self.vocab_size = self._tokenizer.get_vocab_size()

    def count(self, text: str) -> int:
        """Returns the number of tokens in a text, with the special ones that a server adds."""
        return len(self._tokenizer.encode(text))

    def text_of(self, token_ids: list[int], rng: random.Random) -> str:
        """Returns a text of about as many tokens as these, which begins with theirs: not every list of tokens is a
        text.

        Source: vLLM's random dataset, which encodes and cuts or fills up again, too.
        """
        length, ids = len(token_ids), token_ids
        text = ""
        for _ in range(MAX_ADJUSTMENTS):
            text = self._tokenizer.decode(ids)
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) == length:
                break
            ids = [*ids[:length], *(rng.randrange(self.vocab_size) for _ in range(length - len(ids)))]
        return text
