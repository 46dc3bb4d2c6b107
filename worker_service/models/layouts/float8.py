"""FP8 with a scale for each block, as in DeepSeek's checkpoints and in compressed-tensors."""

from dataclasses import replace
from functools import partial

import torch

from pagewire.kernels.weight import FLOAT8, StoredFormat, StoredWeight
from pagewire.network.weight_formats import WeightFormat
from worker_service.models.layouts.layout import (
    SCALES,
    FaultyTensorError,
    Layout,
    ReadTensors,
    StoredTensor,
    checked_scale,
    expand_rows,
    num_blocks,
    scale_shapes,
)


def _stored(scale_kind: str, kept: WeightFormat, out_size: int, in_size: int) -> dict[str, StoredTensor]:
    """Return the dtypes and shapes of the tensors in which a checkpoint stores an FP8 weight. The tensor of the scales
    is named `scale_kind`, or "weight_scale" in some checkpoints. ModelOpt gives blocks four dimensions."""
    dtypes, shapes = (*SCALES, "F8_E8M0"), scale_shapes(kept, out_size, in_size)
    if kept.rows > 1:
        shapes += ((num_blocks(out_size, kept.rows), 1, num_blocks(in_size, kept.columns), 1),)
    return {
        "weight": StoredTensor.of(("F8_E4M3",), (out_size, in_size)),
        scale_kind: StoredTensor.of(dtypes, *shapes, other_kind="weight_scale"),
    }


def _decode(kept: WeightFormat, tensors: ReadTensors, out_size: int, in_size: int) -> StoredWeight:
    [kind], values = tensors.keys() - {"weight"}, tensors["weight"]
    scale = checked_scale(kind, tensors[kind])
    if (scale < 0).any():
        raise FaultyTensorError(kind, "contains a negative scale")
    if values.numel() and (values.view(torch.uint8) & 0x7F).max() == 0x7F:  # 0x7F is NaN, with either sign
        raise FaultyTensorError("weight", "has NaN values")
    return StoredWeight(values, expand_rows(scale, kept, out_size), kept.columns or in_size)


FP8 = Layout("fp8", partial(_stored, "weight_scale_inv"), _decode, StoredFormat(FLOAT8, 0), read_bytes=2)
FLOAT_QUANTIZED = replace(FP8, name="float-quantized", stored=partial(_stored, "weight_scale"))
