"""Models of every supported family in GGUF files, compared with the checkpoints that they were written from."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file

from pagewire.common.gguf import ARCHITECTURES
from pagewire.network.checkpoint_files import CheckpointError
from pagewire.network.source import load_config, weights_digest
from testing.checkpoints.families import make_checkpoint
from testing.checkpoints.gguf_files import ARCHITECTURES as WRITTEN
from testing.checkpoints.gguf_files import requantized, write_gguf
from testing.models import load_model
from testing.worker.model_logits import compute_logits, random_tokens
from tests.thorough import thorough
from worker_service.models.checkpoint import Piece
from worker_service.models.gguf_checkpoint import GgufCheckpoint

ARCH = gguf.MODEL_ARCH
OPTIONS = {"dtype": torch.float32, "device": torch.device("cpu")}
SCALED = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 32.0, "original_max_position_embeddings": 32}
DELTA_NETS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
HEADS_OF_32 = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
# Settings that files do not contain, because all published models share them.
USUAL: dict[str, dict[str, Any]] = {
    "ministral3": {"rope_parameters": {**SCALED, "mscale": 1.0, "mscale_all_dim": 0.8, "llama_4_scaling_beta": 0.3}},
    "starcoder2": {"sliding_window": None},
    "qwen3_moe": {"mlp_only_layers": []},
    "gpt_oss": {"swiglu_limit": 7.0},
    "dots1": {"sliding_window": None},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "lfm2_moe": {"routed_scaling_factor": 1.0},
    "qwen3_5_text": HEADS_OF_32,
    "qwen3_5_moe_text": HEADS_OF_32,
    "qwen3_next": {**HEADS_OF_32, "mlp_only_layers": []},
}
# The families that differ most in their names, in the order of rows and in their settings.
FIRST = ("gpt_neox", "mpt", "glm4_moe", "lfm2", "qwen3_5_text")
OTHERS = (
    *(
        "llama",
        "mistral",
        "ministral3",
        "mixtral",
        "granite",
        "granitemoehybrid",
        "smollm3",
        "arcee",
        "ernie4_5",
        "seed_oss",
    ),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "phi3", "gpt_oss"),
    *("olmo", "olmo2", "olmo3", "olmoe", "exaone4", "glm", "glm4", "dots1", "minimax_m2", "cohere", "cohere2"),
    *("stablelm", "starcoder2", "falcon", "gpt2", "bloom", "lfm2_moe", "qwen3_5_moe_text", "qwen3_next"),
)


def made(folder: Path, family: str, **changes: Any) -> Path:
    return make_checkpoint(folder, family, seed=5, **{**USUAL.get(family, {}), **changes})


def logits(path: Path) -> torch.Tensor:
    return compute_logits(load_model(path, **OPTIONS), random_tokens())


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use torch, which does not round the inputs of quantised weights."""
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "off")


@pytest.mark.parametrize("family", [*FIRST, *thorough(*OTHERS)])
def test_a_file_computes_what_its_checkpoint_computes(tmp_path: Path, family: str) -> None:
    source = made(tmp_path / "source", family)
    path = write_gguf(tmp_path / "model.gguf", source, "F32")
    assert torch.equal(logits(path), logits(source))
    assert load_config(path).dtype == "float32"


@pytest.mark.parametrize("type_name", ["BF16", *thorough("F16")])
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])
def test_states_of_models_in_half_precision(tmp_path: Path, family: str, type_name: str) -> None:
    """Convolutions, decays and norms stay in float32, but do not decide the dtype of the model."""
    dtype = {"BF16": "bfloat16", "F16": "float16"}[type_name]
    source = made(tmp_path / "source", family, dtype=dtype)
    path = write_gguf(tmp_path / "model.gguf", source, type_name)
    assert load_config(path).dtype == dtype
    for computed in (torch.float32, torch.bfloat16):
        ours, usual = (load_model(each, **{**OPTIONS, "dtype": computed}) for each in (path, source))
        assert torch.equal(compute_logits(ours, random_tokens()), compute_logits(usual, random_tokens()))


def test_the_tests_know_every_architecture() -> None:
    """Architectures without a checkpoint of their own are those of models with images, which have the same text
    models."""
    written = {gguf.MODEL_ARCH_NAMES[arch] for arch in WRITTEN.values()}
    assert written | {"qwen2vl", "qwen3vl", "qwen3vlmoe"} == ARCHITECTURES.keys()


@pytest.mark.parametrize(
    ("family", "changes"),
    thorough(
        ("gpt_neox", {"use_parallel_residual": False}),
        ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
        ("glm4_moe", {"use_qk_norm": True, "attention_bias": True, "n_group": 1, "topk_group": 1}),
        ("mpt", {"n_heads": 3, "d_model": 48, "attn_config": {"alibi_bias_max": 4}}),
        ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
        ("olmo3", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
        ("gpt_oss", {"swiglu_limit": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ("seed_oss", {"attention_out_bias": True}),
        ("olmo", {"clip_qkv": None}),
        ("granite", {"num_key_value_heads": 4, "attention_bias": True}),
        ("qwen2_moe", {"shared_expert_intermediate_size": 64}),
        ("falcon", {"bias": True}),
        ("ernie4_5", {"use_bias": True}),
        ("starcoder2", {"use_bias": False}),
        ("lfm2", {"tie_word_embeddings": False, "conv_L_cache": 5}),
        ("lfm2_moe", {"use_expert_bias": False}),
        ("qwen3_5_text", {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "tie_word_embeddings": True}),
        ("qwen3_5_text", {"linear_num_key_heads": 1, "linear_conv_kernel_dim": 2}),
        *((family, {"tie_word_embeddings": True}) for family in ("gpt2", "bloom", "cohere", "llama", "smollm3")),
        *((family, {"tie_word_embeddings": False}) for family in ("gpt2", "mpt", "olmo2", "starcoder2")),
    ),
)
def test_settings_of_a_family_are_kept(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    source = made(tmp_path / "source", family, **changes)
    assert torch.equal(logits(write_gguf(tmp_path / "model.gguf", source, "F32")), logits(source))


@pytest.mark.parametrize(
    "family",
    thorough(
        *("bloom", "gpt_neox", "gpt2", "granite", "qwen2_moe", "glm4_moe", "mixtral"),
        *("lfm2", "lfm2_moe", *DELTA_NETS),
    ),
)
def test_quantised_rows_are_in_the_same_order(tmp_path: Path, family: str) -> None:
    """A quantised file computes the same as a file with the float32 numbers that PyPI `gguf` reads from it."""
    path = write_gguf(tmp_path / "model.gguf", made(tmp_path / "source", family), "Q8_0")
    plain = requantized(path, tmp_path / "plain.gguf", "F32")
    assert torch.equal(logits(path), logits(plain))


@pytest.mark.parametrize("type_name", ["Q4_K", *thorough("Q4_0", "Q6_K", "IQ3_S")])
def test_columns_of_value_heads_are_in_the_same_order(tmp_path: Path, type_name: str) -> None:
    """Blocks of 256 columns in a file contain two value heads that are not neighbours in a checkpoint."""
    sizes = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_value_heads": 4}
    source = made(tmp_path / "source", "qwen3_5_text", **sizes)
    path = write_gguf(tmp_path / "model.gguf", source, "F32", types={"ssm_out.weight": type_name})
    plain = requantized(path, tmp_path / "plain.gguf", "F32")
    checkpoint = GgufCheckpoint(path)
    name, shape = "model.layers.0.linear_attn.out_proj.weight", (64, 512)
    stored = checkpoint.format(name, shape[1])
    whole = checkpoint.quantized(name, Piece(torch.empty(shape)))
    assert stored is not None
    assert whole.group_size == stored.group_size
    assert (whole.scale_factor is not None) == stored.has_factors
    expected = torch.empty(shape)
    GgufCheckpoint(plain).copy(name, Piece(expected))
    assert torch.equal(whole.dequantized(), expected)
    assert torch.equal(logits(path), logits(plain))


def test_any_rows_of_value_heads_can_be_read(tmp_path: Path) -> None:
    source = made(tmp_path / "source", "qwen3_5_text")
    ours = GgufCheckpoint(write_gguf(tmp_path / "model.gguf", source, "F32"))
    tensors = load_file(source / "model.safetensors")
    parts = [f"in_proj_{each}.weight" for each in ("qkv", "z", "a", "b")]
    for part in (*parts, "out_proj.weight", "conv1d.weight", "dt_bias"):
        whole = tensors[f"model.layers.0.linear_attn.{part}"]
        whole = whole.squeeze(1) if part == "conv1d.weight" else whole
        for rows in (slice(None), slice(0, 5), slice(3, 6), slice(31, 97), slice(128, 320)):
            found = torch.full_like(whole[rows], torch.nan)
            ours.copy(f"model.layers.0.linear_attn.{part}", Piece(found, tuple(whole.shape), (rows,)))
            assert torch.equal(found, whole[rows]), (part, rows)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "arch"), [("qwen2", ARCH.QWEN2VL), ("qwen3", ARCH.QWEN3VL), ("qwen3_moe", ARCH.QWEN3VLMOE)]
)
def test_models_with_images_are_served_as_text_models(tmp_path: Path, family: str, arch: gguf.MODEL_ARCH) -> None:
    source = made(tmp_path / "source", family)
    sections = {f"{gguf.MODEL_ARCH_NAMES[arch]}.rope.dimension_sections": [2, 3, 3, 0]}
    path = write_gguf(tmp_path / "model.gguf", source, "F32", arch=arch, settings=sections)
    assert torch.equal(logits(path), logits(source))


@pytest.mark.thorough
def test_a_gate_of_shared_experts_may_be_a_vector(tmp_path: Path) -> None:
    """Older converters wrote the matrix with one row as a vector."""
    source = made(tmp_path / "source", "qwen2_moe")
    plain = write_gguf(tmp_path / "plain.gguf", source, "F32")
    name = "blk.{}.ffn_gate_inp_shexp.weight"
    gates = {tensor.name: tensor.data for tensor in gguf.GGUFReader(plain).tensors}
    replaced = {name.format(at): (torch.from_numpy(gates[name.format(at)].copy())[0], "F32") for at in range(2)}
    path = write_gguf(tmp_path / "model.gguf", source, "F32", replaced=replaced)
    assert torch.equal(logits(path), logits(plain))


def test_a_model_in_parts_computes_the_same(tmp_path: Path) -> None:
    source = made(tmp_path / "source", "gpt_neox")
    first = write_gguf(tmp_path / "model.gguf", source, "F32", tensors_per_part=9)
    assert len(list(tmp_path.glob("model-*.gguf"))) > 2
    assert torch.equal(logits(first), logits(source))
    digest = weights_digest(first)
    last = max(tmp_path.glob("model-*.gguf"))
    last.write_bytes(last.read_bytes()[:-1] + b"x")
    assert weights_digest(first) != digest


def test_layers_for_multi_token_prediction_are_ignored(tmp_path: Path) -> None:
    source = made(tmp_path / "source", "glm4_moe")
    further = {
        "blk.2.attn_q.weight": (torch.ones(64, 64), "F32"),
        "blk.2.nextn.eh_proj.weight": (torch.ones(64, 128), "F32"),
        "blk.2.nextn.shared_head_norm.weight": (torch.ones(64), "F32"),
    }
    path = write_gguf(tmp_path / "model.gguf", source, "F32", replaced=further)
    assert torch.equal(logits(path), logits(source))


@pytest.mark.parametrize("flags", [[True, True, True, False, True, False], None])
def test_layers_of_delta_nets_are_followed_by_layers_for_prediction(tmp_path: Path, flags: list[bool] | None) -> None:
    kinds = ["linear_attention"] * 3 + ["full_attention", "linear_attention"]
    source = made(tmp_path / "source", "qwen3_5_text", num_hidden_layers=5, layer_types=kinds)
    further = {
        "blk.5.attn_q.weight": (torch.ones(64, 64), "F32"),
        "blk.5.nextn.eh_proj.weight": (torch.ones(64), "F32"),
    }
    keys = {"block_count": 6, "nextn_predict_layers": 1, "attention.recurrent_layers": flags}
    settings = {f"qwen35.{key}": value for key, value in keys.items()}
    path = write_gguf(tmp_path / "model.gguf", source, "F32", settings=settings, replaced=further)
    assert torch.equal(logits(path), logits(source))


REFUSED = [
    ("granite", {"granite.rope.scaling.finetuned": False}, r"rope\.scaling\.finetuned is False, but must be True"),
    ("granite", {"granite.attention.head_count_kv": [2, 0]}, r"head_count_kv is array.*, but must be a whole number"),
    ("granite", {"granite.attention.scale": None}, r"has no granite\.attention\.scale, which must be a number"),
    ("falcon", {"falcon.attention.head_count_kv": 4}, r"head_count_kv is 4, but must be 1: no other value is supp"),
    ("olmo", {"olmo.attention.layer_norm_epsilon": 1e-6}, r"layer_norm_epsilon is 1e-06, but must be 1e-05: no othe"),
    ("olmo2", {"olmo2.rope.freq_base_swa": 5.0}, r"rope\.freq_base_swa is 5\.0, but must be 10000\.0, the same as"),
    ("dots1", {"dots1.expert_gating_func": 1}, r"expert_gating_func is 1, but must be 2: no other value is supported"),
    ("glm4_moe", {"glm4moe.nextn_predict_layers": 3}, r"nextn_predict_layers is 3, but must be less than the 3 layer"),
    (
        "glm4",
        {"glm4.rope.dimension_sections": [8, 12, 12, 0]},
        r"rope\.dimension_sections is array.*, but must be 'unset'",
    ),
    ("mpt", {"mpt.attention.max_alibi_bias": 7.5}, r"max_alibi_bias is 7\.5, but must be a whole number"),
    ("mpt", {"mpt.feed_forward_length": 255}, r"feed_forward_length is 255, but must be a multiple of embedding_len"),
    ("llama", {"llama.attention.temperature_scale": 0.1}, r"temperature_scale is 0\.1, but must be 0\.0: no other"),
    ("olmo3", {"olmo2.attention.sliding_window_pattern": [True]}, r"but must be an array of 4 numbers"),
    ("olmo3", {"olmo2.block_count": 5000}, r"block_count is 5000, but must be at most 4096"),
    (
        "qwen3_5_text",
        {"qwen35.ssm.inner_size": 100},
        r"ssm\.inner_size is 100, but must be 384, the product of ssm\.sta",
    ),
    ("qwen3_5_text", {"qwen35.full_attention_interval": 0}, r"full_attention_interval is 0, but must be a whole numbe"),
    ("qwen3_5_text", {"qwen35.ssm.state_size": None}, r"has no qwen35\.ssm\.state_size, which must be a whole number"),
    (
        "qwen3_5_text",
        {"qwen35.attention.recurrent_layers": [True]},
        r"recurrent_layers is array.*, but must be an arra",
    ),
    ("lfm2", {"lfm2.attention.head_count_kv": [0, 2, 0, 4]}, r"head_count_kv is array.*, but must be a whole number"),
    ("lfm2", {"lfm2.attention.head_count_kv": 2}, r"head_count_kv is 2, but must be an array of 4 numbers"),
    ("lfm2", {"lfm2.attention.sliding_window": 8}, r"sliding_window is 8, but must be 0: no other value is supported"),
    ("lfm2", {"lfm2.attention.causal": False}, r"attention\.causal is False, but must be True: no other value is"),
    (
        "lfm2_moe",
        {"lfm2moe.expert_weights_scale": 1.5},
        r"expert_weights_scale is 1\.5, but must be 1\.0: no other value",
    ),
    ("lfm2_moe", {"lfm2moe.expert_gating_func": 1}, r"expert_gating_func is 1, but must be 2: no other value is supp"),
    ("starcoder2", {"starcoder2.attention.sliding_window": 8}, r"sliding_window is 8, but must be 0: no other"),
]


@pytest.mark.parametrize(("family", "settings", "text"), thorough(*REFUSED))
def test_what_cannot_be_served_of_a_family_is_refused_by_name(
    tmp_path: Path, family: str, settings: dict[str, Any], text: str
) -> None:
    path = write_gguf(tmp_path / "model.gguf", made(tmp_path / "source", family), "F32", settings=settings)
    with pytest.raises(CheckpointError, match=text):
        load_config(path)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("period", "windows"), [(2, [20, 0, 20, 0]), (1, [0] * 4), (0, [20] * 4), (None, [20, 20, 20, 0])]
)
def test_windows_may_have_a_period(tmp_path: Path, period: int | None, windows: list[int]) -> None:
    source = made(tmp_path / "source", "olmo3")
    path = write_gguf(
        tmp_path / "model.gguf", source, "F32", settings={"olmo2.attention.sliding_window_pattern": period}
    )
    assert [heads.window for heads in load_config(path).layers] == windows
    assert json.loads((source / "config.json").read_text())["sliding_window"] == 20
