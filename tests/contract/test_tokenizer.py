"""Incremental decoding produces the text of the whole output, and stop texts end it at the right position."""

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import decoders, models

from scheduler_service.serving.checkpoint.tokenizer import IncrementalDecoder, TextDecoder, Tokenizer
from testing.seeds import seeded

PIECES = ["once ", "upon", " a", " time", "é", "ü", "😀", "👨‍👩‍👧", "日本語", "\n", "  ", "\u200d", "a", "ﬁ", "\ufffd"]


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer(checkpoint / "tokenizer.json")


@pytest.fixture(scope="module")
def metaspace_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer like Llama 2's: a space is part of a token, and rare characters are encoded as bytes."""
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁once", "▁upon", "a", "b", "▁a", "."]
    tokenizer = HuggingFaceTokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    path = tmp_path_factory.mktemp("metaspace") / "tokenizer.json"
    tokenizer.save(str(path))
    return Tokenizer(path)


def pushed(decoder: IncrementalDecoder, token_ids: list[int], rng: random.Random) -> str:
    text, start = "", 0
    while start < len(token_ids):
        end = start + rng.choice([1, 1, 1, 2, 5])
        text += decoder.push(token_ids[start:end])
        start = end
    return text + decoder.flush()


@pytest.mark.parametrize("seed", range(5))
async def test_random_texts(tokenizer: Tokenizer, seed: int) -> None:
    rng = seeded(seed)
    for _ in range(100):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 40)))
        token_ids = await tokenizer.encode(text, 1000, list)
        decoder = IncrementalDecoder(tokenizer, [], skip_special_tokens=True)
        assert pushed(decoder, token_ids, rng) == text


@pytest.mark.parametrize("seed", range(5))
def test_random_tokens_broken_characters_included(tokenizer: Tokenizer, seed: int) -> None:
    rng = seeded(seed)
    for _ in range(100):
        token_ids = [rng.randrange(300) for _ in range(rng.randrange(1, 200))]
        decoder = IncrementalDecoder(tokenizer, [], skip_special_tokens=True)
        assert pushed(decoder, token_ids, rng) == tokenizer.decode(token_ids, skip_special_tokens=True)


async def test_half_a_character_never_comes_out(tokenizer: Tokenizer) -> None:
    token_ids = await tokenizer.encode("a😀b日", 1000, list)
    decoder = IncrementalDecoder(tokenizer, [], skip_special_tokens=True)
    parts = [decoder.push([token_id]) for token_id in token_ids]
    assert [part for part in parts if part] == ["a", "😀", "b", "日"]


def lossy(run: list[int]) -> str:
    """Decode bytes to text, with one replacement character for each byte that belongs to no character."""
    return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in bytes(run).decode(errors="surrogateescape"))


@pytest.mark.parametrize("seed", range(5))
def test_random_bytes_among_words(metaspace_tokenizer: Tokenizer, seed: int) -> None:
    """An invalid byte never changes a neighboring character, whether tokens are decoded incrementally or at once.

    Special tokens are left out of the text.
    """
    rng = seeded(seed)
    words = dict(enumerate([" ", " once", " upon", "a", "b", " a", "."], 258))
    for _ in range(200):
        token_ids, text, run = [261], "a", list[int]()
        for _ in range(rng.randrange(1, 30)):
            piece = rng.choice(["bytes", "bytes", "word", "special"])
            if piece == "bytes":
                char = rng.choice("é日😀�a").encode()
                some = list(char if rng.random() < 0.6 else char[: rng.randrange(1, 4)])
                token_ids += [2 + byte for byte in some]
                run += some
            elif piece == "word":
                token_ids.append(rng.choice(list(words)))
                text, run = text + lossy(run) + words[token_ids[-1]], []
            else:
                token_ids.append(1)
        text += lossy(run)
        assert metaspace_tokenizer.decode(token_ids, skip_special_tokens=True) == text
        decoder = IncrementalDecoder(metaspace_tokenizer, [], skip_special_tokens=True)
        assert pushed(decoder, token_ids, rng) == text


def test_a_stray_byte_after_a_character_is_one_replacement_character(metaspace_tokenizer: Tokenizer) -> None:
    decoder = IncrementalDecoder(metaspace_tokenizer, [261], skip_special_tokens=True)
    parts = [decoder.push([2 + byte]) for byte in b"\xe6\x97\xa5\xff"]
    assert [*parts, decoder.push([261])] == ["", "", "日", "", "�a"]
    special = metaspace_tokenizer.decode([2 + 0xE6, 1, 2 + 0xFF, 261], skip_special_tokens=False)
    assert special == "�</s>�a"


def test_a_word_after_the_prompt_keeps_its_space(metaspace_tokenizer: Tokenizer) -> None:
    once, upon, smile = 259, 260, [2 + byte for byte in "😀".encode()]
    decoder = IncrementalDecoder(metaspace_tokenizer, [once], skip_special_tokens=True)
    assert decoder.push([upon]) == " upon"
    assert [decoder.push([byte]) for byte in smile] == ["", "", "", "😀"]
    assert [decoder.push([byte]) for byte in smile] == ["", "", "", "😀"]
    assert decoder.push([upon]) == " upon"
    first = IncrementalDecoder(metaspace_tokenizer, [], skip_special_tokens=True)
    assert first.push([once]) + first.push([upon]) == "once upon"


def text_decoder(tokenizer: Tokenizer, stop: list[str], *, min_tokens: int = 0, include: bool = False) -> TextDecoder:
    return tokenizer.text_decoder(
        [], stop=stop, min_tokens=min_tokens, include_stop_text=include, skip_special_tokens=True
    )


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["time", "e t", "a tim", "😀", "m😀e", "never", "o"])
async def test_stop_texts_across_token_borders(tokenizer: Tokenizer, stop: str, include: bool, chunk: int) -> None:
    text = "once upon a time m😀e there was a hat"
    token_ids = await tokenizer.encode(text, 1000, list)
    decoder = text_decoder(tokenizer, ["zzz", stop], include=include)
    out, num_tokens, stop_text = "", 0, None
    for start in range(0, len(token_ids), chunk):
        decoded = decoder.push(token_ids[start : start + chunk])
        out += decoded.text
        num_tokens += decoded.num_tokens
        if decoded.stop_text is not None:
            stop_text = decoded.stop_text
            break
    else:
        out += decoder.flush().text
    if stop == "never":
        assert (out, stop_text) == (text, None)
        return
    assert stop_text == stop
    assert out == text[: text.index(stop) + (len(stop) if include else 0)]
    assert stop in tokenizer.decode(token_ids[:num_tokens], skip_special_tokens=True)
    assert stop not in tokenizer.decode(token_ids[: num_tokens - 1], skip_special_tokens=True)


@pytest.mark.parametrize("seed", range(3))
def test_stop_texts_among_broken_characters(tokenizer: Tokenizer, metaspace_tokenizer: Tokenizer, seed: int) -> None:
    """The output is the whole decoded text, including replacement characters, up to the first stop text in it."""
    rng = seeded(seed)
    for _ in range(300):
        chosen = rng.choice([tokenizer, metaspace_tokenizer])
        num_tokens = rng.randrange(1, 12)
        token_ids = [261, *(rng.choice([2 + 0xF0, 2 + 0x9F, 162, 163, 258, 259, 261]) for _ in range(num_tokens))]
        text = chosen.decode(token_ids, skip_special_tokens=True)
        start = rng.randrange(len(text))
        stop = [text[start : start + rng.randrange(1, 4)], "zzz"]
        decoder = text_decoder(chosen, stop, include=rng.random() < 0.5)
        decoded = decoder.push(token_ids)
        out, stop_text = decoded.text, decoded.stop_text
        if stop_text is None:
            rest = decoder.flush()
            out, stop_text = out + rest.text, rest.stop_text
        assert stop_text == stop[0]
        assert out == text[: text.index(stop[0]) + (len(stop[0]) if decoder._include_stop_text else 0)]


async def test_text_that_may_become_a_stop_text_is_held_back_no_longer_than_needed(tokenizer: Tokenizer) -> None:
    decoder = text_decoder(tokenizer, ["abcd"])
    parts = [decoder.push(await tokenizer.encode(char, 1000, list)).text for char in "xababcxd"]
    assert parts == ["x", "", "", "ab", "", "", "abcx", "d"]


async def test_no_stop_text_ends_the_output_before_min_tokens(tokenizer: Tokenizer) -> None:
    chars = [(await tokenizer.encode(char, 1000, list))[0] for char in "xyxyxyxy"]
    decoder = text_decoder(tokenizer, ["xy"], min_tokens=5)
    decoded = decoder.push(chars)
    assert (decoded.text, decoded.stop_text, decoded.num_tokens) == ("xyxy", "xy", 6)


def test_a_file_that_is_no_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer"):
        Tokenizer(tmp_path / "tokenizer.json")


async def test_a_prompt_of_too_many_tokens_is_only_counted(tokenizer: Tokenizer) -> None:
    token_ids = await tokenizer.encode("once upon a time", 1000, list)
    assert isinstance(token_ids, list)
    assert await tokenizer.encode("once upon a time", len(token_ids), list) == token_ids
    for is_long in (False, True):
        assert await tokenizer.encode("once upon a time", len(token_ids) - 1, list, is_long=is_long) == len(token_ids)


async def test_no_token_stands_for_more_bytes_than_the_longest(tokenizer: Tokenizer) -> None:
    seed = 5
    rng = seeded(seed)
    assert tokenizer.max_token_bytes is not None
    for _ in range(200):
        text = "".join(rng.choices("once upon a time\U0001f600<end>\u65e5\n", k=rng.randrange(1, 60)))
        token_ids = await tokenizer.encode(text, 1000, list)
        assert isinstance(token_ids, list)
        assert len(text.encode()) <= tokenizer.max_token_bytes * len(token_ids)
