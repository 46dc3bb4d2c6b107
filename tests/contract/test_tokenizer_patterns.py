"""A tokenizer.json whose patterns take exponential time: the text is refused within a short time."""

import asyncio
from pathlib import Path

import pytest
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HuggingFaceTokenizer

from scheduler_service.serving.checkpoint.tokenizer import Tokenizer


@pytest.mark.parametrize("place", ["pre_tokenizer", "normalizer"])
def test_a_pattern_without_end_is_an_error_of_its_text(tmp_path: Path, place: str) -> None:
    """A pattern that takes exponential time is reported as an error of the text.

    The tokenizers library panics for such a pattern, and the panic is not an Exception in Python.
    """
    made = HuggingFaceTokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    if place == "pre_tokenizer":
        made.pre_tokenizer = pre_tokenizers.Split(Regex("(a|aa)+$"), "isolated")
    else:
        made.normalizer = normalizers.Replace(Regex("(a|aa)+$"), "")
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"tokenizer.json cannot tokenize this text: .*retry-limit-in-match over"):
        asyncio.run(tokenizer.encode("a" * 60 + "!", 100, list))
    tokenizer.close()
