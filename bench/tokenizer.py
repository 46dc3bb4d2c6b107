"""Trains tokenizers of realistic sizes for benchmarks, and keeps them in the user's cache.

A byte-level BPE tokenizer is trained on the sources of the installed Python packages, because the repository contains
no text of sufficient size. Its tokens are words, indentation and punctuation, like the tokens of published tokenizers.
Token 0 is the end of text.
"""

import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.checkpoint import cache_directory

END_OF_TEXT = "<|endoftext|>"
_CORPUS_BYTES = 60_000_000
# The pattern with which GPT-4's and Llama 3's tokenizers split a text, as published with them. For example, numbers are
# split into groups of three digits.
_PARTS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def trained_tokenizer(vocab_size: int) -> Path:
    """Return the path of a tokenizer.json with `vocab_size` tokens. The first call trains it, which takes a minute."""
    path = cache_directory() / f"tokenizer_{vocab_size}.json"
    if not path.exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_PARTS), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(_corpus(), trainer)
        if (found := tokenizer.get_vocab_size()) != vocab_size:
            raise RuntimeError(f"the sources of the installed packages yield {found} tokens; {vocab_size} are needed")
        path.parent.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(path))
    return path


def _corpus() -> Iterator[str]:
    paths = sorted(Path(sysconfig.get_path("purelib")).rglob("*.py"))
    random.Random(0).shuffle(paths)
    num_bytes = 0
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="ignore")
        num_bytes += len(text)
        yield text
        if num_bytes > _CORPUS_BYTES:
            return
