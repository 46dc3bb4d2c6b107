"""Prompts for infilling, compared with the prompt that each model family publishes, as transformers tokenizes it."""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from scheduler_service.api.http.infill import has_infill, infill_prompt, infill_stops
from scheduler_service.api.http.requests import SampledRequest
from scheduler_service.serving.availability import WorkerAvailability
from scheduler_service.serving.checkpoint.model_info import read_model
from scheduler_service.serving.checkpoint.tokenizer import Tokenizer as ServedTokenizer
from scheduler_service.serving.clock import Clock
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.prompt_text import TextLimits
from scheduler_service.serving.refusal import RefusedError
from scheduler_service.serving.tenants.caller import Call, Caller
from scheduler_service.serving.turns import PIECE_SIZE
from testing.checkpoints.gguf_files import byte_level_keys, write_gguf
from testing.seeds import seeded

BUNDLED = Path(__file__).parents[2] / "models" / "storyteller"
CALL = Call(Caller(None))
MAX_TOKENS = 4096
PIECES = [
    *"abcdefxyz()[]:=.,_<>|▁ \n\t0123" * 2, " ", "  ", "\n", "\n\n", "    ", "def ", "return", " é", "e\u0301", "中文",
    "😀", "<end>", "<|im_start|>", "FILL", "PRE>", "<fim",
]  # fmt: skip
QWEN2 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CORPUS = [line for path in sorted(Path(__file__).parent.glob("test_to*.py")) for line in path.read_text().splitlines()]


def ends_of(intake: Intake) -> tuple[int, ...]:
    return tuple(infill_stops(SampledRequest(), intake))


def drawn(rng: random.Random) -> str:
    """Return a random text. One of eight texts is empty, and many begin or end with white space."""
    return "".join(rng.choices(PIECES, k=rng.choice((0, 1, 2, 3, 5, 9, 20, 40))))


def byte_level(control: tuple[str, ...], *, bos: str = "", splits: bool = False, **flags: bool) -> Tokenizer:
    """Return a byte-level tokenizer with control tokens, which have the given flags."""
    tokenizer = Tokenizer(models.BPE())
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits)
    parts = [pre_tokenizers.Split(Regex(QWEN2), behavior="isolated"), plain]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts) if splits else plain
    tokenizer.normalizer = normalizers.NFC() if splits else None
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(["<end>", *([bos] if bos else [])])
    tokenizer.add_tokens([AddedToken(text, **flags) for text in control])
    if bos:
        _add_bos(tokenizer, bos)
    return tokenizer


def sentencepiece(
    control: tuple[str, ...], *, bos: str = "<s>", normalizer: Any = None, pre_tokenizer: Any = None
) -> Tokenizer:
    """Return a BPE tokenizer that writes spaces as "▁", with byte fallback."""
    vocab, merges = sentencepiece_vocab(bos)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", bos, "<end>", *control])
    _add_bos(tokenizer, bos)
    return tokenizer


def sentencepiece_vocab(bos: str = "<s>") -> tuple[dict[str, int], list[tuple[str, str]]]:
    texts = ["<unk>", bos, "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefxyz():<>PRE", "FI", "LL"]
    merges = [("▁", "a"), ("a", "b"), ("▁", "▁"), ("▁▁", "▁▁"), ("▁", "("), ("P", "R"), ("PR", "E"), ("▁", "<")]
    return {text: i for i, text in enumerate([*texts, *("".join(pair) for pair in merges)])}, merges


def _add_bos(tokenizer: Tokenizer, bos: str) -> None:
    token = (bos, tokenizer.token_to_id(bos))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[token])


def code_llama() -> Tokenizer:
    """Return the published tokenizer of CodeLlama, with a small vocabulary."""
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return sentencepiece(("▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>"), normalizer=spaces)


_QWEN = tuple(f"<|fim_{name}|>" for name in ("prefix", "suffix", "middle", "pad"))
_STARCODER = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<repo_name>", "<file_sep>")
_DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")
_METASPACE = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)


@dataclass(frozen=True)
class Family:
    make: Callable[[], Tokenizer]
    published: str  # the prompt, with {prefix} and {suffix}
    ends: tuple[str, ...] = ()  # tokens that end an infilled text


FAMILIES = {
    "qwen": Family(
        lambda: byte_level(
            (*_QWEN, "<|repo_name|>", "<|file_sep|>", "<|endoftext|>"), splits=True, special=False, normalized=False
        ),
        "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|endoftext|>"),
    ),
    "starcoder2": Family(
        lambda: byte_level(_STARCODER, special=True),
        "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
        _STARCODER[3:],
    ),
    "granite": Family(
        lambda: byte_level(_QWEN, special=True), "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>", _QWEN[3:]
    ),
    "deepseek": Family(
        lambda: byte_level(_DEEPSEEK, bos="<｜begin▁of▁sentence｜>", special=False, normalized=True),
        "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",
    ),
    "codegemma": Family(
        lambda: sentencepiece(
            (*_QWEN[:3], "<|file_separator|>"), bos="<bos>", normalizer=normalizers.Replace(" ", "▁")
        ),
        "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
        ("<|file_separator|>",),
    ),
    # The space in front of the prefix is published, too.
    "codestral": Family(
        lambda: sentencepiece(("[SUFFIX]", "[PREFIX]", "[MIDDLE]"), pre_tokenizer=_METASPACE),
        "[SUFFIX]{suffix}[PREFIX] {prefix}",
    ),
    "glm": Family(
        lambda: byte_level(("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"), special=True),
        "<|code_prefix|>{prefix}<|code_suffix|>{suffix}<|code_middle|>",
    ),
}


@dataclass
class Engine:
    """The part of an engine that prompts need. No worker has joined yet."""

    availability: WorkerAvailability


def intake_of(model: Path, **limits: int) -> Intake:
    """Load a model's tokenizer as a service does, and return an intake for it."""
    info, files = read_model(str(model))
    tokenizer = None if files is None else ServedTokenizer(files.path, files.tokenizer_json(), info)
    availability = WorkerAvailability(
        MAX_TOKENS, Clock(), worker_timeout=1, worker_grace=None, on_grace_ended=print, on_timed_out=print
    )
    return Intake(Engine(availability), info, tokenizer, max_pending_calls=1, text_limits=TextLimits(**limits))


@contextmanager
def served(path: Path, tokenizer: Tokenizer | None, **config: Any) -> Iterator[Intake]:
    """Write a checkpoint with a tokenizer, and load it. `config` are values of config.json and of
    tokenizer_config.json."""
    path.mkdir()
    settings = {"vocab_size": config.pop("vocab_size", 2048), "eos_token_id": 0}
    settings["max_position_embeddings"] = config.pop("max_position_embeddings", MAX_TOKENS)
    (path / "config.json").write_text(json.dumps(settings))
    if tokenizer is not None:
        tokenizer.save(str(path / "tokenizer.json"))
    if config:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    yield from closing(intake_of(path))


def closing(intake: Intake) -> Iterator[Intake]:
    yield intake
    intake.turns.close()
    if intake.tokenizer is not None:
        intake.tokenizer.close()


@pytest.mark.parametrize("name", FAMILIES)
async def test_prompts_are_the_published_ones(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    tokenizer = family.make()
    transformer, rng = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer), seeded()
    with served(tmp_path / "model", tokenizer) as intake:
        assert has_infill(intake)
        assert ends_of(intake) == tuple(sorted(map(tokenizer.token_to_id, family.ends)))
        for prefix, suffix in [("", ""), ("a", ""), ("", "a"), *((drawn(rng), drawn(rng)) for _ in range(60))]:
            expected = transformer(family.published.format(prefix=prefix, suffix=suffix)).input_ids
            assert await infill_prompt(prefix, suffix, CALL, intake) == tuple(expected), (prefix, suffix)


def code_llama_of_transformers() -> transformers.CodeLlamaTokenizer:
    """Return CodeLlama's tokenizer, as in transformers 4.

    Transformers 5 adds a pre-tokenizer that is not in the published tokenizer.json, and that puts a space in front of
    the suffix.
    """
    vocab, merges = sentencepiece_vocab()
    found = transformers.CodeLlamaTokenizer(vocab=vocab, merges=merges)
    found.add_special_tokens({"additional_special_tokens": ["<end>"]})
    return found


@pytest.mark.parametrize("form", ["published", "saved by transformers 5"])
async def test_code_llama_is_as_in_transformers(form: str, tmp_path: Path) -> None:
    theirs, rng = code_llama_of_transformers(), seeded()
    ours = Tokenizer.from_str(theirs.backend_tokenizer.to_str())
    if form == "published":
        ours = code_llama()
    theirs.backend_tokenizer.pre_tokenizer = None
    names = theirs.convert_ids_to_tokens
    with served(
        tmp_path / "model", ours, tokenizer_class="CodeLlamaTokenizer" if form != "published" else "X"
    ) as intake:
        assert intake.tokenizer is not None
        for prefix, suffix in [("", "a"), (" a", " a"), *((drawn(rng), drawn(rng)) for _ in range(60))]:
            if suffix:  # without a suffix, transformers does not ask for an infill
                found = await infill_prompt(prefix, suffix, CALL, intake)
                expected = names(theirs(f"{prefix}<FILL_ME>{suffix}").input_ids)
                assert list(map(intake.tokenizer.name_of, found)) == expected, (prefix, suffix)
                assert names(theirs(prefix, suffix=suffix).input_ids) == expected
        (end,) = ends_of(intake)
        assert intake.tokenizer.name_of(end) == "▁<EOT>"


@pytest.mark.parametrize("name", [*FAMILIES, "codellama"])
async def test_texts_of_a_client_contain_no_control_tokens(name: str, tmp_path: Path) -> None:
    tokenizer = code_llama() if name == "codellama" else FAMILIES[name].make()
    rng = seeded()
    with served(tmp_path / "model", tokenizer) as intake:
        assert intake.tokenizer is not None
        infill = intake.tokenizer.infill
        assert infill is not None
        assert infill.controls.keys() >= {"prefix", "suffix"}
        texts = [tokenizer.id_to_token(token_id).replace("▁", " ") for token_id in infill.controls.values()]
        for _ in range(20):
            first, second, third = ("".join(rng.choices([*texts, "a", " ", "b("], k=9)) for _ in range(3))
            found = await infill_prompt(first, second, CALL, intake, extra=[(third, first)])
            empty = await infill_prompt("", "", CALL, intake, extra=[("", "")])
            controls = infill.controls.values()
            assert [each for each in found if each in controls] == [each for each in empty if each in controls]
            plain = [each for each in found if each not in {*controls, *infill.starts}]
            written = intake.tokenizer.decode(plain, skip_special_tokens=False)
            suffix_first = infill.controls.get("middle") is None
            expected = second + infill.lead + first if suffix_first else infill.lead + first + second
            assert written.replace("▁", " ").endswith(expected.replace("▁", " "))


async def test_other_files_come_first(tmp_path: Path) -> None:
    tokenizer = FAMILIES["qwen"].make()
    transformer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    with served(tmp_path / "model", tokenizer) as intake:
        found = await infill_prompt("x = ", "y", CALL, intake, extra=[("a.py", "def a"), ("b/c.py", "z")])
        assert found == tuple(
            transformer(
                "<|repo_name|>myproject\n<|file_sep|>a.py\ndef a<|file_sep|>b/c.py\nz"
                "<|file_sep|>filename\n<|fim_prefix|>x = <|fim_suffix|>y<|fim_middle|>"
            ).input_ids
        )
    with served(tmp_path / "llama", code_llama()) as intake:
        assert intake.tokenizer is not None
        found = await infill_prompt("x = ", "y", CALL, intake, extra=[("a.py", "def a"), ("b.py", "z")])
        text = intake.tokenizer.decode(found, skip_special_tokens=False)
        snippets = "".join(f"\n\n--- snippet ---\n\n{each}" for each in ("def a", "z"))
        assert text == f"<s>{snippets} <PRE> x =  <SUF>y <MID>"


async def test_special_tokens_in_front_of_prompts_can_be_left_out(tmp_path: Path) -> None:
    with served(tmp_path / "model", code_llama()) as intake:
        bos, *rest = await infill_prompt("a", "b", CALL, intake)
        assert tuple(rest) == await infill_prompt("a", "b", CALL, intake, add_special_tokens=False)
        assert intake.tokenizer is not None
        assert intake.tokenizer.name_of(bos) == "<s>"


_NAMED = ("<1>", "<2>", "<3>", "<4>", "<5>", "<6>")
_KEYS = {
    "old": ("prefix", "suffix", "middle"),
    "new": ("fim_pre", "fim_suf", "fim_mid", "fim_rep", "fim_sep", "fim_pad"),
}


@pytest.mark.parametrize("age", _KEYS)
async def test_keys_of_a_gguf_file_name_the_tokens(age: str, tmp_path: Path) -> None:
    tokenizer = byte_level((*_QWEN, *_NAMED), special=True)
    ids = {
        f"tokenizer.ggml.{key}_token_id": tokenizer.token_to_id(text)
        for key, text in zip(_KEYS[age], _NAMED, strict=False)
    }
    if age == "new":  # the newer keys prevail
        ids |= {f"tokenizer.ggml.{key}_token_id": tokenizer.token_to_id("<6>") for key in _KEYS["old"]}
    keys = byte_level_keys(json.loads(tokenizer.to_str()), 1024)
    settings = {"tokenizer.ggml.eos_token_id": None, **ids}
    model = write_gguf(tmp_path / "model.gguf", BUNDLED, "Q4_0", tokenizer=keys, settings=settings)
    names = ("<1>a", "<2>b", "<3>")
    for intake in closing(intake_of(model)):
        assert intake.tokenizer is not None
        found = await infill_prompt("a", "b", CALL, intake)
        assert found == tuple(tokenizer.encode("".join(names)).ids)
        ends = [tokenizer.token_to_id(text) for text in (("<4>", "<5>", "<6>") if age == "new" else _QWEN[3:])]
        assert ends_of(intake) == tuple(ends)


async def test_the_texts_of_a_gguf_files_tokens_are_known(tmp_path: Path) -> None:
    tokenizer = FAMILIES["deepseek"].make()
    keys = byte_level_keys(json.loads(tokenizer.to_str()), 1024)
    settings = {
        "tokenizer.ggml.eos_token_id": None,
        "tokenizer.ggml.bos_token_id": tokenizer.token_to_id("<｜begin▁of▁sentence｜>"),
        "tokenizer.ggml.add_bos_token": True,
    }
    model = write_gguf(tmp_path / "model.gguf", BUNDLED, "Q4_0", tokenizer=keys, settings=settings)
    for intake in closing(intake_of(model)):
        expected = FAMILIES["deepseek"].published.format(prefix="def a", suffix="\nb")
        assert await infill_prompt("def a", "\nb", CALL, intake) == tuple(tokenizer.encode(expected).ids)


async def test_tokenizer_config_names_the_tokens(tmp_path: Path) -> None:
    tokenizer = byte_level((*_QWEN, *_NAMED), special=True)
    named = {"prefix_token": "<1>", "suffix_token": "<2>", "middle_token": {"content": "<3>"}, "eot_token": "<4>"}
    with served(tmp_path / "model", tokenizer, **named) as intake:
        assert await infill_prompt("a", "b", CALL, intake) == tuple(tokenizer.encode("<1>a<2>b<3>").ids)
        assert ends_of(intake) == tuple(map(tokenizer.token_to_id, (_QWEN[3], "<4>")))


async def test_models_that_cannot_infill_say_so(tmp_path: Path) -> None:
    half = byte_level(("<|fim_prefix|>", "<|fim_suffix|>"), special=True)
    small = FAMILIES["granite"].make()
    # The tokenizer class adds its tokens to every tokenizer, but the model knows only the first tokens.
    without, _ = sentencepiece_vocab()
    for path, tokenizer, config in (
        ("none", None, {}),
        ("half", half, {}),
        ("small", small, {"vocab_size": small.token_to_id("<|fim_middle|>")}),
        ("class", sentencepiece(()), {"tokenizer_class": "CodeLlamaTokenizer", "vocab_size": len(without)}),
    ):
        with served(tmp_path / path, tokenizer, **config) as intake:
            assert not has_infill(intake)
            assert ends_of(intake) == ()
            with pytest.raises(RefusedError, match="has no tokenizer with tokens for infilling") as refused:
                await infill_prompt("a", "b", CALL, intake, field="input_suffix")
            assert refused.value.field == "input_suffix"
            assert "leave input_suffix unset" in str(refused.value)


async def test_prompts_have_limits(tmp_path: Path) -> None:
    with served(tmp_path / "model", FAMILIES["granite"].make()) as intake:
        # "\x01" is one token, and the prompt has three control tokens.
        assert len(await infill_prompt("\x01" * 2000, "\x01" * (MAX_TOKENS - 2004), CALL, intake)) == MAX_TOKENS - 1
        with pytest.raises(RefusedError, match=f"the prompt has {MAX_TOKENS} tokens") as refused:
            await infill_prompt("\x01" * 2000, "\x01" * (MAX_TOKENS - 2003), CALL, intake)
        assert (refused.value.field, refused.value.overflow) == ("suffix", (MAX_TOKENS, MAX_TOKENS))
    for intake in closing(intake_of(tmp_path / "model", max_prompt=100)):
        assert await infill_prompt("é" * 10, "é" * 10, CALL, intake, extra=[("é" * 10, "x" * 28)])
        with pytest.raises(RefusedError, match="the prompt has 101 bytes"):
            await infill_prompt("x" * 50, "x" * 51, CALL, intake)


async def test_long_texts(tmp_path: Path) -> None:
    """Texts that are tokenized on the thread for long work result in the same tokens."""
    tokenizer = FAMILIES["qwen"].make()
    with served(tmp_path / "model", tokenizer, max_position_embeddings=PIECE_SIZE) as intake:
        prefix, suffix = "def a" * (PIECE_SIZE // 8), "\n" + "return x" * (PIECE_SIZE // 16)
        assert len(prefix + suffix) > PIECE_SIZE
        expected = FAMILIES["qwen"].published.format(prefix=prefix, suffix=suffix)
        assert await infill_prompt(prefix, suffix, CALL, intake) == tuple(tokenizer.encode(expected).ids)
        assert intake.turns.waiting.num_bytes == 0
