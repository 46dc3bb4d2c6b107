"""A small tokenizer, for grammars."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END_TOKEN_ID = 150


def letters_tokenizer() -> str:
    """Return a tokenizer of printable ASCII, then pairs of letters, and then an end token."""
    letters = ["Ġ", *map(chr, range(ord("!"), ord("~") + 1))]
    pairs = [(one, other) for one in "abcde" for other in "abcdefghijk"][: END_TOKEN_ID - len(letters)]
    vocab = {token: index for index, token in enumerate([*letters, *map("".join, pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    assert tokenizer.token_to_id("<end>") == END_TOKEN_ID
    return tokenizer.to_str()
