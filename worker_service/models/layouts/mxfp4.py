"""MXFP4 as in gpt-oss checkpoints: 4-bit floats, and a power of two as the scale of each group of 32."""

from pagewire.kernels.quantized import MXFP4, mxfp4_codes, mxfp4_scales
from pagewire.kernels.weight import StoredWeight
from pagewire.network.weight_formats import WeightFormat
from worker_service.models.layouts.layout import Layout, ReadTensors, StoredTensor, checked_scale, num_groups


def _stored(kept: WeightFormat, out_size: int, in_size: int) -> dict[str, StoredTensor]:
    scales = (out_size, num_groups(kept, in_size))
    return {
        "blocks": StoredTensor.of(("U8",), (*scales, kept.columns // 2)),
        "scales": StoredTensor.of(("U8",), scales),
    }


def _decode(kept: WeightFormat, tensors: ReadTensors, out_size: int, in_size: int) -> StoredWeight:
    codes = mxfp4_codes(tensors["blocks"]).view(out_size, in_size)
    scale = mxfp4_scales(tensors["scales"], codes.unflatten(1, (-1, kept.columns)))
    return StoredWeight(codes, checked_scale("scales", scale), kept.columns)


LAYOUT = Layout("mxfp4", _stored, _decode, MXFP4)
