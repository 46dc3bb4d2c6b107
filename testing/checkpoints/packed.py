"""Quantised weights and checkpoints made of random codes, together with the weights that the codes represent.

AWQ, GPTQ and W8A8 are packed here number by number, FP8 uses torch's conversion, and transformers decodes MXFP4.
`quantized` in this folder has further formats, which need a package that is not installed on every machine.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from testing.checkpoints.families import make_checkpoint

E4M3 = torch.float8_e4m3fn
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A quantised format: its `quantization_config`, and a function `draw`. For a random weight [out, in], `draw`
    returns the stored tensors and the weight in float32."""

    name: str
    section: dict[str, Any]
    draw: Callable[[torch.Generator, int, int], tuple[Tensors, torch.Tensor]]


def random_scales(generator: torch.Generator, shape: tuple[int, ...], levels: int, in_size: int) -> torch.Tensor:
    """Return float32 scales for codes with `levels` levels. The weights then have about the size of
    `make_checkpoint`'s."""
    return (0.5 + torch.rand(shape, generator=generator)) * 5 / levels * in_size**-0.5


# GPTQ and AWQ


def pack(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Pack numbers [rows, columns] in 32-bit words [rows, columns * bits / 32]. The first number is in the lowest
    bits."""
    per_word = 32 // bits
    words = np.zeros((numbers.shape[0], numbers.shape[1] // per_word), dtype=np.uint32)
    for position in range(per_word):
        words |= numbers[:, position::per_word].astype(np.uint32) << np.uint32(bits * position)
    return words.view(np.int32)


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_awq(numbers: np.ndarray) -> np.ndarray:
    """Pack 4-bit numbers in AWQ's column order."""
    reordered = np.empty_like(numbers)
    for column in range(numbers.shape[1]):
        reordered[:, column] = numbers[:, column - column % 8 + AWQ_ORDER[column % 8]]
    return pack(reordered, 4)


def meaning(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, groups: np.ndarray) -> torch.Tensor:
    """Return (code - zero) * scale in float32 as [out, in], for codes [in, out], and zeros and scales [groups, out].
    `groups` is the group of each input."""
    differences = (codes.astype(np.int64) - zeros.astype(np.int64)[groups]).astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray((differences * scales.astype(np.float32)[groups]).T))


def draw_codes(
    generator: torch.Generator, out_size: int, in_size: int, num_groups: int, bits: int
) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    """Return random codes [in, out], zero points [groups, out], and float16 scales [groups, out]."""
    codes = torch.randint(0, 2**bits, (in_size, out_size), generator=generator).numpy()
    middle = 2 ** (bits - 1)
    zeros = torch.randint(middle // 2, middle + middle // 2, (num_groups, out_size), generator=generator).numpy()
    zeros[0, :2] = (0, 2**bits - 1)
    return codes, zeros, random_scales(generator, (num_groups, out_size), 2**bits, in_size).half()


def gptq(
    name: str, bits: int, group_size: int, *, version: str, sym: bool, g_idx: str, desc_act: bool = False, **more: Any
) -> Case:
    """Return a GPTQ case. `g_idx` is "none", "in order", "shuffled" or "zeros", which some tools write if the columns
    are in order. The version "gptq, unchanged" is "gptq" by its label, but has the zero points of "gptq_v2"."""
    label, _, unchanged = version.partition(", ")
    section = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": sym,
        "desc_act": desc_act,
        "checkpoint_format": label,
        **more,
    }

    def draw(generator: torch.Generator, out_size: int, in_size: int) -> tuple[Tensors, torch.Tensor]:
        columns = in_size if group_size == -1 else group_size
        codes, zeros, scales = draw_codes(generator, out_size, in_size, in_size // columns, bits)
        if sym:
            zeros[:] = 2 ** (bits - 1)
        groups = np.arange(in_size) // columns
        if g_idx == "shuffled":
            groups = groups[torch.randperm(in_size, generator=generator).numpy()]
        stored_zeros = (zeros - 1) % 2**bits if label == "gptq" and not unchanged else zeros
        tensors = {
            "qweight": torch.from_numpy(np.ascontiguousarray(pack(codes.T, bits).T)),
            "qzeros": torch.from_numpy(pack(stored_zeros, bits)),
            "scales": scales,
        }
        if g_idx != "none":
            stored_groups = np.zeros_like(groups) if g_idx == "zeros" else groups
            tensors["g_idx"] = torch.from_numpy(stored_groups.astype(np.int32))
        return tensors, meaning(codes, zeros, scales.numpy(), groups)

    return Case(name, section, draw)


def awq(name: str, group_size: int, **more: Any) -> Case:
    section = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "version": "gemm",
        **more,
    }

    def draw(generator: torch.Generator, out_size: int, in_size: int) -> tuple[Tensors, torch.Tensor]:
        columns = in_size if group_size == -1 else group_size
        codes, zeros, scales = draw_codes(generator, out_size, in_size, in_size // columns, 4)
        tensors = {
            "qweight": torch.from_numpy(pack_awq(codes)),
            "qzeros": torch.from_numpy(pack_awq(zeros)),
            "scales": scales,
        }
        return tensors, meaning(codes, zeros, scales.numpy(), np.arange(in_size) // columns)

    return Case(name, section, draw)


# 8-bit weights and 8-bit activations


def w8a8(name: str) -> Case:
    """Return a compressed-tensors case with one scale per output, for inputs that are rounded dynamically."""
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    section = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": ["lm_head"],
    }

    def draw(generator: torch.Generator, out_size: int, in_size: int) -> tuple[Tensors, torch.Tensor]:
        codes = torch.randint(-128, 128, (out_size, in_size), generator=generator, dtype=torch.int8)
        scale = random_scales(generator, (out_size, 1), 256, in_size)
        return {"weight": codes, "weight_scale": scale}, codes.float() * scale

    return Case(name, section, draw)


def fp8(
    name: str,
    block: tuple[int, int] | None,
    scale_kind: str = "weight_scale_inv",
    scale_dtype: torch.dtype = torch.float32,
    **more: Any,
) -> Case:
    section = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": block and list(block),
        **more,
    }

    def draw(generator: torch.Generator, out_size: int, in_size: int) -> tuple[Tensors, torch.Tensor]:
        rows, columns = block or (out_size, in_size)
        shape = (-(-out_size // rows), -(-in_size // columns))
        values = (100 * torch.randn(out_size, in_size, generator=generator)).clamp(-448, 448).to(E4M3)
        scale = random_scales(generator, shape, 400, in_size).to(scale_dtype)
        weight = torch.empty(out_size, in_size)
        for i, j in np.ndindex(shape):
            place = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            weight[place] = values[place].to(torch.float32) * scale[i, j].to(torch.float32)
        return {"weight": values, scale_kind: scale if block else scale.reshape(())}, weight

    return Case(name, section, draw)


def compressed_in_order(name: str, zero_dtype: torch.dtype) -> Case:
    """Return a case in the format of early versions of compressed-tensors: columns in activation order, and zero points
    packed or not. Current versions read neither."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": False}
    section = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**weights, "actorder": "group"}}},
        "ignore": ["lm_head"],
    }

    def draw(generator: torch.Generator, out_size: int, in_size: int) -> tuple[Tensors, torch.Tensor]:
        codes, zeros, scales = draw_codes(generator, out_size, in_size, in_size // 16, 4)
        groups = (np.arange(in_size) // 16)[torch.randperm(in_size, generator=generator).numpy()]
        signed_zeros = torch.from_numpy(np.ascontiguousarray(zeros.T)).to(torch.int8) - 8
        packed_zeros = torch.from_numpy(np.ascontiguousarray(pack(zeros, 4).T))
        tensors = {
            "weight_packed": torch.from_numpy(pack(codes.T, 4)),
            "weight_scale": scales.t().contiguous(),
            "weight_zero_point": signed_zeros if zero_dtype == torch.int8 else packed_zeros,
            "weight_shape": torch.tensor([out_size, in_size]),
            "weight_g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        return tensors, meaning(codes, zeros, scales.numpy(), groups)

    return Case(name, section, draw)


def mxfp4(name: str) -> Case:
    section = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}

    def draw(generator: torch.Generator, out_size: int, in_size: int) -> tuple[Tensors, torch.Tensor]:
        blocks = torch.randint(0, 256, (out_size, in_size // 32, 16), generator=generator, dtype=torch.uint8)
        common = 127 + round(math.log2(0.35 * in_size**-0.5))  # keeps weights about as large as in other formats
        exponents = common + torch.randint(-1, 2, blocks.shape[:2], generator=generator)
        blocks[0, 0], exponents[0, 0] = 0, 0  # as written for groups of zeros
        scales = exponents.to(torch.uint8)
        meant = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].t().contiguous()
        return {"blocks": blocks, "scales": scales}, meant

    return Case(name, section, draw)


# ModelOpt, with the formula of its `NVFP4QTensor.dequantize`


E2M1 = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))


def e2m1_numbers(packed: torch.Tensor) -> torch.Tensor:
    """Return the 4-bit floats in bytes [rows, bytes], the lower half of each byte first, as [rows, 2 * bytes]."""
    halves = torch.stack((packed & 15, packed >> 4), dim=2).flatten(1).long()
    return E2M1[halves & 7] * (1 - 2 * (halves >> 3)).float()


def draw_nvfp4(generator: torch.Generator, out_size: int, in_size: int) -> tuple[Tensors, torch.Tensor]:
    packed = torch.randint(0, 256, (out_size, in_size // 2), generator=generator, dtype=torch.uint8)
    scale = random_scales(generator, (out_size, in_size // 16), 10, in_size)
    scale_2 = scale.max() / 400
    scale = (scale / scale_2).to(E4M3)
    scales = (scale.float() * scale_2).repeat_interleave(16, dim=1)
    return {"weight": packed, "weight_scale": scale, "weight_scale_2": scale_2}, e2m1_numbers(packed) * scales


def modelopt(name: str, algorithm: str, **more: Any) -> Case:
    """Return a ModelOpt case. Each format is stored as another tool stores it, except NVFP4."""
    section = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **more}
    if algorithm.endswith("NVFP4"):
        return Case(name, section, draw_nvfp4)
    blocks = {"FP8": None, "FP8_PER_CHANNEL_PER_TOKEN": (1, 1 << 24), "FP8_PB_WO": (128, 128)}[algorithm]
    source = fp8(name, blocks, "weight_scale")

    def draw(generator: torch.Generator, out_size: int, in_size: int) -> tuple[Tensors, torch.Tensor]:
        tensors, meant = source.draw(generator, out_size, in_size)
        if algorithm == "FP8_PB_WO":
            tensors["weight_scale"] = tensors["weight_scale"][:, None, :, None].contiguous()
        return tensors, meant

    return Case(name, section, draw)


def quark(name: str, dtype: str, scheme: str) -> Case:
    """Return a Quark case: MXFP4 per group, or FP8 per tensor or channel."""
    weight = {"dtype": dtype, "qscheme": scheme, "is_dynamic": False}
    if dtype == "fp4":
        weight |= {"group_size": 32, "scale_format": "e8m0"}
    config = {"weight": weight, "input_tensors": {**weight, "is_dynamic": True}, "output_tensors": None, "bias": None}
    section = {
        "quant_method": "quark",
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
        "global_quant_config": config,
        "layer_quant_config": {"*.layers.0.self_attn.k_proj": config},
        "layer_type_quant_config": {},
        "exclude": ["lm_head"],
    }
    if dtype == "fp8_e4m3":
        return Case(name, section, fp8(name, (1, 1 << 24) if scheme == "per_channel" else None, "weight_scale").draw)

    def draw(generator: torch.Generator, out_size: int, in_size: int) -> tuple[Tensors, torch.Tensor]:
        tensors, meant = mxfp4(name).draw(generator, out_size, in_size)
        return {"weight": tensors["blocks"].flatten(1), "weight_scale": tensors["scales"]}, meant

    return Case(name, section, draw)


# bitsandbytes, with its formulas: number * scale for 4 bits, code * scale / 127 for 8 bits


NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = tuple(number / 192 for number in (0, 1, 128, 192, 64, 96, 32, 48, 0, -1, -128, -192, -64, -96, -32, -48))


def bitsandbytes(name: str, kind: str, block_size: int = 64, *, is_nested: bool = False) -> Case:
    """Return a case of 4-bit numbers from the table of `kind`. If it is nested, the scales of blocks are numbers of a
    table of 256, with scales for each 256."""
    section = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": is_nested,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": None,
    }

    def draw(generator: torch.Generator, out_size: int, in_size: int) -> tuple[Tensors, torch.Tensor]:
        table = torch.tensor(NF4 if kind == "nf4" else FP4)
        numbers = torch.randint(0, 16, (out_size * in_size,), generator=generator)
        num_blocks = -(-len(numbers) // block_size)
        scales = random_scales(generator, (num_blocks,), 2, in_size)
        state = {"quant_type": kind, "blocksize": block_size, "dtype": "float32", "shape": [out_size, in_size]}
        tensors = {"weight": (numbers[::2] << 4 | numbers[1::2]).to(torch.uint8)[:, None], "weight.quant_map": table}
        if is_nested:
            codes = torch.randint(0, 256, (num_blocks,), generator=generator, dtype=torch.uint8)
            nested = random_scales(generator, (-(-num_blocks // 256),), 4, in_size)
            nested_map = torch.linspace(-1, 1, 256)
            offset = 2 * nested.max().item()
            scales = nested_map[codes.int()] * nested.repeat_interleave(256)[:num_blocks] + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            tensors |= {"weight.nested_absmax": nested, "weight.nested_quant_map": nested_map, "weight.absmax": codes}
        else:
            tensors["weight.absmax"] = scales
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = text
        meant = table[numbers] * scales.repeat_interleave(block_size)[: len(numbers)]
        return tensors, meant.view(out_size, in_size)

    return Case(name, section, draw)


def llm_int8(name: str) -> Case:
    section = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False, "llm_int8_threshold": 6.0}

    def draw(generator: torch.Generator, out_size: int, in_size: int) -> tuple[Tensors, torch.Tensor]:
        codes = torch.randint(-127, 128, (out_size, in_size), generator=generator, dtype=torch.int8)
        scale = random_scales(generator, (out_size,), 2, in_size)
        tensors = {"weight": codes, "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return tensors, codes.float() * (scale / 127)[:, None]

    return Case(name, section, draw)


def auto_round(name: str, packing_format: str, *, sym: bool) -> Case:
    """Return an AutoRound case, whose tensors are those of GPTQ without g_idx, or those of AWQ."""
    source = gptq(name, 4, 16, version="gptq", sym=sym, g_idx="none") if "gptq" in packing_format else awq(name, 16)
    section = {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 16,
        "sym": sym,
        "data_type": "int",
        "packing_format": packing_format,
        "block_name_to_quantize": "model.layers",
        "extra_config": {"model.layers.0.mlp.gate": {"bits": 16, "data_type": "float"}},
    }
    return Case(name, section, source.draw)


# Suffixes of the modules whose weights are quantised, in all families.
LINEAR = ("_proj", "lm_head", "c_fc", "query_key_value", "dense", "_to_4h", "_to_h", "Wqkv", ".w1", ".w2", ".w3")


def make_quantized(
    directory: Path, family: str, case: Case, *, seed: int, skips: tuple[str, ...] = ("lm_head",), **overrides: Any
) -> tuple[Path, Path]:
    """Write a random model with quantised linear weights, except for the modules in `skips`. Also write the same model
    with the float32 weights that the codes represent. Return the directories of the quantised and the float32 model."""
    plain = make_checkpoint(directory / "plain", family, seed=seed, **overrides)
    quantized = directory / "quantized"
    quantized.mkdir()
    generator = torch.Generator().manual_seed(seed)
    stored = load_file(plain / "model.safetensors")
    meant = dict(stored)
    for name in sorted(stored):
        module = name.removesuffix(".weight")
        if not module.endswith(LINEAR) or name == module or module in skips:
            continue
        tensors, meant[name] = case.draw(generator, *stored.pop(name).shape)
        stored |= {f"{module}.{kind}": tensor for kind, tensor in tensors.items()}
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    save_file(meant, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": case.section}))
    return quantized, plain


def with_section(case: Case, **changes: Any) -> Case:
    """Return the case with changed settings in its `quantization_config`."""
    return replace(case, section={**case.section, **changes})


def make_mxfp4(directory: Path, *, seed: int, dtype: str = "float32", **overrides: Any) -> tuple[Path, Path]:
    """Write a random gpt-oss with its experts in MXFP4, as published. Also write the same model with the weights that
    the codes represent, in `dtype`. Return the directories of the MXFP4 and the plain model."""
    plain = make_checkpoint(directory / "plain", "gpt_oss", seed=seed, dtype=dtype, **overrides)
    quantized = directory / "quantized"
    quantized.mkdir()
    generator = torch.Generator().manual_seed(seed)
    stored = load_file(plain / "model.safetensors")
    meant = dict(stored)
    for name in sorted(stored):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        num_experts, in_size, out_size = stored.pop(name).shape
        drawn = [mxfp4("MXFP4").draw(generator, out_size, in_size) for _ in range(num_experts)]
        meant[name] = torch.stack([weight.t() for _, weight in drawn]).to(getattr(torch, dtype))
        for kind in ("blocks", "scales"):
            stored[f"{name}_{kind}"] = torch.stack([tensors[kind] for tensors, _ in drawn])
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    save_file(meant, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    section = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    return quantized, plain
