"""MXFP4: 4-bit floats, and a power of two as the scale of each group of 32. The tensors are named as in gpt-oss
checkpoints, in compressed-tensors, or in Quark (https://github.com/AMD/Quark)."""

from functools import partial

import torch

from pagewire.kernels.quantized import MXFP4, mxfp4_codes, mxfp4_scales
from pagewire.kernels.weight import StoredWeight
from pagewire.network.weight_formats import WeightFormat
from worker_service.models.layouts.layout import Layout, ReadTensors, StoredTensor, checked_scale, num_groups


def _stored(codes: str, scales: str, kept: WeightFormat, out_size: int, in_size: int) -> dict[str, StoredTensor]:
    """Return the tensors that store a weight. `codes` and `scales` are the suffixes of their names. The files of
    gpt-oss, which have `blocks`, give each group a dimension."""
    groups = num_groups(kept, in_size)
    shape = (out_size, groups, kept.columns // 2) if codes == "blocks" else (out_size, in_size // 2)
    return {codes: StoredTensor.of(("U8",), shape), scales: StoredTensor.of(("U8", "F8_E8M0"), (out_size, groups))}


def _decode(
    codes: str, scales: str, kept: WeightFormat, tensors: ReadTensors, out_size: int, in_size: int
) -> StoredWeight:
    decoded = mxfp4_codes(tensors[codes]).view(out_size, in_size)
    scale = mxfp4_scales(tensors[scales].view(torch.uint8), decoded.unflatten(1, (-1, kept.columns)))
    return StoredWeight(decoded, checked_scale(scales, scale), kept.columns)


def _layout(name: str, codes: str, scales: str) -> Layout:
    return Layout(name, partial(_stored, codes, scales), partial(_decode, codes, scales), MXFP4)


GPT_OSS = _layout("mxfp4", "blocks", "scales")
PACK_QUANTIZED = _layout("mxfp4-pack-quantized", "weight_packed", "weight_scale")
QUARK = _layout("quark-mxfp4", "weight", "weight_scale")
