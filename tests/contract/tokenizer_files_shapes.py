"""Random files of small tokenizers, in shapes that are published and in some that are not."""

import functools
import json
import random
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

_TEXT = ["once upon a time there was a little hello world 12 345 <think> é ß\n\n  if x:\n\tpass"] * 3
_MARKS = ("<unk>", "<s>", "</s>", "<pad>", "<mask>", "<|endoftext|>", "<bos>", "<eos>")
# Tokens that one or several files define.
_NAMES = ("<think>", "<|im_end|>", "[X]", "once", "<img>", "tool ", "Ünï", "upon a", *_MARKS)
_STANDARD = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "special")
_CLASSES = (
    *("GPT2Tokenizer", "GPT2TokenizerFast", "CodeGenTokenizer", "GPTNeoXTokenizerFast", "Qwen2Tokenizer"),
    *("Qwen3_5Tokenizer", "LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "GemmaTokenizerFast"),
    *("PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend", "BloomTokenizerFast", "UnknownTokenizer"),
)
_MODEL_TYPES = (
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "granite", "gemma2", "gpt2", "gpt_neox", "bloom", "smollm3"),
)
Files = dict[str, dict[str, Any]]


def byte_level(*, is_composed: bool = False) -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC() if is_composed else None
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _trained(tokenizer, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False))


def sentencepiece(*, is_legacy: bool = False) -> dict[str, Any]:
    special = [*_MARKS[:5], *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    trained = _trained(tokenizer, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False))
    trained["model"] |= {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    trained["added_tokens"] = trained["added_tokens"][:3]
    if is_legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        trained |= {"normalizer": json.loads(tokenizer.to_str())["normalizer"], "pre_tokenizer": None}
    return trained


def unigram() -> dict[str, Any]:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<unk>", "</s>"]
    return _trained(
        tokenizer,
        trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False),
    )


def word_piece() -> dict[str, Any]:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    special = ["[UNK]", "[CLS]"]
    return _trained(tokenizer, trainers.WordPieceTrainer(vocab_size=120, special_tokens=special, show_progress=False))


def _trained(tokenizer: Tokenizer, trainer: trainers.Trainer) -> dict[str, Any]:
    tokenizer.train_from_iterator(_TEXT, trainer)
    return json.loads(tokenizer.to_str())


@functools.cache
def _kinds() -> list[str]:
    kinds = [byte_level(), byte_level(), byte_level(is_composed=True), sentencepiece(), sentencepiece(is_legacy=True)]
    return [json.dumps(kind) for kind in (*kinds, unigram(), word_piece())]


def vocabulary(tokenizer: dict[str, Any]) -> dict[str, int]:
    vocab = tokenizer["model"]["vocab"]
    return vocab if isinstance(vocab, dict) else {text: token_id for token_id, (text, _) in enumerate(vocab)}


def drawn_files(rng: random.Random) -> Files:
    tokenizer = json.loads(rng.choice(_kinds()))
    vocab = vocabulary(tokenizer)
    free = len(vocab)
    for name in rng.sample(_NAMES, rng.randint(0, 3)):
        if name not in vocab:
            entry = {"id": free, "content": name, "normalized": rng.random() < 0.3}
            tokenizer["added_tokens"].append({**entry, **{flag: rng.random() < 0.3 for flag in _FLAGS}})
            free += 1
    own = {entry["content"] for entry in tokenizer["added_tokens"]}
    new = [name for name in _NAMES if name not in own and name not in vocab]
    config = _drawn_config(rng)
    if rng.random() < 0.5:
        listed = {str(entry["id"]): _described(entry, rng) for entry in tokenizer["added_tokens"]}
        for token_id, name in enumerate(rng.sample(new, 2), free):
            listed[str(token_id)] = {"content": name, **_flags(rng, (*_FLAGS, "normalized"))}
        config["added_tokens_decoder"] = listed
    files = {"tokenizer.json": tokenizer, "config.json": {"vocab_size": 400}, "tokenizer_config.json": config}
    if rng.random() < 0.9:
        files["config.json"]["model_type"] = rng.choice(_MODEL_TYPES)
    if rng.random() < 0.1:
        files["config.json"]["tokenizer_class"] = rng.choice(_CLASSES)
    if rng.random() < 0.5:
        files["special_tokens_map.json"] = _drawn_map(rng)
    if rng.random() < 0.5:
        files["added_tokens.json"] = {name: free + index for index, name in enumerate(rng.sample(new, 3))}
    return files


def _drawn_config(rng: random.Random) -> dict[str, Any]:
    config: dict[str, Any] = {key: _token(rng, "__type") for key in _STANDARD if rng.random() < 0.3}
    config |= {key: rng.choice(_NAMES) for key in ("image_token", "eot_token") if rng.random() < 0.2}
    if rng.random() < 0.9:
        config["tokenizer_class"] = rng.choice(_CLASSES)
    if rng.random() < 0.3:
        config["additional_special_tokens"] = [_token(rng, "__type") for _ in range(rng.randint(0, 3))]
    named = {key: rng.choice(_NAMES) for key in rng.sample(("image_token", "boi_token", "audio"), rng.randint(0, 2))}
    extra = rng.choice((None, None, named, [_token(rng, "__type"), _token(rng, "__type")]))
    if extra is not None:
        config["extra_special_tokens"] = extra
    for option in ("add_prefix_space", "legacy", "add_bos_token", "add_eos_token"):
        if rng.random() < 0.4:
            config[option] = rng.random() < 0.5
    return config


def _drawn_map(rng: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {key: _token(rng) for key in (*_STANDARD, "image_token", "boi_token") if rng.random() < 0.3}
    if rng.random() < 0.3:
        found["additional_special_tokens"] = rng.sample(_NAMES, 2)
    if rng.random() < 0.3:
        found["extra_special_tokens"] = rng.choice(({"boi_token": rng.choice(_NAMES)}, rng.sample(_NAMES, 2)))
    return found


def _token(rng: random.Random, *marks: str) -> Any:
    name = rng.choice(_NAMES)
    if rng.random() < 0.6:
        return name
    return {**dict.fromkeys(marks, "AddedToken"), "content": name, **_flags(rng, _FLAGS)}


def _flags(rng: random.Random, names: tuple[str, ...]) -> dict[str, bool]:
    return {name: rng.random() < 0.3 for name in names if rng.random() < 0.7}


def _described(entry: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return the same token, or the token with other flags.

    The tokenizers library does not restore the original form of a token that is no longer normalized.
    """
    same = {key: value for key, value in entry.items() if key != "id"}
    return same if rng.random() < 0.6 else {**same, **_flags(rng, _FLAGS)}
