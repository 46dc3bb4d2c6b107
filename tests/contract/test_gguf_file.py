"""The headers of GGUF files, valid and damaged."""

import math
import struct
import tracemalloc
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pagewire.common.gguf import (
    ARCHITECTURES,
    GgufError,
    GgufFile,
    TensorInfo,
    config_json,
    generation_config_json,
    is_gguf,
    model_file,
    tokenizer_config_json,
)
from pagewire.common.gguf import file as gguf_file
from scheduler_service.serving.checkpoint.tokenizer import load_tokenizer
from testing.checkpoints.gguf_files import write_gguf
from testing.seeds import seeded

BUNDLED = Path(__file__).parents[2] / "models" / "storyteller"


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "storyteller.gguf", BUNDLED, "Q8_0")


def written(path: Path, **values: Any) -> Path:
    """Write a GGUF file with one tensor and the given metadata keys, in which "__" stands for "."."""
    writer = gguf.GGUFWriter(path, "qwen3")
    for key, (add, *arguments) in values.items():
        getattr(writer, f"add_{add}")(key.replace("__", "."), *arguments)
    writer.add_tensor("x.weight", np.zeros((3, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refusal_of(path: Path) -> str | None:
    """Return the reason why the services refuse a file, or None. Everything except the weights is read."""
    try:
        file = GgufFile.open(path)
        file.check_tensors()
        config_json(file), generation_config_json(file), tokenizer_config_json(file)
        load_tokenizer(path)
    except ValueError as error:
        return str(error)
    return None


def test_metadata_and_tensors_are_those_that_gguf_reads(bundled: Path) -> None:
    ours, theirs = GgufFile.open(bundled), gguf.GGUFReader(bundled)
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            value = ours.metadata[name]
            expected = field.contents()
            if isinstance(expected, float):
                assert np.float32(value) == np.float32(expected)
            else:
                assert (list(value) if isinstance(expected, list) else value) == expected, name
    assert len(ours.metadata) == len(theirs.fields) - 3
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        shape = tuple(int(size) for size in reversed(tensor.shape))
        assert (info.shape, info.type_name, info.offset) == (shape, tensor.tensor_type.name, tensor.data_offset)
        assert math.prod(info.shape[:-1]) * ours.row_bytes(tensor.name) == tensor.n_bytes
    assert len(ours.tensors) == len(theirs.tensors)


def test_numbers_of_every_type(tmp_path: Path) -> None:
    numbers = {
        "uint8": 255, "int8": -128, "uint16": 65535, "int16": -32768, "uint32": 2**32 - 1, "int32": -(2**31),
        "uint64": 2**64 - 1, "int64": -(2**63), "float32": 0.1, "float64": 0.1, "bool": True, "string": "héllo",
    }  # fmt: skip
    path = written(tmp_path / "x.gguf", **{f"k__{kind}": (kind, value) for kind, value in numbers.items()})
    metadata = GgufFile.open(path).metadata
    assert {key: metadata[f"k.{key}"] for key in numbers} == numbers


@pytest.mark.parametrize("seed", range(3))
def test_float32_is_the_shortest_number_that_names_it(tmp_path: Path, seed: int) -> None:
    rng = seeded(seed)
    drawn = [struct.unpack("<f", rng.randbytes(4))[0] for _ in range(200)]
    drawn = [number for number in drawn if math.isfinite(number)]
    path = written(tmp_path / "x.gguf", **{f"k__{index}": ("float32", value) for index, value in enumerate(drawn)})
    metadata = GgufFile.open(path).metadata
    for index, value in enumerate(drawn):
        assert struct.pack("<f", metadata[f"k.{index}"]) == struct.pack("<f", value)
    assert GgufFile.open(written(tmp_path / "y.gguf", k=("float32", 1e-6))).metadata["k"] == 1e-6


def patched(path: Path, at: int, content: bytes) -> Path:
    data = path.read_bytes()
    path.write_bytes(data[:at] + content + data[at + len(content) :])
    return path


@pytest.mark.parametrize(
    ("at", "content", "text"),
    [
        (0, b"GGML", r"x\.gguf is not a GGUF file: it begins with b'GGML', not with b'GGUF'"),
        (4, struct.pack("<I", 1), r"x\.gguf is a GGUF file of version 1; supported are versions 2 and 3, little"),
        (4, struct.pack("<I", 4), r"of version 4; supported are versions 2 and 3"),
        (4, struct.pack(">I", 3), r"in big-endian byte order; supported are versions 2 and 3"),
        (8, struct.pack("<Q", 2**60), r"x\.gguf is not a complete GGUF file: it has \d+ bytes, but its header req"),
        (16, struct.pack("<Q", 2**64 - 1), r"not a complete GGUF file: it has \d+ bytes, but its header requires"),
        (24, struct.pack("<Q", 2**63), r"not a complete GGUF file: it has \d+ bytes, but its header requires"),
    ],
)  # fmt: skip
def test_a_broken_beginning_is_named(tmp_path: Path, at: int, content: bytes, text: str) -> None:
    path = patched(written(tmp_path / "x.gguf"), at, content)
    with pytest.raises(GgufError, match=text):
        GgufFile.open(path)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"split__count": ("uint16", 2)}, r"x\.gguf has no split\.no, which must be a whole number from 0"),
        (
            {"split__count": ("uint16", 2), "split__no": ("uint16", 0)},
            r"x\.gguf is one of 2 parts of a model, but its name is not like -00001-of-00003\.gguf",
        ),
        ({"general__type": ("string", "adapter")}, r"x\.gguf contains no model: general\.type is 'adapter'"),
        ({"general__alignment": ("uint32", 48)}, r"general\.alignment is 48, not a power of two"),
        ({"general__alignment": ("uint32", 0)}, r"general\.alignment is 0, not a power of two"),
        ({"general__alignment": ("uint32", 1 << 31)}, r"general\.alignment is 2147483648, not a power of two"),
        ({"deep": ("array", [[1, 2], [3]])}, r"'deep' is an array of type 9, which is not supported"),
    ],
)
def test_what_is_no_whole_model_is_refused(tmp_path: Path, values: dict[str, Any], text: str) -> None:
    with pytest.raises(GgufError, match=text):
        GgufFile.open(written(tmp_path / "x.gguf", **values))


@pytest.mark.parametrize(
    "values",
    [
        {"split__count": ("uint16", 0)},
        {"split__count": ("uint16", 1)},
        {"general__type": ("string", "model")},
        {"general__alignment": ("uint32", 1)},
    ],
)
def test_what_says_that_it_is_a_whole_model_is_read(tmp_path: Path, values: dict[str, Any]) -> None:
    GgufFile.open(written(tmp_path / "x.gguf", **values))


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A model in several files."""
    first = write_gguf(tmp_path / "m.gguf", BUNDLED, "Q8_0", tensors_per_part=15)
    found = sorted(tmp_path.glob("m-*.gguf"))
    assert found[0] == first
    assert len(found) > 2
    return found


def test_parts_are_read_as_one_file(parts: list[Path], bundled: Path) -> None:
    ours, whole = GgufFile.open(parts[0]), GgufFile.open(bundled)
    ours.check_tensors()
    assert ours.paths == tuple(parts)
    assert {name: info.shape for name, info in ours.tensors.items()} == {
        name: info.shape for name, info in whole.tensors.items()
    }
    assert config_json(ours) == config_json(whole)
    load_tokenizer(parts[0])
    for number, part in enumerate(parts):
        theirs = {tensor.name: tensor.data_offset for tensor in gguf.GGUFReader(part).tensors}
        assert {name: info.offset for name, info in ours.tensors.items() if info.part == number} == theirs


def test_the_digest_covers_all_parts(parts: list[Path]) -> None:
    digest = GgufFile.open(parts[0]).digest
    data = parts[2].read_bytes()
    parts[2].write_bytes(data.replace(b"ffn_", b"ffm_", 1))
    assert GgufFile.open(parts[0]).digest != digest


def number_of(part: Path, key: str) -> int:
    """Return the position of the value of a key of 16 or 32 bits."""
    data = part.read_bytes()
    return data.index(key.encode()) + len(key) + 4


def test_parts_that_do_not_fit_are_named(parts: list[Path]) -> None:
    first, second, *_ = parts
    names = f"m-0000[12]-of-0000{len(parts)}"
    with pytest.raises(
        GgufError, match=rf"{names}\.gguf is part 2 of {len(parts)} of a model: give the first part, m-00001"
    ):
        GgufFile.open(second)
    kept = second.read_bytes()
    patched(second, number_of(second, "split.no"), struct.pack("<H", 2))
    with pytest.raises(GgufError, match=rf"{names}\.gguf: split\.no is 2, but must be 1, to be a part of m-00001-of-"):
        GgufFile.open(first)
    second.write_bytes(kept)
    patched(second, number_of(second, "split.count"), struct.pack("<H", 9))
    with pytest.raises(GgufError, match=rf"{names}\.gguf: split\.count is 9, but must be {len(parts)}, to be a part"):
        GgufFile.open(first)
    third = parts[2].read_bytes()
    second.write_bytes(third)
    patched(second, number_of(second, "split.no"), struct.pack("<H", 1))
    with pytest.raises(GgufError, match=r"m-00003-of-0000\d\.gguf has tensor '\S+', which is in another part of the"):
        GgufFile.open(first)
    second.write_bytes(kept[:-100])
    with pytest.raises(GgufError, match=rf"{names}\.gguf has \d+ bytes, but tensor \S+ ends at byte \d+: the file may"):
        GgufFile.open(first).check_tensors()
    second.unlink()
    with pytest.raises(GgufError, match=rf"{names}\.gguf cannot be read: No such file or directory"):
        GgufFile.open(first)
    second.write_bytes(kept)
    patched(first, number_of(first, "split.tensors.count"), struct.pack("<i", 7))
    with pytest.raises(GgufError, match=r"split\.tensors\.count is 7, but must be \d+, the number of tensors in all"):
        GgufFile.open(first)


# The metadata of every file, and the config.json that results from it alone.
REQUIRED = {
    "embedding_length": 64, "attention.head_count": 4, "feed_forward_length": 128, "block_count": 2,
    "context_length": 256, "attention.layer_norm_rms_epsilon": 1e-6,
}  # fmt: skip
PLAIN = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False,
    "tie_word_embeddings": True, "dtype": "float32", "rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e4},
    "eos_token_id": [],
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16}
GEMMA3 = GEMMA | {
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "rope_local_base_freq": 1e4,
}  # fmt: skip
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
DELTA_NET = {
    "ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.group_count": 2, "ssm.time_step_rank": 6, "ssm.inner_size": 48,
}  # fmt: skip
DELTA_NET_SETTINGS = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "layer_types": ["linear_attention"] * 2, "num_nextn_predict_layers": 0,
    "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0},
}  # fmt: skip
LFM2 = {"shortconv.l_cache": 3, "attention.head_count_kv": array("i", [0, 4])}
LFM2_SETTINGS = {
    "conv_L_cache": 3, "conv_bias": False, "layer_types": ["conv", FULL], "norm_eps": 1e-6, "use_expert_bias": False,
    "num_dense_layers": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "keys", "told"),
    [
        ("llama", {}, {}),
        ("llama", {"attention.sliding_window": 8}, {"architectures": ["MistralForCausalLM"], "sliding_window": 8}),
        ("qwen2", {}, {}),
        ("qwen3", {}, {}),
        (
            "qwen3moe",
            EXPERTS,
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
        ),
        (
            "gemma2",
            {"attention.key_length": 16},
            GEMMA
            | {"sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
            | {"layer_types": [SLIDING, FULL]},
        ),
        ("gemma3", {"attention.key_length": 16}, GEMMA3 | {"sliding_window": None, "layer_types": [FULL] * 2}),
        (
            "gemma3",
            {"attention.key_length": 16, "attention.sliding_window": 8},
            GEMMA3 | {"sliding_window": 8, "layer_types": [SLIDING] * 2},
        ),
        ("phi3", {}, {"sliding_window": None, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}}),
        (
            "gpt-oss",
            EXPERTS | {"attention.sliding_window": 8},
            {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "sliding_window": 8}
            | {"layer_types": [SLIDING, FULL]},
        ),
        (
            "llama",
            EXPERTS,
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
        ),
        (
            "granite",
            {"attention.scale": 0.5, "logit_scale": 8.0},
            {"attention_multiplier": 0.5, "logits_scaling": 8.0}
            | dict.fromkeys(("embedding_multiplier", "residual_multiplier")),
        ),
        ("olmo2", {}, {"sliding_window": None, "layer_types": [FULL] * 2}),
        (
            "olmo2",
            {"attention.sliding_window": 8},
            {"architectures": ["Olmo3ForCausalLM"], "sliding_window": 8, "layer_types": [SLIDING] * 2},
        ),
        (
            "glm4moe",
            EXPERTS | {"expert_shared_count": 1},
            {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
            | dict.fromkeys(("routed_scaling_factor", "n_group", "topk_group"))
            | {"norm_topk_prob": False, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0, "use_qk_norm": False}
            | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}},
        ),
        ("qwen35", DELTA_NET, DELTA_NET_SETTINGS),
        (
            "qwen35",
            DELTA_NET | {"full_attention_interval": 2, "block_count": 3, "nextn_predict_layers": 1},
            DELTA_NET_SETTINGS | {"num_nextn_predict_layers": 1, "layer_types": ["linear_attention", FULL]},
        ),
        (
            "qwen3next",
            DELTA_NET | EXPERTS | {"expert_shared_feed_forward_length": 64},
            DELTA_NET_SETTINGS
            | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
            | {"shared_expert_intermediate_size": 64},
        ),
        ("lfm2", LFM2, LFM2_SETTINGS | {"block_auto_adjust_ff_dim": False}),
        (
            "lfm2moe",
            LFM2 | EXPERTS | {"expert_gating_func": 2},
            LFM2_SETTINGS
            | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
        ),
    ],
)
def test_what_a_file_leaves_out_is_as_in_llama_cpp(architecture: str, keys: Any, told: dict[str, Any]) -> None:
    metadata = {f"{architecture}.{key}": value for key, value in (REQUIRED | keys).items()}
    metadata |= {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b"],
    }
    tensors = {"token_embd.weight": TensorInfo((2, 64), 0, 0)}
    named = {"architectures": [ARCHITECTURES[architecture].in_config], "model_type": architecture}
    assert config_json(GgufFile(Path("x.gguf"), metadata, tensors, b"")) == PLAIN | named | told


def test_a_type_that_is_not_supported_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "qwen3")
    writer.add_tensor("blk.0.x.weight", np.zeros((3, 292), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    text = r"x\.gguf: tensor blk\.0\.x\.weight is of type Q8_K, which is not supported; docs/models\.md lists"
    with pytest.raises(GgufError, match=text):
        GgufFile.open(tmp_path / "x.gguf").check_tensors()


def test_a_file_cut_short_names_the_tensor(bundled: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(bundled.read_bytes()[:-5000])
    with pytest.raises(GgufError, match=r"cut\.gguf has \d+ bytes, but tensor \S+ ends at byte \d+: the file may be"):
        GgufFile.open(path).check_tensors()


def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole.gguf", names=("array", ["a", "", "three"])).read_bytes()
    path = tmp_path / "x.gguf"
    for num_bytes in range(len(whole)):
        path.write_bytes(whole[:num_bytes])
        with pytest.raises(GgufError, match=r"x\.gguf (is not a (complete )?GGUF file|has \d+ bytes, but tensor)"):
            GgufFile.open(path).check_tensors()
    end = whole.index(b"three") + len(b"three")
    path.write_bytes(whole[: end - 1])
    with pytest.raises(GgufError, match=rf"it has {end - 1} bytes, but its header requires {end} or more"):
        GgufFile.open(path)


def test_rows_that_blocks_do_not_divide_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "x.gguf")
    data = path.read_bytes()
    at = data.index(b"x.weight") + len(b"x.weight") + 4  # its dimensions, the contiguous one first
    patched(path, at, struct.pack("<QQI", 33, 3, 8))
    with pytest.raises(GgufError, match=r"tensor x\.weight is Q8_0 with rows of 33 elements, but blocks of this type"):
        GgufFile.open(path).check_tensors()


@pytest.mark.parametrize("shown", [gguf_file.shown, model_file.shown])
def test_a_value_of_a_hundred_characters_is_shown_whole(shown: Callable[[object], str]) -> None:
    text = "x" * 98  # without the quotes
    assert shown(text)[1:-1] == text
    assert shown(text + "y")[1:] == f"{text}y..."


def test_what_is_a_gguf_file(bundled: Path, tmp_path: Path) -> None:
    blob = tmp_path / "sha256-0123"  # the names of files in download caches
    blob.symlink_to(bundled)
    (tmp_path / "x.gguf").mkdir()
    (tmp_path / "empty.gguf").touch()
    assert is_gguf(bundled)
    assert is_gguf(blob)
    assert is_gguf(tmp_path / "empty.gguf")
    assert not is_gguf(tmp_path / "x.gguf")
    assert not is_gguf(BUNDLED / "config.json")
    assert not is_gguf(tmp_path / "nothing")


@pytest.mark.parametrize("seed", range(4))
def test_no_broken_file_is_more_than_an_error(bundled: Path, tmp_path: Path, seed: int) -> None:
    """A file that is truncated or has changed header bytes is read or refused, with little memory."""
    rng = seeded(seed)
    whole = bundled.read_bytes()
    header_bytes = min(info.offset for info in GgufFile.open(bundled).tensors.values())
    path = tmp_path / "model.gguf"
    num_refused = 0
    tracemalloc.start()
    for case in range(60):
        data = bytearray(whole)
        if case % 3 == 0:
            del data[rng.randrange(len(data)) if case % 2 else rng.randrange(header_bytes) :]
        for _ in range(rng.choice((1, 4, 30)) if case % 3 else 0):
            # Change half of the bytes among the numbers at the beginning, which precede the tokens.
            at = rng.randrange(1200 if rng.random() < 0.5 else header_bytes)
            data[min(at, len(data) - 1)] = rng.choice((0, 255, rng.randrange(256)))
        path.write_bytes(data)
        del data
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        refusal = refusal_of(path)
        if refusal is not None:
            num_refused += 1
            assert str(path) in refusal
            assert "\n" not in refusal
        assert tracemalloc.get_traced_memory()[1] - before < 20 << 20
    tracemalloc.stop()
    assert num_refused > 20
