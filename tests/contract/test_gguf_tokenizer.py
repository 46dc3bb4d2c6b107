"""Tokenizers of GGUF files, compared with the tokenizer.json from which each file was made."""

import io
import itertools
import json
import random
import re
import unicodedata
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.tokenization_utils_base import generate_merges

from pagewire.common.chat.chat_template import render
from pagewire.common.gguf import GgufError, GgufFile, tokenizer_json
from scheduler_service.api.vllm.tokenizer_archive import read_tokenizer_archive
from scheduler_service.serving.checkpoint.model_info import ModelInfo, read_model_info
from scheduler_service.serving.checkpoint.tokenizer import load_tokenizer
from testing.checkpoints.families import make_checkpoint
from testing.checkpoints.gguf_files import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    byte_level_keys,
    write_gguf,
)
from testing.seeds import seeded

BUNDLED = Path(__file__).parents[2] / "models" / "storyteller"
DOCS = Path(__file__).parents[2] / "docs"
VOCAB_SIZE = 1024  # of the bundled model, whose weights every file here contains
# The patterns of the published tokenizer.json files.
_WORDS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_NAMES = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_OF_CASED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _REST
QWEN2 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _REST
TEKKEN = _WORDS + "|" + _NAMES + r"|\p{N}|" + _REST_OF_CASED
GPT4O = _WORDS + _ENDINGS + "?|" + _NAMES + _ENDINGS + r"?|\p{N}{1,3}|" + _REST_OF_CASED
ALPHABET = [
    *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", *"0123456789" * 2,
    *" .,;:!?'\"()[]{}<>|/\\-_=+*&^%$#@~`" * 2,
    *" \t\n\r" * 8, "'s", "'LL", "n't", "  ", "\n\n", "é", "e\u0301", "ß", "Ж", "щ", "中", "文", "かな", "한글",
    "😀", "👩‍🚀", "\u00a0",
    "\u3000", "½", "²", "٣", "Ⅷ", "<|im_start|>", "<|end|>", "<think>", "the", "The", " and", " once", "Hello", "WORLD",
]  # fmt: skip


def texts(seed: int, number: int = 200) -> list[str]:
    rng = seeded(seed)
    return ["", " ", *("".join(rng.choices(ALPHABET, k=rng.randrange(1, 60))) for _ in range(number))]


def corpus() -> list[str]:
    return [line for path in sorted(DOCS.glob("*.md"))[:6] for line in path.read_text().splitlines()]


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


PUBLISHED: dict[str, tuple[pre_tokenizers.PreTokenizer, dict[str, Any]]] = {
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), {}),
    "llama-bpe": (split(LLAMA3), {"ignores_merges": True, "adds_bos": True}),
    "smaug-bpe": (split(LLAMA3), {}),
    "qwen2": (split(QWEN2), {"is_composed": True}),
    "deepseek-r1-qwen": (split(QWEN2), {}),
    "tekken": (split(TEKKEN), {"ignores_merges": True, "adds_bos": True}),
    "gpt-4o": (split(GPT4O), {}),
    "smollm": (
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        {},
    ),
}


def trained(pre: str) -> Tokenizer:
    """Return a byte-level tokenizer with the settings of a published one, trained on a small corpus."""
    pre_tokenizer, traits = PUBLISHED[pre]
    tokenizer = Tokenizer(models.BPE(ignore_merges=traits.get("ignores_merges", False)))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.normalizer = normalizers.NFC() if traits.get("is_composed") else None
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    special = [AddedToken(text, special=True, normalized=False) for text in ("<|begin|>", "<|end|>", "<|im_start|>")]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    if traits.get("adds_bos"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A",
            pair="<|begin|> $A <|begin|> $B",
            special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))],
        )
    return tokenizer


def assert_same(ours: Tokenizer, theirs: Tokenizer, seed: int) -> None:
    for text in texts(seed):
        for add_special_tokens in (True, False):
            expected = theirs.encode(text, add_special_tokens=add_special_tokens).ids
            assert ours.encode(text, add_special_tokens=add_special_tokens).ids == expected, repr(text)
        for skip in (True, False):
            assert ours.decode(expected, skip_special_tokens=skip) == theirs.decode(expected, skip_special_tokens=skip)


def with_tokenizer(path: Path, keys: Mapping[str, Any], **settings: Any) -> Path:
    """Write a GGUF file of the bundled model with another tokenizer. `settings` are additional tokenizer keys."""
    named = {f"tokenizer.ggml.{key}": value for key, value in settings.items()}
    return write_gguf(path, BUNDLED, "Q4_0", tokenizer=keys, settings={"tokenizer.ggml.eos_token_id": None, **named})


@pytest.mark.parametrize("pre", PUBLISHED)
def test_byte_level_tokenizers_are_the_published_ones(pre: str, tmp_path: Path) -> None:
    theirs = trained(pre)
    keys = byte_level_keys(json.loads(theirs.to_str()), VOCAB_SIZE, pre)
    assert UNUSED in keys["token_type"]  # the embedding has more rows than the tokenizer has tokens
    path = with_tokenizer(tmp_path / "model.gguf", keys, bos_token_id=theirs.token_to_id("<|begin|>"))
    ours = load_tokenizer(path)
    assert_same(ours, theirs, seed=len(pre))
    assert ours.get_vocab() == theirs.get_vocab()


def test_the_bundled_tokenizer_is_the_bundled_one(tmp_path: Path) -> None:
    ours = load_tokenizer(write_gguf(tmp_path / "model.gguf", BUNDLED, "Q4_0"))
    assert_same(ours, Tokenizer.from_file(str(BUNDLED / "tokenizer.json")), seed=11)


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken"])
def test_byte_level_tokenizers_are_those_of_transformers(pre: str, tmp_path: Path) -> None:
    """Only the ids of plain text are compared, because transformers adds special tokens by rules of its own classes."""
    keys = byte_level_keys(json.loads(trained(pre).to_str()), VOCAB_SIZE, pre)
    path = with_tokenizer(tmp_path / "model.gguf", keys)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    ours = load_tokenizer(path)
    for text in texts(5, 100):
        # Transformers also does not apply the NFC normalization of Qwen's own tokenizer, which a GGUF file cannot
        # specify.
        if pre != "qwen2" or unicodedata.is_normalized("NFC", text):
            assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False)


def sentencepiece_keys() -> dict[str, Any]:
    """Return a SentencePiece vocabulary as llama.cpp's converter writes it: bytes, then pieces ordered by score."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(
        [line for line in corpus() if line.isascii()], trainers.BpeTrainer(vocab_size=700, show_progress=False)
    )
    learnt = json.loads(tokenizer.to_str())["model"]
    merged = ["".join(merge) for merge in learnt["merges"]]
    letters = [token for token in learnt["vocab"] if token not in set(merged)]
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = [*special, *merged, *letters, "<think>"]
    padding = [f"[PAD{token_id}]" for token_id in range(len(tokens), VOCAB_SIZE)]
    num_pieces = len(merged) + len(letters)
    return {
        "model": "llama",
        "pre": "default",
        "tokens": [*tokens, *padding],
        "scores": [*([0.0] * 259), *(-float(rank) for rank in range(num_pieces)), 0.0, *([-1000.0] * len(padding))],
        "token_type": [
            UNKNOWN, CONTROL, CONTROL, *([BYTE] * 256), *([NORMAL] * num_pieces), USER_DEFINED,
            *([UNUSED] * len(padding)),
        ],
    }  # fmt: skip


def published_sentencepiece(keys: Mapping[str, Any], *, has_prefix: bool = True) -> Tokenizer:
    """Return the tokenizer.json that transformers creates from such a vocabulary for Llama 2."""
    vocab = {token: token_id for token_id, token in enumerate(keys["tokens"]) if not token.startswith("[PAD")}
    scores = {token: keys["scores"][token_id] for token, token_id in vocab.items() if token_id >= 259}
    merges = generate_merges(vocab, scores)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if has_prefix else []), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if has_prefix else []),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentencepiece_tokenizers_are_the_published_ones(tmp_path: Path, has_prefix: bool) -> None:
    keys = sentencepiece_keys()
    settings = {} if has_prefix else {"add_space_prefix": False}
    path = with_tokenizer(tmp_path / "model.gguf", keys, **settings)
    assert_same(load_tokenizer(path), published_sentencepiece(keys, has_prefix=has_prefix), seed=23)


def test_special_tokens_of_phi3_take_the_white_space_behind_them(tmp_path: Path) -> None:
    """A special token of Phi-3 includes the white space after it, as in the published tokenizer.json.

    In a GGUF file, only the architecture implies it.
    """
    keys = sentencepiece_keys()
    keys["tokens"][-1], keys["token_type"][-1] = "<|end|>", CONTROL
    path = make_checkpoint(tmp_path / "model", "phi3", seed=3, vocab_size=VOCAB_SIZE)
    ours = load_tokenizer(write_gguf(tmp_path / "model.gguf", path, "F16", tokenizer=keys))
    theirs = published_sentencepiece(keys)
    theirs.add_special_tokens([AddedToken(text, rstrip=True, normalized=False) for text in ("</s>", "<|end|>")])
    for text in ("<|end|>\n the<|end|> and</s> \n", "<s> the <|end|>  <|end|>"):
        assert ours.encode(text).ids == theirs.encode(text).ids
    assert ours.encode("the<|end|>\n").ids == ours.encode("the<|end|>").ids != ours.encode("the").ids


def test_runs_of_spaces_and_lines_of_gemma_are_tokens(tmp_path: Path) -> None:
    """Runs of spaces and newlines are tokens of Gemma.

    Its files store them as plain text, without merges that produce them.
    """
    keys = sentencepiece_keys()
    added = ["\n", "\n\n", "  ", "   ", "    "]
    first = VOCAB_SIZE - len(added)
    keys["tokens"][first:], keys["token_type"][first:] = added, [USER_DEFINED] * len(added)
    ours = load_tokenizer(with_tokenizer(tmp_path / "model.gguf", keys, add_space_prefix=False))
    plain = published_sentencepiece(sentencepiece_keys(), has_prefix=False)
    ids = {text: first + at for at, text in enumerate(added)}

    def expected(text: str) -> list[int]:
        cut = re.split(r"(\n\n|\n| {2,4})", text)
        return [
            i
            for part in cut
            for i in ([ids[part]] if part in ids else plain.encode(part, add_special_tokens=False).ids)
        ]

    for text in ("the  fox\n\nand", "\n   the\n", "a     b", " the", "one\n\n\ntwo"):
        assert ours.encode(text, add_special_tokens=False).ids == expected(text), repr(text)
        assert ours.decode(expected(text)) == text


def merge_by_score(text: str, scores: Mapping[str, float]) -> list[str]:
    """Return the pieces of a text by SentencePiece's algorithm: the neighbors with the highest score merge first."""
    parts = list(text)
    while True:
        pairs = [(scores.get(left + right), -at) for at, (left, right) in enumerate(itertools.pairwise(parts))]
        found = [(score, at) for score, at in pairs if score is not None]
        if not found:
            return parts
        at = -max(found)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_merges_that_follow_from_scores_are_sentencepieces(tmp_path: Path) -> None:
    keys = sentencepiece_keys()
    scores = {token: keys["scores"][token_id] for token_id, token in enumerate(keys["tokens"]) if 259 <= token_id < 940}
    ours = load_tokenizer(with_tokenizer(tmp_path / "model.gguf", keys))
    letters = [token for token in scores if len(token) == 1 and token != "▁"]
    rng = random.Random(31)
    words = [token.replace("▁", "") for token in scores]
    for _ in range(300):
        text = " ".join(rng.choice(words) + rng.choice(letters) for _ in range(8))
        expected = merge_by_score("▁" + text.replace(" ", "▁"), scores)
        assert ours.encode(text, add_special_tokens=False).tokens == expected


def test_scores_that_are_all_alike_leave_the_order_of_ids(tmp_path: Path) -> None:
    """If all scores are equal, merges follow the order of the token ids.

    A converter without scores writes such files.
    """
    keys = sentencepiece_keys()
    alike = load_tokenizer(with_tokenizer(tmp_path / "a.gguf", {**keys, "scores": [-1000.0] * VOCAB_SIZE}))
    assert_same(alike, load_tokenizer(with_tokenizer(tmp_path / "b.gguf", keys)), seed=41)


def test_what_stands_around_a_prompt(tmp_path: Path) -> None:
    keys = sentencepiece_keys()

    def around(**settings: Any) -> list[int]:
        ids = load_tokenizer(with_tokenizer(tmp_path / "model.gguf", keys, **settings)).encode("<think>").ids
        return [token_id for token_id in ids if keys["tokens"][token_id] in ("<s>", "</s>")]

    assert around() == [1]
    assert around(add_bos_token=False) == []
    assert around(add_eos_token=True) == [1, 2]
    assert around(add_bos_token=False, add_eos_token=True) == [2]


def test_the_models_info_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    ours = read_model_info(str(write_gguf(tmp_path / "Story-Q4_0.gguf", BUNDLED, "Q4_0")))
    theirs = read_model_info(str(BUNDLED))
    assert (ours.name, ours.directory) == ("Story-Q4_0", tmp_path / "Story-Q4_0.gguf")
    same = (
        "model_type",
        "architectures",
        "vocab_size",
        "max_model_len",
        "eos_token_ids",
        "special_tokens",
        "chat_template",
    )
    for field in same:
        assert getattr(ours, field) == getattr(theirs, field), field
    assert ours.tokenizer_path is not None
    assert ours.warnings() == []


def test_ends_of_turns_and_defaults_of_sampling(tmp_path: Path) -> None:
    tokenizer = trained("qwen2")
    tokenizer.add_special_tokens(["<|im_end|>", "<|endoftext|>", "<|eot|>"])
    keys = byte_level_keys(json.loads(tokenizer.to_str()), VOCAB_SIZE, "qwen2")
    path = write_gguf(
        tmp_path / "model.gguf",
        BUNDLED,
        "Q4_0",
        tokenizer=keys,
        settings={
            "tokenizer.ggml.eos_token_id": tokenizer.token_to_id("<|im_end|>"),
            "tokenizer.ggml.eot_token_id": tokenizer.token_to_id("<|eot|>"),
            "tokenizer.ggml.padding_token_id": tokenizer.token_to_id("<|endoftext|>"),
            "general.sampling.temp": 0.6,
            "general.sampling.top_k": 20,
            "general.sampling.top_p": 0.95,
            "general.sampling.mirostat": 2,
            "general.sampling.xtc_probability": 0.0,
            "tokenizer.ggml.suppress_tokens": [5, 0, -1, 1 << 20],
        },
    )
    info: ModelInfo = read_model_info(str(path))
    # Some models end a turn with "<|end|>" too.
    ends = [tokenizer.token_to_id(text) for text in ("<|end|>", "<|im_end|>", "<|endoftext|>", "<|eot|>")]
    assert info.eos_token_ids == tuple(sorted(ends))
    assert info.pad_token_id == tokenizer.token_to_id("<|endoftext|>")
    assert info.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    defaults = info.sampling_defaults
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.6, 20, 0.95)
    assert defaults.logit_bias_token_ids == (0, 5)
    (warning,) = info.warnings()
    assert warning.endswith("general.sampling.mirostat (2)")


_GPT_OSS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|endoftext|>")
_FILL_IN = ("<|fim_prefix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
# The special tokens of a vocabulary, the keys that refer to some of them, and the tokens that end an answer by the
# rules of llama.cpp's llama-vocab.cpp.
ENDS = {
    "gpt-oss": (_GPT_OSS, {"eos": "<|return|>"}, {"<|return|>", "<|call|>", "<|endoftext|>"}),
    "gpt-oss, of early files": (_GPT_OSS, {"eos": "<|endoftext|>"}, {"<|return|>", "<|call|>", "<|endoftext|>"}),
    "an end that is between parts, named": (_GPT_OSS, {"eos": "<|end|>"}, {"<|return|>", "<|call|>", "<|endoftext|>"}),
    "solar": (("<|end|>", "<|flush|>", "<|calls|>"), {"eos": "<|calls|>"}, {"<|flush|>", "<|calls|>"}),
    "half of harmony": (("<|end|>", "<|return|>", "<|flush|>"), {}, {"<|end|>", "<|return|>", "<|flush|>"}),
    "phi-3": (("<|user|>", "<|end|>", "<|endoftext|>"), {"eos": "<|endoftext|>"}, {"<|end|>", "<|endoftext|>"}),
    "qwen2": (("<|im_start|>", "<|im_end|>", "<|endoftext|>"), {"eos": "<|im_end|>"}, {"<|im_end|>", "<|endoftext|>"}),
    "qwen2.5-coder": (("<|im_end|>", *_FILL_IN), {"eos": "<|im_end|>"}, {"<|im_end|>", *_FILL_IN[1:]}),
    "filling in, named": (
        ("<end>", "<pad>", *_FILL_IN),
        {"eos": "<end>", "fim_pad": "<pad>"},
        {"<end>", "<pad>", *_FILL_IN[2:]},
    ),
    "names alone": (("<1>", "<2>", "<3>"), {"eos": "<1>", "eot": "<2>", "eom": "<3>"}, {"<1>", "<2>", "<3>"}),
    "llama-3": (("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"), {}, {"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"}),
    "gemma": (("<eos>", "<start_of_turn>", "<end_of_turn>"), {"eos": "<eos>"}, {"<eos>", "<end_of_turn>"}),
    "gemma-4": (("</s>", "<turn|>", "<|tool_response>"), {"eos": "<turn|>"}, {"<turn|>", "<|tool_response>"}),
    "kimi": (("[EOS]", "[EOT]", "[BOS]"), {"eos": "[EOS]"}, {"[EOS]", "[EOT]"}),
    "an end of SentencePiece": (("<s>", "</s>"), {}, {"</s>"}),
    "none": (("<s>", "<|user|>"), {}, set()),
}


@pytest.mark.one_of_each
@pytest.mark.parametrize("type", [NORMAL, CONTROL, USER_DEFINED, None], ids=["normal", "control", "user", "untyped"])
@pytest.mark.parametrize("case", ENDS)
def test_ends_of_answers_are_those_of_llama_cpp(case: str, type: int | None, tmp_path: Path) -> None:
    special, named, expected = ENDS[case]
    letters = ["xy", *(chr(code) for code in range(ord("!"), ord("~") + 1))]
    tokens = [*special, *letters, *(f"[PAD{i}]" for i in range(len(special) + len(letters), VOCAB_SIZE))]
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    types = [UNUSED if token.startswith("[PAD") else NORMAL if token in letters else type for token in tokens]
    path = with_tokenizer(
        tmp_path / "model.gguf",
        {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": ["x y"]}
        | ({} if type is None else {"token_type": types}),
        **{f"{key}_token_id": ids[text] for key, text in named.items()},
    )
    assert read_model_info(str(path)).eos_token_ids == tuple(sorted(ids[text] for text in expected))
    # End tokens that are recognized by their text are found in prompts, and left out of outputs.
    tokenizer = load_tokenizer(path)
    for text in expected - set(named.values()):
        found = tokenizer.encode(f"a{text}b", add_special_tokens=False).tokens
        assert found == ["a", text, "b"]
        assert tokenizer.decode([ids["a"], ids[text], ids["b"]], skip_special_tokens=True) == "ab"


def test_a_template_for_tools_is_chosen_where_there_are_tools(tmp_path: Path) -> None:
    named = {"default": "plain", "tool_use": "{{ tools[0] }}", "rag": "{{ documents[0] }}"}
    settings = {f"tokenizer.chat_template.{name}".removesuffix(".default"): text for name, text in named.items()}
    path = write_gguf(tmp_path / "model.gguf", BUNDLED, "Q4_0", settings=settings)
    found = read_model_info(str(path)).template_file
    assert found is not None
    assert found.named == named
    template = found.text
    messages = [{"role": "user", "content": "Hello"}]
    with zipfile.ZipFile(io.BytesIO(read_tokenizer_archive(read_model_info(str(path))))) as archive:
        archive.extractall(tmp_path / "unpacked")
    given = transformers.AutoTokenizer.from_pretrained(tmp_path / "unpacked")
    for tools, expected in ((None, "plain"), ([{"a": 1}], "{'a': 1}")):
        assert render(template, messages, special_tokens={}, variables={"tools": tools}) == expected
        assert given.apply_chat_template(messages, tools, tokenize=False) == expected


def test_routers_are_given_the_files_that_they_know(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", BUNDLED, "Q4_0")
    with zipfile.ZipFile(io.BytesIO(read_tokenizer_archive(read_model_info(str(path))))) as archive:
        archive.extractall(tmp_path / "unpacked")
    given = transformers.AutoTokenizer.from_pretrained(tmp_path / "unpacked")
    ours = load_tokenizer(path)
    for text in texts(3, 20):
        assert given.encode(text) == ours.encode(text).ids
    messages = [{"role": "user", "content": "Hello"}]
    assert given.apply_chat_template(messages, tokenize=False) == "Hello"
    assert read_tokenizer_archive(read_model_info(str(path))) == read_tokenizer_archive(read_model_info(str(path)))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": "t5"}, r"tokenizer\.ggml\.model is 't5', but must be gpt2 \(byte-level BPE\) or llama \(Sentence"),
        ({"model": None}, r"has no tokenizer\.ggml\.model, which must be a text"),
        ({"pre": "gpt-9"}, r"tokenizer\.ggml\.pre is 'gpt-9', but must be one of default, gpt-2, .*tekken, "),
        ({"merges": ["a b", "zz yy"]}, r"tokenizer\.ggml\.merges has 'a b', which is not two tokens that form a third"),
        ({"merges": ["he"]}, r"tokenizer\.ggml\.merges has 'he', which is not two tokens"),
        ({"merges": None}, r"has no tokenizer\.ggml\.merges, which must be an array of texts"),
        ({"tokens": ["!"] * VOCAB_SIZE}, r"tokenizer\.ggml\.tokens has '!' twice, as 0 and 1"),
        ({"token_type": [1, 1]}, r"tokenizer\.ggml\.token_type is .*, but must be an array of 1024 numbers"),
        ({"tokens": ["!", "?"], "token_type": None}, r"tokenizer\.ggml\.tokens has 2 tokens, but token_embd\.weight"),
        ({"bos_token_id": 5000}, r"tokenizer\.ggml\.bos_token_id is 5000, but must be the id of one of 1024 tokens"),
        ({"add_bos_token": True}, r"has no tokenizer\.ggml\.bos_token_id, which must be the id of a token: add_bos"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_is_not_known_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    keys = byte_level_keys(json.loads((BUNDLED / "tokenizer.json").read_text()), VOCAB_SIZE)
    path = with_tokenizer(tmp_path / "model.gguf", {**keys, **changes})
    with pytest.raises(GgufError, match=r"model\.gguf.*" + text):
        tokenizer_json(GgufFile.open(path))


@pytest.mark.parametrize("changes", [{"scores": None}, {"scores": [1.0]}, {"scores": [float("nan")] * VOCAB_SIZE}])
def test_scores_that_give_no_merges_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = with_tokenizer(tmp_path / "model.gguf", {**sentencepiece_keys(), **changes})
    with pytest.raises(GgufError, match=r"tokenizer\.ggml\.scores"):
        tokenizer_json(GgufFile.open(path))
