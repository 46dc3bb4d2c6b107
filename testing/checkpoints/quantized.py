"""Quantised weights and checkpoints of every format, made of random codes, with the weights that the codes represent.

The package compressed-tensors packs and decodes its own formats. `testing.checkpoints.packed` packs the others.
"""

import json
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.mx_utils import compress_mx_scale, decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize

from testing.checkpoints.packed import (
    Case,
    Tensors,
    auto_round,
    awq,
    bitsandbytes,
    compressed_in_order,
    fp8,
    gptq,
    llm_int8,
    modelopt,
    mxfp4,
    quark,
    random_scales,
)


def compressed(name: str, layout: str, scale_dtype: torch.dtype, **arguments: Any) -> Case:
    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weights = json.loads(args.model_dump_json())
    section = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }

    def draw(generator: torch.Generator, out_size: int, in_size: int) -> tuple[Tensors, torch.Tensor]:
        shape = scale_shape(args, out_size, in_size)
        is_float = args.type == "float"
        scale = random_scales(generator, shape, 400 if is_float else 2**args.num_bits, in_size).to(scale_dtype)
        state = {"weight": 1.5 * in_size**-0.5 * torch.randn(out_size, in_size, generator=generator)}
        state["weight_scale"] = scale
        low = -(2 ** (args.num_bits - 1))
        zeros = torch.randint(low // 2, -low // 2, shape, generator=generator, dtype=torch.int8)
        state["weight_zero_point"] = torch.zeros_like(zeros) if args.symmetric else zeros
        compressor = BaseCompressor.get_value_from_registry(layout)
        stored = compressor.compress({**state, "weight": state["weight"].to(scale_dtype)}, scheme)
        meant = compressor.decompress({**stored, "weight_scale": scale.float()}, scheme)["weight"]
        assert meant.dtype == torch.float32
        return {kind: tensor.contiguous() for kind, tensor in stored.items()}, meant

    return Case(name, section, draw)


def float4(name: str, layout: str, group_size: int) -> Case:
    """Return a case of 4-bit floats in groups: NVFP4 with a global scale, or MXFP4 with powers of two as scales."""
    is_nvfp4 = layout == "nvfp4-pack-quantized"
    strategy = "tensor_group" if is_nvfp4 else "group"
    args = QuantizationArgs(num_bits=4, type="float", strategy=strategy, group_size=group_size)
    weights = json.loads(args.model_dump_json())
    inputs = {**weights, "dynamic": "local" if is_nvfp4 else True}
    section = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": ["lm_head"],
    }

    def draw(generator: torch.Generator, out_size: int, in_size: int) -> tuple[Tensors, torch.Tensor]:
        shape = (out_size, in_size // group_size)
        packed = torch.randint(0, 256, (out_size, in_size // 2), generator=generator, dtype=torch.uint8)
        numbers = unpack_fp4_from_uint8(packed, out_size, in_size).float()
        tensors = {"weight_packed": packed}
        scale = random_scales(generator, shape, 10, in_size)
        if is_nvfp4:
            tensors["weight_global_scale"] = (400 / scale.max()).reshape(1)
            tensors["weight_scale"] = (scale * tensors["weight_global_scale"]).to(torch.float8_e4m3fn)
            scale = tensors["weight_scale"].float()
        else:
            tensors["weight_scale"] = compress_mx_scale(scale, torch.uint8)
            scale = decompress_mx_scale(tensors["weight_scale"]).float()
        meant = dequantize(
            numbers, scale, args=args, dtype=torch.float32, global_scale=tensors.get("weight_global_scale")
        )
        return tensors, meant

    return Case(name, section, draw)


def scale_shape(args: QuantizationArgs, out_size: int, in_size: int) -> tuple[int, ...]:
    if args.strategy == "tensor":
        return (1,)
    if args.strategy == "block":
        rows, columns = args.block_structure
        return -(-out_size // rows), -(-in_size // columns)
    return out_size, in_size // args.group_size if args.strategy == "group" else 1


PACKED = {"type": "int", "strategy": "group", "group_size": 16}
CASES = [
    compressed("W4A16", "pack-quantized", torch.bfloat16, num_bits=4, **PACKED),
    compressed("W4A16 asymmetric", "pack-quantized", torch.float16, num_bits=4, symmetric=False, **PACKED),
    compressed("W4A16 by channel", "pack-quantized", torch.bfloat16, num_bits=4, type="int", strategy="channel"),
    compressed("W8A16", "pack-quantized", torch.float16, num_bits=8, **PACKED),
    compressed(
        "W8A16 by channel, asymmetric", "pack-quantized", torch.bfloat16, num_bits=8, type="int", strategy="channel",
        symmetric=False,
    ),
    compressed("scales of 32 bits", "pack-quantized", torch.float32, num_bits=4, symmetric=False, **PACKED),
    compressed("W8A8", "int-quantized", torch.bfloat16, num_bits=8, type="int", strategy="channel"),
    compressed("W8A8 asymmetric", "int-quantized", torch.float32, num_bits=8, type="int", strategy="channel",
               symmetric=False),
    compressed("W8A8 by tensor", "int-quantized", torch.float32, num_bits=8, type="int", strategy="tensor"),
    compressed("W8A8 by group", "int-quantized", torch.bfloat16, num_bits=8, **PACKED),
    compressed(
        "FP8 by group", "float-quantized", torch.bfloat16, num_bits=8, type="float", strategy="group", group_size=16
    ),
    compressed("FP8 by channel", "float-quantized", torch.bfloat16, num_bits=8, type="float", strategy="channel"),
    compressed("FP8 by tensor", "float-quantized", torch.float32, num_bits=8, type="float", strategy="tensor"),
    compressed("FP8 by block", "float-quantized", torch.bfloat16, num_bits=8, type="float", strategy="block",
               block_structure=[16, 32]),
    compressed_in_order("W4A16 in act-order", torch.int32),
    compressed_in_order("W4A16 in act-order, zero points in bytes", torch.int8),
    fp8("FP8 block", (16, 32)),
    fp8("FP8 block, odd", (24, 40)),
    fp8("FP8 block, powers of two", (32, 32), scale_dtype=torch.float8_e8m0fnu, scale_fmt="ue8m0"),
    fp8("FP8 tensor", None, "weight_scale", activation_scheme="static"),
    gptq("GPTQ", 4, 16, version="gptq", sym=True, g_idx="in order"),
    gptq("GPTQ asymmetric", 4, 32, version="gptq", sym=False, g_idx="in order"),
    gptq("GPTQ with zeros for groups", 4, 16, version="gptq", sym=True, g_idx="zeros"),
    gptq("GPTQ of 8 bits, zero points unchanged", 8, 32, version="gptq, unchanged", sym=True, g_idx="none"),
    gptq("GPTQ v2", 4, 16, version="gptq_v2", sym=False, g_idx="none"),
    gptq("GPTQ by channel", 4, -1, version="gptq", sym=False, g_idx="none"),
    gptq("GPTQ of 8 bits", 8, 32, version="gptq", sym=True, g_idx="in order"),
    gptq("GPTQ of 8 bits, v2, asymmetric", 8, 16, version="gptq_v2", sym=False, g_idx="none"),
    gptq("GPTQ in act-order", 4, 16, version="gptq", sym=True, g_idx="shuffled", desc_act=True),
    gptq("GPTQ of 8 bits in act-order", 8, 32, version="gptq_v2", sym=False, g_idx="shuffled", desc_act=True),
    awq("AWQ", 16),
    awq("AWQ by channel", -1),
    mxfp4("MXFP4"),
    float4("NVFP4", "nvfp4-pack-quantized", 16),
    modelopt("NVFP4 of ModelOpt", "NVFP4", group_size=16, kv_cache_scheme={"type": "float", "num_bits": 8}),
    modelopt("FP8 of ModelOpt", "FP8"),
    modelopt("FP8 of ModelOpt by channel", "FP8_PER_CHANNEL_PER_TOKEN"),
    float4("MXFP4 of compressed-tensors", "mxfp4-pack-quantized", 32),
    quark("MXFP4 of Quark", "fp4", "per_group"),
    quark("FP8 of Quark", "fp8_e4m3", "per_tensor"),
    quark("FP8 of Quark by channel", "fp8_e4m3", "per_channel"),
    bitsandbytes("nf4", "nf4"),
    bitsandbytes("nf4 with nested scales", "nf4", is_nested=True),
    bitsandbytes("fp4 in blocks of 128", "fp4", 128, is_nested=True),
    llm_int8("LLM.int8"),
    auto_round("AutoRound", "auto_round:auto_gptq", sym=True),
    auto_round("AutoRound asymmetric", "auto_gptq", sym=False),
    auto_round("AutoRound as AWQ", "auto_round:auto_awq", sym=False),
]  # fmt: skip
BY_NAME = {case.name: case for case in CASES}
