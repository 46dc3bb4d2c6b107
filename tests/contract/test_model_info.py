"""The model information that the scheduler reads from a checkpoint, with arbitrary content in the files."""

import json
import random
from pathlib import Path

import pytest
import torch

from pagewire.kernels.sampling import lowest_kept
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from scheduler_service.api.grpc.generate_request import read_request
from scheduler_service.api.grpc.resolved_request import decode_resolved, encode_resolved
from scheduler_service.serving.checkpoint.model_info import ModelInfo, read_model_info
from scheduler_service.serving.checkpoint.sampling_defaults import SUPPRESSING_BIAS
from scheduler_service.serving.checkpoint.tokenizer import load_tokenizer
from scheduler_service.serving.tenants.caller import Call, Caller
from testing.scheduler_stack import make_tokenizer
from tests.broken_json import ODD_VALUES, refusal_of, spoilt, spoilt_bytes

ANY_CALL = Call(Caller(None))

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
    ("architecture", "fields", "expected"),
    [
        ("GPT2LMHeadModel", {"n_positions": 7}, 7),
        ("MPTForCausalLM", {"max_seq_len": 8}, 8),
        ("BloomForCausalLM", {"seq_length": 9}, 9),
        ("BloomForCausalLM", {"seq_length": None}, 2048),  # as in bigscience/bloom-560m
        ("BloomForCausalLM", {}, 2048),
        ("BloomForCausalLM", {"seq_length": 9, "n_positions": 10}, 9),
        ("Gemma3ForCausalLM", {}, 131_072),
        ("GptOssForCausalLM", {}, 131_072),
        ("NoneSuch", {"max_seq_len": 8}, 8),
    ],
)
def test_every_family_has_a_length(
    tmp_path: Path, architecture: str, fields: dict[str, int | None], expected: int
) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "max_position_embeddings"}
    write(tmp_path, {**config, "architectures": [architecture], **fields}, {})
    assert read_model_info(str(tmp_path)).max_model_len == expected


@pytest.mark.parametrize(
    ("outer", "text", "expected"),
    [
        ({}, {}, (262_208, 131_072, ())),  # as in published files of vision models, which leave both out
        ({"eos_token_id": [1, 106]}, {"vocab_size": 300, "eos_token_id": 2}, (300, 131_072, (1, 106))),
        ({"vocab_size": None}, {"vocab_size": 300, "max_position_embeddings": 64}, (300, 64, ())),
    ],
)
def test_a_multimodal_model_is_the_text_model_in_it(
    tmp_path: Path, outer: dict[str, object], text: dict[str, object], expected: tuple[int, int, tuple[int, ...]]
) -> None:
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", **outer}
    write(tmp_path, {**whole, "text_config": {"model_type": "gemma3_text", **text}}, {})
    info = read_model_info(str(tmp_path))
    assert (info.vocab_size, info.max_model_len, info.eos_token_ids) == expected
    assert info.model_type == "gemma3"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 2**31}, "config.json: vocab_size is 2147483648, but must be a whole number from 1 to 16777216"),
        ({"vocab_size": True}, "config.json: vocab_size is true, but"),
        ({"max_position_embeddings": 2**40}, "max_position_embeddings is 1099511627776, but must be a whole number"),
        (
            {"max_position_embeddings": None},
            "max_position_embeddings or n_positions or seq_length or max_seq_len or attention_chunk_size is null, but",
        ),
        ({"architectures": [{}]}, r"config.json: architectures is \[{}\], but must be a list of names"),
        ({"eos_token_id": [2**31]}, r"config.json: eos_token_id is \[2147483648\], but must be a token id from 0 to"),
        ({"model_type": 7}, "config.json: model_type is 7, but must be a text"),
    ],
)
def test_impossible_values_are_named(tmp_path: Path, fields: dict[str, object], message: str) -> None:
    write(tmp_path, {**CONFIG, **fields}, {})
    with pytest.raises(ValueError, match=message):
        read_model_info(str(tmp_path))


@pytest.mark.parametrize("name", ["chat_template", "bos_token"])
def test_a_text_that_cannot_be_told_to_clients_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path, CONFIG, GENERATION)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({name: "a\ud800"}))
    with pytest.raises(ValueError, match=r"tokenizer_config.json: '\\ud800' is an unpaired surrogate, which text may"):
        read_model_info(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({name: "a\U0001f98a"}))
    read_model_info(str(tmp_path))


def info_with(path: Path, **generation: object) -> ModelInfo:
    write(path, CONFIG, generation)
    return read_model_info(str(path))


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.9}),
        ({"do_sample": True, "temperature": 0.6}, {"temperature": 0.6}),
        ({"do_sample": None}, {"temperature": 1.0}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 40.0}, {"top_k": 40}),
        ({"temperature": None, "top_k": None}, {"temperature": 1.0, "top_k": 0}),
    ],
)
def test_defaults_of_requests(tmp_path: Path, generation: dict[str, object], expected: dict[str, float]) -> None:
    defaults = info_with(tmp_path, **generation).sampling_defaults
    assert {name: getattr(defaults, name) for name in expected} == expected


@pytest.mark.parametrize(("ids", "expected"), [(-1, ()), ([2, -1, None, 4], (2, 4)), (None, (2,))])
def test_an_end_token_of_minus_1_or_null_is_none(tmp_path: Path, ids: object, expected: tuple[int, ...]) -> None:
    write(tmp_path, CONFIG, {"eos_token_id": ids})
    assert read_model_info(str(tmp_path)).eos_token_ids == expected


def test_a_snapshot_of_the_hub_has_the_name_of_its_repository(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / ("c1" * 20)
    snapshot.mkdir(parents=True)
    write(snapshot, CONFIG, {})
    assert read_model_info(str(snapshot)).name == "Qwen3-0.6B"


@pytest.mark.parametrize("value", [0, 0.0])
def test_a_top_p_of_0_keeps_the_most_likely_token_alone(tmp_path: Path, value: float) -> None:
    top_p = info_with(tmp_path, top_p=value).sampling_defaults.top_p
    scaled = torch.tensor([0.0, -1e-6, -1.0, -50.0])
    assert lowest_kept(scaled, 0, top_p, torch.tensor(0.0)) == 0.0


@pytest.mark.parametrize(
    ("generation", "named"),
    [
        ({"do_sample": "no"}, r"do_sample is \"no\", but must be true or false"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_p": -0.1}, "top_p is -0.1"),
        (
            {"suppress_tokens": "all"},
            'suppress_tokens is "all", but must be a token id from 0 to 2147483647 or a list of them$',
        ),
        ({"suppress_tokens": [1, -2]}, "suppress_tokens is .* but must be a token id"),
        ({"top_k": 40.5}, "top_k is 40.5"),
    ],
)
def test_invalid_generation_config_values_are_refused(
    tmp_path: Path, generation: dict[str, object], named: str
) -> None:
    with pytest.raises(ValueError, match=rf"generation_config\.json: {named}"):
        info_with(tmp_path, **generation)


def test_too_many_suppressed_tokens_are_refused_with_the_bound(tmp_path: Path) -> None:
    write(tmp_path, {**CONFIG, "vocab_size": 5000}, {"suppress_tokens": [*range(2000)]})
    with pytest.raises(ValueError, match=r"suppress_tokens is .* must be a list of at most 1024 tokens"):
        read_model_info(str(tmp_path))


def test_suppressed_tokens_stay_so_whatever_a_request_says(tmp_path: Path) -> None:
    """Suppressed tokens stay suppressed whatever a request says.

    Tokens outside the vocabulary are ignored: they cannot be sampled, and some published files list them.
    """
    model = info_with(tmp_path, suppress_tokens=[7, 3, 7, 9999], temperature=0.5)
    for given in ({}, {3: 100.0, 5: 1.5}):
        message = pb.GenerateRequest(
            request_id="r", token_ids=pb.TokenIds(ids=[1]), sampling=pb.SamplingParams(seed=1, logit_bias=given)
        )
        resolved = read_request(message, ANY_CALL, model).fit([1], model, 256, None)
        biases = dict(zip(resolved.sampling.logit_bias_token_ids, resolved.sampling.logit_bias_values, strict=True))
        assert biases == {**given, 3: SUPPRESSING_BIAS, 7: SUPPRESSING_BIAS}
        assert list(biases) == sorted(biases)
        encoded = encode_resolved(resolved, 256)
        assert decode_resolved(encoded, ANY_CALL, model).fit([1], model, 256, None) == resolved


def test_what_is_ignored_is_said_once_by_name(tmp_path: Path) -> None:
    inert = {
        "transformers_version": "5.0", "_from_model_config": True, "pad_token_id": 0, "bos_token_id": 1, "num_beams": 1,
        "cache_implementation": "hybrid", "typical_p": 1.0, "no_repeat_ngram_size": 0, "max_length": None,
        "bad_words_ids": [], "use_cache": True, "token_healing": False,
    }  # fmt: skip
    warnings = info_with(tmp_path, **inert, **GENERATION).warnings()
    assert not any("generation_config" in text for text in warnings)
    asking = {"max_new_tokens": 2048, "no_repeat_ngram_size": 3, "forced_bos_token_id": 0, "typical_p": 0.9}
    (found,) = [text for text in info_with(tmp_path, **{**inert, **asking}).warnings() if "generation_config" in text]
    assert found.endswith(
        "generation_config.json: ignored settings, which requests must set themselves: typical_p (0.9), "
        "no_repeat_ngram_size (3), max_new_tokens (2048), forced_bos_token_id (0)"
    )
    many = info_with(tmp_path, **{f"unknown_{i}": "x" * 5000 for i in range(1000)}).warnings()
    assert max(map(len, many)) < 4000


@pytest.mark.parametrize("in_decoder", [True, False])
def test_ends_of_tokenizer_and_configuration_both_stop(tmp_path: Path, in_decoder: bool) -> None:
    write(tmp_path, CONFIG, {"eos_token_id": [2, 4]})
    make_tokenizer(tmp_path / "tokenizer.json")
    end = load_tokenizer(tmp_path / "tokenizer.json").token_to_id("<end>")
    assert end not in (2, 4)
    described: dict[str, object] = {"eos_token": {"content": "<end>"}}
    if in_decoder:
        described["added_tokens_decoder"] = {"9": {"content": "<other>"}, str(end): {"content": "<end>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))
    assert read_model_info(str(tmp_path)).eos_token_ids == tuple(sorted((2, 4, end)))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<none such>"}))
    assert read_model_info(str(tmp_path)).eos_token_ids == (2, 4)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "tekken.json"])
def test_a_directory_without_a_tokenizer_says_what_makes_one(tmp_path: Path, name: str) -> None:
    write(tmp_path, CONFIG, {})
    (tmp_path / name).write_bytes(b"\x0a\x0e")
    (warning,) = read_model_info(str(tmp_path)).warnings()
    assert f"To convert {name}, run: python -c" in warning
    (tmp_path / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 499723\n")
    (warning,) = read_model_info(str(tmp_path)).warnings()
    assert f"{tmp_path / name} is a Git LFS pointer" in warning
    assert "git lfs pull" in warning
