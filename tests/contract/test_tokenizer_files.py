"""Tokenizers from arbitrary combinations of tokenizer files, compared with transformers' AutoTokenizer."""

import io
import json
import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer
from transformers.models.auto import tokenization_auto

from docs.kinds import KINDS
from pagewire.common.chat.chat_template import render
from pagewire.common.gguf.tokenizer_files import TokenizerFiles, classes, settings
from pagewire.network.checkpoint_files import CheckpointError, model_digest
from scheduler_service.api.vllm.tokenizer_archive import read_tokenizer_archive
from scheduler_service.serving.checkpoint.model_info import read_model_info
from scheduler_service.serving.checkpoint.tokenizer import load_tokenizer
from testing.checkpoints.families import FAMILIES
from testing.checkpoints.published import published
from tests.contract.tokenizer_files_shapes import Files, byte_level, drawn_files, sentencepiece, unigram, vocabulary

NUM_SHAPES = 120
TEXTS = (
    "Hello <think>once</think> upon a time",
    "<s>[X] x<|im_end|>\n</s>  <pad>ünï Ünï once<unk>",
    " <img> tool upon a<mask> once <|endoftext|>12 345é",
    "tool <bos> <eos>é e\u0301",
)
TEMPLATE = "|".join(
    f"{{{{ {name}_token }}}}" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask", "image", "eot")
)
QUESTION = [{"role": "user", "content": "x"}]
# The errors for files that contradict each other or describe an impossible tokenizer.
REFUSALS = (
    r"give the token .* the id \d+, but (loading them gives it the id \d+|the tokenizer class omits it)"
    r"|its model is not BPE"
)
Encoded = list[int] | str


def write(folder: Path, files: Files) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def read(folder: Path) -> TokenizerFiles:
    return TokenizerFiles.of(folder / "tokenizer.json")


def made(files: TokenizerFiles) -> Tokenizer:
    return Tokenizer.from_str(files.tokenizer_json())


def outcome(encode: Callable[[], list[int]]) -> Encoded:
    """Return the token ids, or the library's error for a text that the model has no tokens for."""
    try:
        return encode()
    except Exception as error:
        return str(error)


def assert_same(files: TokenizerFiles, ours: Tokenizer, theirs: Any) -> None:
    for text in TEXTS:
        for is_whole in (True, False):
            ids = outcome(lambda: ours.encode(text, add_special_tokens=is_whole).ids)  # noqa: B023
            assert ids == outcome(lambda: theirs(text, add_special_tokens=is_whole)["input_ids"])  # noqa: B023
            if isinstance(ids, list):
                for skips in (True, False):
                    decoded = ours.decode(ids, skip_special_tokens=skips)
                    assert decoded == theirs.decode(ids, skip_special_tokens=skips)
    assert ours.get_vocab_size() == len(theirs)
    models = (json.loads(each.to_str())["model"] for each in (ours, theirs.backend_tokenizer))
    mine, other = ({name: value or None for name, value in model.items()} for model in models)
    assert mine == other, "also where no text here tells"
    named = files.settings.texts()
    assert named == theirs.special_tokens_map
    rendered = theirs.apply_chat_template(QUESTION, chat_template=TEMPLATE, tokenize=False)
    assert render(TEMPLATE, QUESTION, special_tokens=named) == rendered


@pytest.mark.parametrize("part", range(4))
def test_shapes_are_read_as_by_transformers_or_refused(tmp_path: Path, part: int) -> None:
    num_read = num_changed = 0
    for seed in range(part, NUM_SHAPES, 4):
        print(f"seed {seed}")
        folder = write(tmp_path / str(seed), drawn_files(random.Random(seed)))
        try:
            files = read(folder)
            ours = made(files)
        except ValueError as error:
            if re.search(REFUSALS, str(error)) is None:
                raise
            continue
        assert_same(files, ours, transformers.AutoTokenizer.from_pretrained(folder))
        num_read += 1
        num_changed += files.changes is not None
    assert num_read > NUM_SHAPES // 4 * 0.6
    assert num_changed > num_read * 0.6


# The places in which a token may be defined alone, and its definition there.
PLACES: dict[str, Files] = {
    "added_tokens_decoder": {"tokenizer_config.json": {"added_tokens_decoder": {"{id}": {"content": "<think>"}}}},
    "added_tokens.json": {"added_tokens.json": {"<think>": "{id}"}},
    "special_tokens_map.json": {"special_tokens_map.json": {"image_token": "<think>"}},
    "a name": {"tokenizer_config.json": {"image_token": "<think>"}},
    "a list": {"tokenizer_config.json": {"extra_special_tokens": ["<think>"]}},
    "an older list": {"tokenizer_config.json": {"additional_special_tokens": ["<think>"]}},
    "an object": {"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<think>"}}},
}


def with_ids(files: Files, token_id: int) -> Files:
    text = json.dumps(files).replace('"<think>": "{id}"', f'"<think>": {token_id}').replace("{id}", str(token_id))
    found: Files = json.loads(text)
    return found


@pytest.mark.parametrize("place", PLACES)
def test_a_token_defined_in_one_file_is_known_everywhere(tmp_path: Path, place: str) -> None:
    tokenizer = byte_level()
    token_id = len(vocabulary(tokenizer))
    config = {"model_type": "llama", "vocab_size": 400, "max_position_embeddings": 256}
    folder = write(tmp_path / "m", {"tokenizer.json": tokenizer, "config.json": config})
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert token_id not in load_tokenizer(folder / "tokenizer.json").encode(TEXTS[0]).ids
    before = read_model_info(str(folder)), model_digest(folder)
    assert before[0].digest == before[1]
    assert before[0].has_standard_tokenizer_files

    write(folder, with_ids(PLACES[place], token_id))
    info, ours = read_model_info(str(folder)), load_tokenizer(folder / "tokenizer.json")
    assert token_id in ours.encode(TEXTS[0]).ids
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert_same(read(folder), ours, theirs)
    assert info.special_tokens == theirs.special_tokens_map
    # A worker with other files has another model digest.
    assert model_digest(folder) == info.digest != before[1]
    # Routers read fewer files than these, so they get two files that define every token.
    assert not info.has_standard_tokenizer_files
    with zipfile.ZipFile(io.BytesIO(read_tokenizer_archive(read_model_info(str(folder))))) as archive:
        archive.extractall(tmp_path / "given")
    given = Tokenizer.from_file(str(tmp_path / "given" / "tokenizer.json"))
    assert given.to_str() == ours.to_str()
    assert_same(read(tmp_path / "given"), given, transformers.AutoTokenizer.from_pretrained(tmp_path / "given"))


def test_files_that_change_nothing_leave_the_model_what_it_is(tmp_path: Path) -> None:
    tokenizer = byte_level()
    entry = {"content": "<end>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] = [{"id": len(vocabulary(tokenizer)), **entry, "special": True}]
    config = {"model_type": "llama", "vocab_size": 400, "max_position_embeddings": 256}
    folder = write(tmp_path, {"tokenizer.json": tokenizer, "config.json": config})
    bare = model_digest(folder)
    listed = {str(len(vocabulary(tokenizer))): {**entry, "special": True}}
    write(folder, {"tokenizer_config.json": {"eos_token": "<end>", "added_tokens_decoder": listed}})
    assert model_digest(folder) == read_model_info(str(folder)).digest == bare
    assert read(folder).is_plain
    assert read(folder).tokenizer_json() == (folder / "tokenizer.json").read_text()
    # A token name that only special_tokens_map.json sets changes no token, but a router would not find it.
    write(folder, {"tokenizer_config.json": {}, "special_tokens_map.json": {"eos_token": "<end>"}})
    assert model_digest(folder) == bare
    assert not read(folder).is_plain
    with zipfile.ZipFile(io.BytesIO(read_tokenizer_archive(read_model_info(str(folder))))) as archive:
        assert json.loads(archive.read("tokenizer_config.json"))["eos_token"] == "<end>"


@pytest.mark.parametrize("name", [found.name for found in classes._CLASSES if found is not classes.PLAIN])
def test_files_saved_by_transformers_are_used_unchanged(tmp_path: Path, name: str) -> None:
    is_words = name in ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")
    model = (sentencepiece() if is_words else byte_level())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    saved = getattr(transformers, name)(vocab=model["vocab"], merges=merges)
    saved.add_tokens(["<think>"])
    saved.save_pretrained(tmp_path)
    files = read(tmp_path)
    assert files.settings.kind.name == name
    assert_same(files, made(files), transformers.AutoTokenizer.from_pretrained(tmp_path))
    # Only the class CodeLlamaTokenizer uses its own bos_token.
    assert (files.changes is None) == (name != "CodeLlamaTokenizer")


# Supported repositories with different pairs of a model type and a tokenizer class.
SUPPORTED = {kind.example for kind in KINDS if not kind.missing}
WITH_CLASS = {
    (each.config["model_type"], each.tokenizer_class): name for name, each in published().items() if name in SUPPORTED
}


@pytest.mark.parametrize("name", WITH_CLASS.values())
def test_the_tokenizer_class_of_a_repository_is_read_as_by_transformers(tmp_path: Path, name: str) -> None:
    given = published()[name]
    tokenizer = byte_level() if given.vocabulary == "bytes" else sentencepiece()
    named = {"tokenizer_class": given.tokenizer_class} if given.tokenizer_class else {}
    folder = write(tmp_path, {"tokenizer.json": tokenizer, "config.json": given.config, "tokenizer_config.json": named})
    assert_same(
        read(folder), load_tokenizer(folder / "tokenizer.json"), transformers.AutoTokenizer.from_pretrained(folder)
    )


def test_the_classes_are_those_of_transformers() -> None:
    others = {f"{name}Tokenizer" for name in ("Auto", "PreTrained", "Basic", "Character", "Mecab", "Wordpiece")}
    own = tokenization_auto.TOKENIZER_MAPPING_NAMES
    names = {name for name in (*dir(transformers), *own.values()) if name is not None and name.endswith("Tokenizer")}
    found = {name: tokenization_auto.tokenizer_class_from_name(name) for name in names - others}
    with_pipeline = {
        name
        for name, kind in found.items()
        if not issubclass(kind, transformers.TokenizersBackend) or "__init__" in vars(kind)
    }
    unserved = {f"{name}Tokenizer" for name in classes._UNSUPPORTED.split()}
    assert with_pipeline == unserved | {kind.name for kind in classes._CLASSES}
    multimodal = ("mistral3", "gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
    corrected = ("phi3", "phimoe", "ernie4_5", "ernie4_5_moe", "minimax_m2")
    for model_type in (*FAMILIES, *multimodal):
        name = (own.get(model_type) or "").replace("TokenizersBackend", classes.PLAIN.name)
        assert classes._OF_MODEL_TYPE.get(model_type, "") == name, model_type
        is_overruled = model_type in tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
        assert is_overruled == (model_type in (*classes._OVERRULED, *corrected))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "tokenizer_config.json",
            {"tokenizer_class": "T5TokenizerFast"},
            "tokenizer_class is T5Tokenizer, which is not",
        ),
        ("tokenizer_config.json", {"split_special_tokens": True}, "split_special_tokens is true, but must be false"),
        ("tokenizer_config.json", {"add_prefix_space": "yes"}, 'add_prefix_space is "yes", but must be true or false'),
        (
            "tokenizer_config.json",
            {"bos_token": 3},
            "bos_token is 3, but must be a text, or an object with its content",
        ),
        (
            "tokenizer_config.json",
            {"pad_token": {"content": "a", "lstrip": 1}},
            "pad_token: lstrip is 1, but must be true",
        ),
        ("tokenizer_config.json", {"extra_special_tokens": "a"}, 'extra_special_tokens is "a", but must be a list'),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}, "must be an object of tokens by"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"100000000": {"content": "a"}}},
            "must be an object of tokens by",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"900": {"content": "a<"}}},
            'give the token "a<" the id 900',
        ),
        (
            "special_tokens_map.json",
            {"additional_special_tokens": [[]]},
            r"additional_special_tokens is \[\], but must",
        ),
        ("added_tokens.json", {"<a>": True}, "<a> is true, but must be the id of a token"),
        ("added_tokens.json", {"<a>": 2**40}, "<a> is 1099511627776, but must be the id of a token"),
        ("added_tokens.json", {"<a>": 900}, 'give the token "<a>" the id 900, but loading them gives it the id 3'),
    ],
)
def test_what_cannot_be_honoured_is_named(tmp_path: Path, name: str, content: dict[str, Any], message: str) -> None:
    folder = write(tmp_path, {"tokenizer.json": byte_level(), "config.json": {"model_type": "llama"}, name: content})
    with pytest.raises(ValueError, match=message) as raised:
        load_tokenizer(folder / "tokenizer.json")
    assert "\n" not in str(raised.value)
    assert str(folder) in str(raised.value)
    if "the id 900" not in message:  # the error is only known when tokens are added
        with pytest.raises(CheckpointError, match=message):
            model_digest(folder)


def test_a_class_of_bpe_makes_nothing_of_other_models(tmp_path: Path) -> None:
    described = {"tokenizer_class": "LlamaTokenizer"}
    folder = write(tmp_path, {"tokenizer.json": unigram(), "config.json": {}, "tokenizer_config.json": described})
    with pytest.raises(ValueError, match="its model is not BPE, which the tokenizer_class in tokenizer_config"):
        load_tokenizer(folder / "tokenizer.json")
    write(folder, {"tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"}})
    load_tokenizer(folder / "tokenizer.json")


@pytest.mark.parametrize("name", [settings.ADDED, settings.NAMES, settings.CONFIG, "config.json", "tokenizer.json"])
def test_files_of_a_hostile_size_or_depth_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    config = {"model_type": "llama", "vocab_size": 400, "max_position_embeddings": 256}
    folder = write(tmp_path, {"tokenizer.json": byte_level(), "config.json": config})
    described = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}
    write(folder, {"tokenizer_config.json": described})
    read_model_info(str(folder))
    (folder / name).write_text('{"a":' * 100_000)
    with pytest.raises(ValueError, match=rf"{name} is not .*") as deep:
        read_model_info(str(folder))
    with (folder / name).open("wb") as file:
        file.truncate(10**12)  # a sparse file
    with pytest.raises(ValueError, match=rf"{name} has 1000000000000 bytes; the maximum is \d+") as large:
        read_model_info(str(folder))
    with pytest.raises(CheckpointError, match=rf"{name} has 1000000000000 bytes"):
        model_digest(folder)
    assert not any("\n" in str(raised.value) for raised in (deep, large))
