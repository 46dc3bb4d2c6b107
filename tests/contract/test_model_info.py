"""What the scheduler reads of a checkpoint, with anything in its files."""

import json
import random
from pathlib import Path

import pytest

from scheduler_service.serving.model_info import read_model_info
from tests.broken_json import ODD_VALUES, refusal_of, spoilt, spoilt_bytes

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": None,
}
GENERATION = {
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "eos_token_id": [2],
}


def write(path: Path, config: dict[str, object], generation: dict[str, object]) -> None:
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps(generation))


@pytest.mark.parametrize("seed", range(20))
def test_an_odd_value_is_refused_by_file_and_name_or_harmless(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        is_generation = rng.random() < 0.5
        config, keys = (CONFIG, []) if is_generation else spoilt(CONFIG, rng)
        generation = (
            GENERATION if not is_generation else {**GENERATION, rng.choice([*GENERATION]): rng.choice(ODD_VALUES)}
        )
        write(tmp_path, config, generation)
        text = refusal_of(lambda: read_model_info(str(tmp_path)), ValueError)
        if text is not None:
            name = "generation_config.json: " if is_generation else "config.json: "
            assert name in text or "config.json is not JSON: Exceeds the limit" in text, (keys, text)
            assert any(key in text for key in (*GENERATION, *keys, "limit")), (keys, text)
            continue
        info = read_model_info(str(tmp_path))
        assert 1 <= info.vocab_size <= 1 << 24
        assert 1 <= info.max_model_len <= 1 << 24


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("seed", range(30))
def test_a_file_that_is_no_json_is_one_line(tmp_path: Path, name: str, seed: int) -> None:
    write(tmp_path, CONFIG, GENERATION)
    (tmp_path / name).write_bytes(spoilt_bytes(CONFIG, random.Random(seed)))
    text = refusal_of(lambda: read_model_info(str(tmp_path)), ValueError)
    assert text is None or name in text


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("gpt2", {"n_positions": 7}, 7),
        ("mpt", {"max_seq_len": 8}, 8),
        ("bloom", {"seq_length": 9}, 9),
        ("bloom", {"seq_length": None}, 2048),  # as in bigscience/bloom-560m
    ],
)
def test_every_family_has_a_length(
    tmp_path: Path, model_type: str, fields: dict[str, int | None], expected: int
) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "max_position_embeddings"}
    write(tmp_path, {**config, "model_type": model_type, **fields}, {})
    assert read_model_info(str(tmp_path)).max_model_len == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 2**31}, "config.json: vocab_size is 2147483648, but must be a whole number from 1 to 16777216"),
        ({"vocab_size": True}, "config.json: vocab_size is true, but"),
        ({"max_position_embeddings": 2**40}, "max_position_embeddings is 1099511627776, but must be a whole number"),
        ({"max_position_embeddings": None}, "max_position_embeddings or n_positions or max_seq_len or .* is null, but"),
        ({"architectures": [{}]}, r"config.json: architectures is \[{}\], but must be a list of names"),
        ({"eos_token_id": [2**31]}, r"config.json: eos_token_id is \[2147483648\], but must be a token id from 0 to"),
        ({"model_type": 7}, "config.json: model_type is 7, but must be a text"),
    ],
)
def test_what_no_model_has_is_named(tmp_path: Path, fields: dict[str, object], message: str) -> None:
    write(tmp_path, {**CONFIG, **fields}, {})
    with pytest.raises(ValueError, match=message):
        read_model_info(str(tmp_path))


@pytest.mark.parametrize("name", ["chat_template", "bos_token"])
def test_a_text_that_cannot_be_told_to_clients_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path, CONFIG, GENERATION)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({name: "a\ud800"}))
    with pytest.raises(ValueError, match=r"tokenizer_config.json: '\\ud800' is half a character, which no text may"):
        read_model_info(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({name: "a\U0001f98a"}))
    read_model_info(str(tmp_path))
