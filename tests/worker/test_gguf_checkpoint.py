"""Weights and configuration of GGUF files, compared with the checkpoints that they were written from."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagewire.common.gguf import SUPPORTED_TYPES
from pagewire.network.checkpoint_files import CheckpointError
from pagewire.network.families.gpt_oss import FAMILY as GPT_OSS
from pagewire.network.gguf_files import open_gguf
from pagewire.network.rewrites import with_ropes
from pagewire.network.rope import RopeConfig
from pagewire.network.source import load_config, model_digest, read_headers
from testing.checkpoints.families import make_checkpoint
from testing.checkpoints.gguf_files import dequantized, write_dequantized, write_gguf
from testing.kernels.compiler import skip_without_compiler
from testing.models import load_model
from testing.seeds import seeded
from tests.thorough import thorough
from worker_service.host.cpu_operations import CpuProduct, create_host_operations
from worker_service.models.checkpoint import Checkpoint, Piece
from worker_service.models.gguf_checkpoint import GgufCheckpoint
from worker_service.models.linear import Embedding, Linear
from worker_service.models.loading import prepare_model
from worker_service.models.rope import inverse_frequencies
from worker_service.startup.cpu_kernels import load_cpu_kernels

pytestmark = pytest.mark.one_of_each

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ALL_FAMILIES = (*FAMILIES, "gemma2", "gemma3_text", "phi3", "qwen3_moe", "gpt_oss")
ALL_LAYERS = {"mlp_only_layers": []}  # all layers have experts: files support no other layers
# Sizes with several chunks of rows; some ranks split heads and groups.
WIDE = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
}
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
QUANTIZED = (
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4"),
    *("Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ2_S"),
)
OTHERS = ("IQ1_M", "IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "TQ1_0", "TQ2_0")


def usual(family: str) -> dict[str, Any]:
    """Return settings that files do not contain, because all models of a family share them."""
    if family.startswith("gemma"):
        return {"query_pre_attn_scalar": 16}
    return {"qwen3_moe": ALL_LAYERS, "gpt_oss": {"swiglu_limit": 7.0}}.get(family, {})


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        family: make_checkpoint(folder / family, family, seed=7, **WIDE, **usual(family)) for family in ALL_FAMILIES
    }


def read(source: Checkpoint | GgufCheckpoint, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    target = torch.full(shape, torch.nan)
    source.check(name, Piece(target))
    source.copy(name, Piece(target))
    return target


def shapes(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    return {name: header.shape for name, header in read_headers(checkpoint).items()}


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_weights_have_the_names_and_order_of_the_checkpoint(
    checkpoints: dict[str, Path], family: str, tmp_path: Path
) -> None:
    source = checkpoints[family]
    ours = GgufCheckpoint(write_gguf(tmp_path / "model.gguf", source, "F32"))
    theirs = Checkpoint(source, GPT_OSS.stacks if family == "gpt_oss" else None)
    assert ours.names == theirs.names
    # A file contains 1 + w of Gemma's norms in float32, which is the model's factor.
    added = {name: float(family.startswith("gemma") and name.endswith("norm.weight")) for name in theirs.names}
    for name in theirs.names:
        shape = theirs.header(name).shape
        assert torch.equal(read(ours, name, shape) + added[name], read(theirs, name, shape) + added[name]), name


@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_configuration_is_the_checkpoints(tmp_path: Path, family: str, tied: bool) -> None:
    tied |= family == "gemma2"  # its files contain no head
    source = make_checkpoint(tmp_path / "model", family, seed=3, tie_word_embeddings=tied, **usual(family))
    expected = load_config(source)
    assert load_config(write_gguf(tmp_path / "model.gguf", source, "F32")) == expected


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 256},
    ],
)
def test_scaled_rotations_are_the_checkpoints(tmp_path: Path, rope: dict[str, Any]) -> None:
    source = make_checkpoint(tmp_path / "model", "qwen3", seed=3, rope_parameters=rope)
    expected = load_config(source)
    assert expected.rope is not None
    assert expected.rope.rope_type == rope["rope_type"]
    assert load_config(write_gguf(tmp_path / "model.gguf", source, "F32")) == expected


def test_files_without_a_type_scale_positions_linearly(tmp_path: Path) -> None:
    """As in llama.cpp, "linear" is the default type of scaling, also for the factor's old name."""
    source = make_checkpoint(tmp_path / "model", "llama", seed=3)
    settings = ({"scale_linear": 4.0}, {"scaling.factor": 4.0}, {"scaling.type": "linear", "scaling.factor": 4.0})
    models = []
    for number, keys in enumerate(settings):
        own = {f"llama.rope.{key}": value for key, value in keys.items()}
        models.append(load_config(write_gguf(tmp_path / f"{number}.gguf", source, "F32", settings=own)))
    assert models[0] == models[1] == models[2]
    assert models[0] != load_config(source)


@pytest.mark.parametrize("original", [128, 32])
def test_phi3_has_its_factors_in_tensors(tmp_path: Path, original: int) -> None:
    """The factors for long sequences apply if the model supports such lengths. Only a part of each head is rotated."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": original,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.25, 1.5, 2.0],
        "long_factor": [1.0, 2.5, 7.5, 24.0],
    }
    changes: dict[str, Any] = {"rope_parameters": rope, "max_position_embeddings": 128, "sliding_window": None}
    changes["original_max_position_embeddings"] = original
    source = make_checkpoint(tmp_path / "model", "phi3", seed=3, **changes)
    ours, expected = load_config(write_gguf(tmp_path / "model.gguf", source, "F32")), load_config(source)
    assert ours.rope is not None
    assert expected.rope is not None
    assert ours.rope.divisors == tuple(rope["long_factor" if original < 128 else "short_factor"])
    factor = expected.rope.attention_factor  # a file stores it in float32
    assert ours.rope.attention_factor == pytest.approx(factor, rel=1e-7)
    factors = {"attention_factor": factor, "short_attention_factor": factor}
    exact = with_ropes(ours.operations, lambda of_layer: dataclasses.replace(of_layer, **factors))
    assert dataclasses.replace(ours, operations=exact) == expected


def test_gemma3_scales_the_layers_without_a_window_alone(tmp_path: Path) -> None:
    kinds = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    }
    source = make_checkpoint(
        tmp_path / "model", "gemma3_text", seed=3, rope_parameters=kinds, query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"] * 3, final_logit_softcapping=5.0,
    )  # fmt: skip
    ours = load_config(write_gguf(tmp_path / "model.gguf", source, "F32"))
    assert ours == load_config(source)
    assert [(rope.theta, rope.factor) for rope in ours.ropes if rope] == [(5_000.0, 1.0), (1_000_000.0, 8.0)] * 3
    assert ours.operations[-1].softcap == 5.0


@pytest.mark.parametrize(("architecture", "num_layers"), [("gemma2", 46), ("gemma3_text", 62)])
def test_the_largest_gemma_scales_scores_by_what_a_head_has_of_the_hidden_size(
    tmp_path: Path, architecture: str, num_layers: int
) -> None:
    source = make_checkpoint(
        tmp_path / "model", architecture, seed=3, num_hidden_layers=num_layers, query_pre_attn_scalar=8,
        hidden_size=32, intermediate_size=32, num_key_value_heads=1,
    )  # fmt: skip
    assert load_config(write_gguf(tmp_path / "model.gguf", source, "F32")) == load_config(source)


def test_frequencies_are_divided_by_the_files_own_numbers(tmp_path: Path) -> None:
    """llama.cpp's converter writes Llama 3's scaling as a divisor of each frequency."""
    llama3 = RopeConfig("llama3", 500_000.0, 8.0, 8192, 1.0, 4.0)
    plain = inverse_frequencies(RopeConfig(theta=llama3.theta), 64)
    divisors = (plain.double() / inverse_frequencies(llama3, 64).double()).float()
    source = make_checkpoint(tmp_path / "model", "llama", seed=3, rope_theta=500_000.0, **WIDE)
    path = write_gguf(tmp_path / "model.gguf", source, "F32", replaced={"rope_freqs.weight": (divisors, "F32")})
    config = load_config(path)
    assert config.rope is not None
    assert len(set(config.rope.divisors)) > 3
    torch.testing.assert_close(inverse_frequencies(config.rope, 64), inverse_frequencies(llama3, 64), rtol=3e-7, atol=0)
    assert "rope_freqs.weight" not in GgufCheckpoint(path).names


@pytest.mark.parametrize("type_name", QUANTIZED)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_quantized_weights_are_what_gguf_dequantizes(
    checkpoints: dict[str, Path], family: str, type_name: str, tmp_path: Path
) -> None:
    source = checkpoints[family]
    path = write_gguf(tmp_path / "model.gguf", source, type_name)
    ours, theirs = GgufCheckpoint(path), dequantized(path)
    own_names = {
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
        "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.1.input_layernorm.weight": "blk.1.attn_norm.weight",
    }
    for name, own_name in own_names.items():
        expected = theirs[own_name]
        assert np.array_equal(read(ours, name, expected.shape).numpy().view(np.uint32), expected.view(np.uint32))
    # The rows of the query projection may only differ in their order.
    queries = read(ours, "model.layers.0.self_attn.q_proj.weight", (256, 256)).numpy()
    expected = theirs["blk.0.attn_q.weight"]
    if family == "llama":
        order = [64 * head + 2 * (row % 32) + row // 32 for head in range(4) for row in range(64)]
        expected = expected[order]
    assert np.array_equal(queries.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("type_name", ["F16", "Q4_0", "Q6_K"])
def test_parts_of_a_tensor_are_those_of_the_whole(
    checkpoints: dict[str, Path], type_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = GgufCheckpoint(write_gguf(tmp_path / "model.gguf", checkpoints["llama"], type_name))
    cases = {
        "model.layers.0.self_attn.q_proj.weight": (slice(64, 192),),
        "model.layers.0.self_attn.k_proj.weight": (slice(64, 128),),
        "model.layers.0.self_attn.o_proj.weight": (slice(None), slice(64, 192)),
        "model.layers.0.mlp.gate_proj.weight": (slice(100, 317),),
        "model.layers.0.mlp.down_proj.weight": (slice(None), slice(200, 312)),
    }
    for max_chunk in (1 << 20, 5000, 1):
        monkeypatch.setattr("worker_service.models.gguf_checkpoint._MAX_CHUNK", max_chunk)
        for name, index in cases.items():
            shape = shapes(checkpoints["llama"])[name]
            whole = read(ours, name, shape)
            part = torch.full_like(whole[index], torch.nan)
            ours.copy(name, Piece(part, shape=shape, index=index))
            assert torch.equal(part, whole[index]), (name, max_chunk)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
@pytest.mark.parametrize(("type_name", "dtype"), FLOATS.items())
def test_what_it_computes_in_follows_from_the_weights(
    checkpoints: dict[str, Path], type_name: str, dtype: str, family: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "model.gguf", checkpoints[family], type_name)
    assert load_config(path).dtype == dtype
    assert GgufCheckpoint(path).format("model.layers.0.self_attn.q_proj.weight", 64).element == getattr(torch, dtype)


def test_a_worker_says_what_becomes_of_quantized_weights(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", checkpoints["qwen3"], "Q4_K", types={"attn_v.weight": "Q6_K"})
    assert load_config(path).dtype == "bfloat16"
    unloaded = prepare_model(path, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert unloaded.describe_quantization() == (
        "weights are stored in Q4_K, Q6_K: 0 of 9 linear layers use them directly, other quantised weights are "
        "widened to bfloat16"
    )


def test_the_digest_covers_settings_tokenizer_and_format(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    source = checkpoints["qwen3"]
    tokens = [f"<{token}>" for token in range(151)]
    other = {"model": "gpt2", "pre": "gpt-2", "tokens": [*tokens[:-1], "x"], "merges": [], "token_type": [1] * 151}
    digests = [
        model_digest(write_gguf(tmp_path / "model.gguf", source, "Q8_0")),
        model_digest(write_gguf(tmp_path / "model.gguf", source, "Q4_0")),
        model_digest(write_gguf(tmp_path / "model.gguf", source, "Q8_0", settings={"qwen3.context_length": 77})),
        model_digest(write_gguf(tmp_path / "model.gguf", source, "Q8_0", tokenizer=other)),
    ]
    assert len(set(digests)) == 4
    assert all(len(digest) == 32 for digest in digests)
    assert model_digest(write_gguf(tmp_path / "again.gguf", source, "Q8_0")) == digests[0]


def broken(tmp_path: Path, source: Path, **changes: Any) -> Path:
    return write_gguf(tmp_path / "model.gguf", source, "Q8_0", **changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"replaced": {"blk.1.ffn_up.weight": (torch.ones(512, 128), "F16")}},
            r"tensor blk\.1\.ffn_up\.weight in .*model\.gguf has shape \[512, 128\], expected \[512, 256\]",
        ),
        (
            {"replaced": {"blk.1.ffn_norm.weight": (torch.ones(1, 256), "F16")}},
            r"tensor blk\.1\.ffn_norm\.weight in .*model\.gguf has shape \[1, 256\], expected \[256\]",
        ),
        (
            {"replaced": {"blk.1.ffn_norm.weight": (torch.ones(256), "Q8_0")}},
            r"tensor blk\.1\.ffn_norm\.weight in .*model\.gguf is Q8_0; a one-dimensional tensor must "
            "be F32, F16, BF16",
        ),
        (
            {"replaced": {"blk.0.attn_strange.weight": (torch.ones(4, 32), "F32")}},
            r"tensor blk\.0\.attn_strange\.weight in the checkpoint has no place in Decoder",
        ),
        (
            {"settings": {"qwen3.block_count": 3}},
            r"tensor blk\.2\.attn_norm\.weight is missing in .*model\.gguf; expected shape \[256\]",
        ),
        (
            {"replaced": {"rope_freqs.weight": (torch.ones(16), "F32")}},
            r"model\.gguf: tensor rope_freqs\.weight is F32 of shape \[16\], but must be F32 of shape \[32\]",
        ),
        (
            {"replaced": {"rope_freqs.weight": (torch.tensor([0.0] * 32), "F32")}},
            r"model\.gguf: tensor rope_freqs\.weight has numbers that are not finite or not above 0",
        ),
        (
            {"settings": {"qwen3.attention.head_count_kv": 3}},
            r"model\.gguf: its metadata does not describe a supported model: .*num_key_value_heads is 3",
        ),
        ({"settings": {"qwen3.attention.sliding_window": 9}}, r"qwen3\.attention\.sliding_window is 9, but must be 0"),
        ({"settings": {"qwen3.rope.dimension_count": 32}}, r"qwen3\.rope\.dimension_count is 32, but must be 64"),
        ({"settings": {"qwen3.expert_count": 8}}, r"qwen3\.expert_count is 8, but must be 0: no other value is supp"),
        ({"settings": {"qwen3.context_length": None}}, r"has no qwen3\.context_length, which must be a whole number"),
        ({"settings": {"qwen3.block_count": "two"}}, r"qwen3\.block_count is 'two', but must be a whole number"),
        ({"settings": {"qwen3.rope.scaling.type": "longrope"}}, r"is 'longrope', but must be none, linear or yarn"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(
    checkpoints: dict[str, Path], changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=text):
        load_model(broken(tmp_path, checkpoints["qwen3"], **changes), dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"replaced": {"blk.1.ffn_gate_exps.bias": (torch.ones(4, 128), "F32")}},
            r"tensor blk\.1\.ffn_gate_exps\.bias in .*model\.gguf has shape \[128\], expected \[512\]",
        ),
        (
            {"replaced": {"blk.1.ffn_down_exps.bias": (torch.ones(3, 256), "F32")}},
            r"tensor blk\.1\.ffn_down_exps\.bias is missing in .*model\.gguf; expected shape \[256\]",
        ),
        (
            {"replaced": {"blk.1.ffn_up_exps.bias": (torch.ones(4, 512), "Q8_0")}},
            r"tensor blk\.1\.ffn_up_exps\.bias in .*model\.gguf is Q8_0; a one-dimensional tensor must "
            "be F32, F16, BF16",
        ),
        (
            {"replaced": {"blk.0.attn_sinks.weight": (torch.ones(3), "F32")}},
            r"tensor blk\.0\.attn_sinks\.weight in .*model\.gguf has shape \[3\], expected \[4\]",
        ),
        (
            {"replaced": {"blk.0.ffn_norm.weight": (torch.ones(256), "F32")}},
            r"tensor blk\.0\.ffn_norm\.weight in the checkpoint has no place in Decoder",
        ),
        ({"settings": {"gpt-oss.attention.sliding_window": None}}, r"has no gpt-oss\.attention\.sliding_window, which"),
        (
            {"settings": {"gpt-oss.attention.sliding_window_pattern": [True] * 3}},
            r"gpt-oss\.attention\.sliding_window_pattern is array.*, but must be an array of 2 numbers",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_served_of_gpt_oss_is_refused_by_name(
    checkpoints: dict[str, Path], changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=text):
        load_model(broken(tmp_path, checkpoints["gpt_oss"], **changes), dtype=torch.float32, device=torch.device("cpu"))


def test_a_scale_that_is_no_number_names_tensor_and_file(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = broken(tmp_path, checkpoints["qwen3"])
    offset = GgufCheckpoint(path)._file.tensors["blk.1.ffn_gate.weight"].offset
    with path.open("r+b") as stream:
        stream.seek(offset + 34 * 1000)
        stream.write(b"\x00\x7e")
    with pytest.raises(CheckpointError, match=r"tensor blk\.1\.ffn_gate\.weight in .*model\.gguf has a scale that is"):
        load_model(path, dtype=torch.float32, device=torch.device("cpu"))


def test_mistral_without_a_window_is_llama(tmp_path: Path) -> None:
    """llama.cpp's converter leaves windows out; without its window, Mistral equals Llama."""
    source = make_checkpoint(tmp_path / "model", "mistral", seed=3, sliding_window=None)
    expected = dataclasses.replace(load_config(source), architecture="LlamaForCausalLM")
    assert load_config(write_gguf(tmp_path / "model.gguf", source, "F32")) == expected


def test_biases_of_llama_are_turned_too(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "model", "llama", seed=3, attention_bias=True, mlp_bias=True)
    path = write_gguf(tmp_path / "model.gguf", source, "F32")
    assert json.loads((source / "config.json").read_text())["attention_bias"]
    name = "model.layers.1.self_attn.q_proj.bias"
    assert torch.equal(read(GgufCheckpoint(path), name, (64,)), read(Checkpoint(source), name, (64,)))
    assert load_config(path) == load_config(source)


@pytest.mark.parametrize("seed", range(3))
def test_bytes_that_turned_are_refused_or_read(tmp_path: Path, seed: int) -> None:
    rng = seeded(seed)
    path = write_gguf(tmp_path / "model.gguf", make_checkpoint(tmp_path / "model", "llama", seed=3), "Q8_0")
    whole = path.read_bytes()
    start = min(info.offset for info in open_gguf(path).tensors.values())
    num_refused = 0
    for _ in range(40):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 8))):
            # Settings and tensors' offsets are before and after the tokens; the weights follow.
            at = rng.choice((rng.randrange(1200), start - rng.randrange(1, 1400), rng.randrange(start, len(data))))
            data[at] = rng.choice((0, 255, rng.randrange(256)))
        path.write_bytes(data)
        try:
            unloaded = prepare_model(path, dtype=torch.float32, device=torch.device("cpu"))
            if unloaded.footprint().peak < 64 << 20:
                unloaded.load()
        except (CheckpointError, ValueError):
            num_refused += 1
    assert num_refused > 10


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("type_name", [*QUANTIZED, *thorough(*OTHERS)])
def test_the_kernels_multiply_with_what_a_file_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, type_name: str, tied: bool, num_ranks: int
) -> None:
    """Codes are kept on every rank, also for a tied head and the embedding of a single rank.

    Each weight equals, bit for bit, the weight that PyPI `gguf` reads.
    """
    skip_without_compiler()
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "require")
    family = FAMILIES[[*QUANTIZED, *OTHERS].index(type_name) % 4]
    source = make_checkpoint(tmp_path / "source", family, seed=8, tie_word_embeddings=tied, **WIDE)
    path = write_gguf(tmp_path / "model.gguf", source, type_name, types={"attn_v.weight": "Q6_K"})
    plain = write_dequantized(tmp_path / "plain", path, source)
    operations, cpu = create_host_operations(load_cpu_kernels()), torch.device("cpu")
    for rank in range(num_ranks):
        options = {
            "dtype": torch.float32,
            "device": cpu,
            "operations": operations,
            "communicator": Rank(rank, num_ranks),
        }
        unloaded = prepare_model(path, **options)
        footprint = unloaded.footprint()
        model, expected = unloaded.load(), load_model(plain, **options)
        assert isinstance(model.embedding, Linear) == (num_ranks == 1)
        assert (model.embedding is model.head) == (num_ranks == 1 and tied)
        held = 0
        for (name, ours), (_, theirs) in zip(model.named_modules(), expected.named_modules(), strict=True):
            if isinstance(ours, Linear):
                assert isinstance(ours.product, CpuProduct)
                assert ours.product.packed.format.element == torch.int8
                held += ours.product.packed.panels.nbytes
                # After the last token of the vocabulary, the head's rows are padding.
                num_rows = ours.shape[0]
                rows = torch.arange(151 - rank * num_rows if ours is model.head else num_rows)[:num_rows]
                rows_of = theirs.lookup_rows if isinstance(theirs, Embedding) else theirs.product.lookup_rows
                assert torch.equal(ours.product.lookup_rows(rows), rows_of(rows)), name
            elif isinstance(ours, Embedding):
                assert torch.equal(ours.lookup_rows(torch.arange(151)), theirs.lookup_rows(torch.arange(151)))
        held += sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
        assert footprint.held == pytest.approx(held, rel=0.1)


def test_every_type_may_occur_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Published mixtures choose a type for each tensor. Merged projections of different tables need 8 bits."""
    skip_without_compiler()
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "require")
    source = make_checkpoint(tmp_path / "source", "llama", seed=8, num_hidden_layers=4, **WIDE)
    matrices = [
        f"blk.{layer}.{part}.weight"
        for layer in range(4)
        for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    ]
    all_types = [each.name for each in SUPPORTED_TYPES.values()]
    rng = seeded(21)
    rng.shuffle(all_types)
    types = dict(zip(matrices, itertools.cycle(all_types), strict=False))
    path = write_gguf(tmp_path / "model.gguf", source, "Q8_0", types=types)
    assert {info.type_name for info in open_gguf(path).tensors.values()} == set(all_types)
    plain = write_dequantized(tmp_path / "plain", path, source)
    options = {"dtype": torch.float32, "device": torch.device("cpu")}
    options["operations"] = create_host_operations(load_cpu_kernels())
    unloaded = prepare_model(path, **options)
    held = unloaded.footprint().held
    model, expected = unloaded.load(), load_model(plain, **options)
    for (name, ours), (_, theirs) in zip(model.named_modules(), expected.named_modules(), strict=True):
        if isinstance(ours, Linear) and ours is not model.head:
            rows, rows_of = torch.arange(ours.shape[0]), (theirs if isinstance(theirs, Embedding) else theirs.product)
            assert torch.equal(ours.product.lookup_rows(rows), rows_of.lookup_rows(rows)), name
    packed = sum(ours.product.packed.panels.nbytes for ours in model.modules() if isinstance(ours, Linear))
    packed += sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    assert held == pytest.approx(packed, rel=0.1)


class Rank:
    """One of several ranks, which need not communicate during loading."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def test_a_weight_whose_groups_shares_would_cut_is_widened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight is widened if a shard would split its groups, here the MLP's second weight.

    The worker's log counts the other weights.
    """
    skip_without_compiler()
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "require")
    source = make_checkpoint(tmp_path / "source", "qwen2", seed=8, intermediate_size=96, hidden_size=128)
    path = write_gguf(tmp_path / "model.gguf", source, "Q8_0")
    operations, cpu = create_host_operations(load_cpu_kernels()), torch.device("cpu")
    unloaded = prepare_model(path, dtype=torch.float32, device=cpu, operations=operations, communicator=Rank(1, 2))
    description = unloaded.describe_quantization()
    assert description is not None
    assert "7 of 9 linear layers use them directly" in description
    plain = write_dequantized(tmp_path / "plain", path, source)
    expected = load_model(plain, dtype=torch.float32, device=cpu, operations=operations, communicator=Rank(1, 2))
    model, rows = unloaded.load(), torch.arange(128)
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.down_proj"
        ours, theirs = model.get_submodule(name).product, expected.get_submodule(name).product
        assert ours.packed.format.element == torch.float32
        assert torch.equal(ours.lookup_rows(rows), theirs.lookup_rows(rows))
