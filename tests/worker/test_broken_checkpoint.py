"""Checkpoints with random content in their files: each is loaded, or refused in one line that names the fault."""

import json
import random

import pytest
import torch

from pagewire.network.checkpoint_files import CheckpointError, read_headers
from pagewire.network.families import parse_config
from pagewire.network.families.reading import MAX_SIZE
from pagewire.network.source import load_config
from testing.checkpoints.families import FAMILIES, make_checkpoint
from tests.broken_json import refusal_of, spoil_safetensors, spoilt, spoilt_bytes
from worker_service.models.loading import prepare_model
from worker_service.models.rope import inverse_frequencies

pytestmark = pytest.mark.thorough

CPU = torch.device("cpu")
# Keys that an error may name instead of the invalid key, because the values only conflict together.
TOGETHER = {
    "hidden_size": {"num_attention_heads", "num_key_value_heads"},
    "num_attention_heads": {"hidden_size", "num_key_value_heads", "head_dim"},
    "n_embd": {"n_head"},
    "n_head": {"n_embd", "hidden_size"},
    "n_heads": {"d_model"},
    "num_hidden_layers": {"layer_types"},
    "max_position_embeddings": {"factor", "original_max_position_embeddings"},
    "rope_parameters": {"rope_type", "has no factor", "full_attention", "a is {}", "rope_theta", "original_max"},
    "rope_theta": {"rope_theta"},
    "original_max_position_embeddings": {"factor"},
    "low_freq_factor": {"high_freq_factor"},
    "architectures": {"architecture", "has no ", "rope_parameters", "partial_rotary_factor", "hidden_act", "rope_type"},
    "alpha": {"rope_type", "rope_theta"},
    "model_type": {"architecture"},
    "type": {"rope_type"},
    "rope_type": {"original_max"},
    "sliding_window": {"layer_types"},
    "use_sliding_window": {"layer_types", "sliding_window"},
    "num_local_experts": {"num_experts"},
    "vocab_size": {"dummy_token_indices"},
}
# Keys that belong to a type of scaling that the family does not support.
TOGETHER |= {
    key: {*TOGETHER.get(key, ()), "rope_type", "long_factor", "short_factor", "original_max"}
    for key in (
        "factor", "rope_theta", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast",
        "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor", "rope_parameters", "rope_scaling",
        "type", "partial_rotary_factor",
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    paths = {family: make_checkpoint(tmp_path_factory.mktemp(family), family, seed=1) for family in FAMILIES}
    return {family: json.loads((path / "config.json").read_text()) for family, path in paths.items()}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("family", FAMILIES)
def test_an_odd_value_is_refused_by_name_or_harmless(configs, family, seed):
    rng = random.Random(f"{family} {seed}")
    num_refused = 0
    for _ in range(100):
        config, keys = spoilt(configs[family], rng)
        text = refusal_of(lambda config=config: parse_config(config), CheckpointError)
        if text is not None:
            num_refused += 1
            assert any(name in text for key in keys for name in {key, *TOGETHER.get(key, ())}), (keys, text)
            continue
        parsed = parse_config(config)
        assert 1 <= parsed.max_position_embeddings <= MAX_SIZE
        if parsed.rope is not None and parsed.heads.head_dim <= 1024:
            assert inverse_frequencies(parsed.rope, parsed.heads.head_dim).isfinite().all(), config
    assert num_refused > 10


@pytest.mark.parametrize("seed", range(60))
def test_a_config_that_is_no_json_is_one_line(configs, tmp_path, seed):
    rng = random.Random(seed)
    (tmp_path / "config.json").write_bytes(spoilt_bytes(configs["llama"], rng))
    text = refusal_of(lambda: load_config(tmp_path), CheckpointError)
    assert text is None or "config.json" in text


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, but must be a whole number from 1"),
        ("gpt2", {"n_layer": 10**9}, "n_layer is 1000000000, but must be a whole number from 1 to 4096"),
        ("llama", {"vocab_size": 2**31}, "vocab_size is 2147483648, but must be a whole number from 1 to 16777216"),
        ("llama", {"max_position_embeddings": 2**40}, "max_position_embeddings is 1099511627776, but must be a whole"),
        ("llama", {"architectures": [{}]}, r"architectures is \[{}\], but must be a list of names, such as Llama"),
        ("llama", {"architectures": "LlamaForCausalLM"}, r'architectures is "LlamaForCausalLM", but must be a list'),
        ("llama", {"tie_word_embeddings": "no"}, 'tie_word_embeddings is "no", but must be true or false'),
        ("llama", {"hidden_size": float("nan")}, "hidden_size is NaN, but must be a whole number"),
        ("llama", {"rope_parameters": [1]}, r"rope_parameters is \[1\], but must be an object"),
        ("llama", {"quantization_config": "awq"}, 'quantization_config is "awq", but must be an object with one of'),
        ("qwen3", {"layer_types": 3}, "layer_types is 3, but must be a list as long as num_hidden_layers, 2"),
    ],
)  # fmt: skip
def test_what_no_model_has_is_named(configs, family, fields, message):
    with pytest.raises(CheckpointError, match=message):
        parse_config({**configs[family], **fields})


def test_head_dim_counts_where_it_is_given(configs):
    config = {**configs["qwen3"], "hidden_size": 66}
    assert parse_config(config).heads.head_dim == 16
    with pytest.raises(CheckpointError, match="hidden_size is 66, but must be a multiple of 4 attention heads"):
        parse_config({**config, "head_dim": None})


@pytest.mark.parametrize("seed", range(40))
def test_a_safetensors_file_that_is_not_whole_is_one_line(tmp_path, seed):
    rng = random.Random(seed)
    path = make_checkpoint(tmp_path, "llama", seed=1)
    spoil_safetensors(path, rng, is_cut=seed % 2 == 1)
    text = refusal_of(lambda: prepare_model(path, dtype=torch.float32, device=CPU), CheckpointError)
    if text is None:
        assert seed % 2 == 0, "a file that is cut off was taken for whole"
    else:
        assert "model.safetensors" in text or "tensor" in text


@pytest.mark.parametrize("weight_map", [[], {"a": 3}, {"a": ["b"]}, {"a": "../b"}, {"a": None}, 7])
def test_an_index_that_names_no_files_is_one_line(tmp_path, weight_map):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        read_headers(tmp_path)


def test_a_wrong_shape_is_told_before_any_weight_is_read(tmp_path, monkeypatch):
    path = make_checkpoint(tmp_path, "llama", seed=1)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": 150}))
    with pytest.raises(CheckpointError, match=r"has shape \[151, 64\], expected \[150, 64\] from config.json"):
        prepare_model(path, dtype=torch.float32, device=CPU)
