"""Integer formats of compressed-tensors (https://github.com/vllm-project/compressed-tensors), stored in bytes or packed
in 32-bit words."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pagewire.kernels.weight import StoredWeight
from pagewire.network.weight_formats import WeightFormat
from worker_service.models.layouts.layout import (
    SCALES,
    FaultyTensorError,
    Layout,
    ReadTensors,
    StoredTensor,
    TensorShape,
    assemble,
    checked_scale,
    expand_rows,
    groups_of_columns,
    num_blocks,
    num_groups,
    scale_shapes,
    signed,
    unpack,
)


def _stored_bytes(kept: WeightFormat, out_size: int, in_size: int) -> dict[str, StoredTensor]:
    return {"weight": StoredTensor.of(("I8",), (out_size, in_size)), **_scales_and_zeros(kept, out_size, in_size)}


def _stored_words(kept: WeightFormat, out_size: int, in_size: int) -> dict[str, StoredTensor]:
    """Return the dtypes and shapes of the tensors in which a checkpoint stores a weight whose codes are packed into
    int32 words along the inputs (format "pack-quantized"). The zero points may be stored in bytes, or packed into words
    along the outputs."""
    packed = {"I32": ((_num_words(kept, num_blocks(out_size, kept.rows)), num_blocks(in_size, kept.columns)),)}
    return {
        "weight_packed": StoredTensor.of(("I32",), (out_size, _num_words(kept, in_size))),
        "weight_shape": StoredTensor.of(("I64", "I32"), (2,), is_optional=True),
        "weight_g_idx": StoredTensor.of(("I32",), (in_size,), is_optional=not kept.has_act_order),
        **_scales_and_zeros(kept, out_size, in_size, packed),
    }


def _scales_and_zeros(
    kept: WeightFormat, out_size: int, in_size: int, packed: Mapping[str, tuple[TensorShape, ...]] | None = None
) -> dict[str, StoredTensor]:
    """Return the dtypes and shapes of the tensors in which a checkpoint stores the scales and zero points of a weight.
    `packed` gives the allowed dtypes and shapes of zero points that are packed into words. Otherwise they are stored in
    bytes."""
    num_groups(kept, in_size)
    shapes = scale_shapes(kept, out_size, in_size)
    zeros = {} if kept.is_symmetric else {"weight_zero_point": StoredTensor({"I8": shapes, **(packed or {})})}
    return {"weight_scale": StoredTensor.of(SCALES, *shapes), **zeros}


def _num_words(kept: WeightFormat, size: int) -> int:
    return -(-size * kept.bits // 32)


def _decode_bytes(kept: WeightFormat, tensors: ReadTensors, out_size: int, in_size: int) -> StoredWeight:
    return _assembled(kept, tensors, tensors["weight"])


def _decode_words(kept: WeightFormat, tensors: ReadTensors, out_size: int, in_size: int) -> StoredWeight:
    shape = tensors.get("weight_shape")
    if shape is not None and shape.tolist() != [out_size, in_size]:
        raise FaultyTensorError("weight_shape", f"says {shape.tolist()}, expected [{out_size}, {in_size}]")
    codes = unpack(tensors["weight_packed"], kept.bits)[:, :in_size]
    return _assembled(kept, tensors, signed(codes, kept.bits).contiguous())


def _assembled(kept: WeightFormat, tensors: ReadTensors, codes: Tensor) -> StoredWeight:
    scale = expand_rows(checked_scale("weight_scale", tensors["weight_scale"]), kept, len(codes))
    zeros = tensors.get("weight_zero_point")
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = signed(unpack(zeros.t(), kept.bits)[:, : num_blocks(len(codes), kept.rows)], kept.bits).t()
    zeros = None if zeros is None else expand_rows(zeros, kept, len(codes))
    return assemble(codes, scale, zeros, groups_of_columns("weight_g_idx", tensors, scale.shape[1]))


INT_QUANTIZED = Layout("int-quantized", _stored_bytes, _decode_bytes, read_bytes=2)
PACK_QUANTIZED = Layout("pack-quantized", _stored_words, _decode_words)
