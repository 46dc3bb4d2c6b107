"""NVFP4: 4-bit floats in groups of 16. A group has an FP8 scale, and a global scale covers the whole weight.

The tensors are named as in compressed-tensors (https://github.com/vllm-project/compressed-tensors), which divides by
the global scale, or as in ModelOpt (https://github.com/NVIDIA/Model-Optimizer), which multiplies by it. The products of
both scales are float32 numbers, so memory holds 6 bits per weight, where the file has 4.5.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pagewire.kernels.quantized import mxfp4_codes
from pagewire.kernels.weight import StoredFormat, StoredWeight
from pagewire.network.weight_formats import WeightFormat
from worker_service.models.layouts.layout import Layout, ReadTensors, StoredTensor, checked_scale, num_groups

GROUP_SIZE = 16


def _stored(codes: str, whole: str, kept: WeightFormat, out_size: int, in_size: int) -> dict[str, StoredTensor]:
    """Return the tensors that store a weight. `codes` and `whole` are the suffixes of its codes and global scale."""
    groups = num_groups(kept, in_size)
    return {
        codes: StoredTensor.of(("U8",), (out_size, in_size // 2)),
        "weight_scale": StoredTensor.of(("F8_E4M3",), (out_size, groups)),
        whole: StoredTensor.of(("F32",), (1,), ()),
    }


def _decode(
    codes: str,
    whole: str,
    apply: Callable[[Tensor, Tensor], Tensor],
    kept: WeightFormat,
    tensors: ReadTensors,
    out_size: int,
    in_size: int,
) -> StoredWeight:
    scale = checked_scale("weight_scale", tensors["weight_scale"])
    scale = checked_scale(whole, apply(scale, tensors[whole]))
    # The codes are twice the numbers.
    return StoredWeight(mxfp4_codes(tensors[codes]).view(out_size, in_size), scale / 2, kept.columns)


_HELD = StoredFormat(torch.int8, GROUP_SIZE, 4)
_PACKED = ("weight_packed", "weight_global_scale")
_MODELOPT = ("weight", "weight_scale_2")
NVFP4_PACK_QUANTIZED = Layout(
    "nvfp4-pack-quantized", partial(_stored, *_PACKED), partial(_decode, *_PACKED, torch.div), _HELD
)
NVFP4 = replace(
    NVFP4_PACK_QUANTIZED,
    name="nvfp4",
    stored=partial(_stored, *_MODELOPT),
    decode=partial(_decode, *_MODELOPT, torch.mul),
)
