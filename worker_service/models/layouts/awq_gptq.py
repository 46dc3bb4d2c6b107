"""Layouts with codes packed in 32-bit words, and zero points and scales per group. AutoAWQ
(https://github.com/casper-hansen/AutoAWQ) packs along outputs, GPTQModel (https://github.com/ModelCloud/GPTQModel)
along inputs."""

from dataclasses import replace
from functools import partial

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
    assemble,
    checked_scale,
    groups_of_columns,
    num_groups,
    signed,
    unpack,
)

# Column 8c + j of AutoAWQ's layout is stored in this nibble of word c.
_AWQ_NIBBLES = torch.tensor((0, 4, 1, 5, 2, 6, 3, 7))


def _stored_awq(kept: WeightFormat, out_size: int, in_size: int) -> dict[str, StoredTensor]:
    others = _scales_and_zeros(kept, out_size, in_size)
    return {"qweight": StoredTensor.of(("I32",), (in_size, _num_words(kept, out_size, "outputs"))), **others}


def _stored_gptq(kept: WeightFormat, out_size: int, in_size: int) -> dict[str, StoredTensor]:
    others = _scales_and_zeros(kept, out_size, in_size)
    return {
        "qweight": StoredTensor.of(("I32",), (_num_words(kept, in_size, "inputs"), out_size)),
        **others,
        "g_idx": StoredTensor.of(("I32", "I64"), (in_size,), is_optional=not kept.has_act_order),
    }


def _scales_and_zeros(kept: WeightFormat, out_size: int, in_size: int) -> dict[str, StoredTensor]:
    groups = num_groups(kept, in_size)
    return {
        "qzeros": StoredTensor.of(("I32",), (groups, _num_words(kept, out_size, "outputs"))),
        "scales": StoredTensor.of(SCALES, (groups, out_size)),
    }


def _num_words(kept: WeightFormat, size: int, what: str) -> int:
    per_word = 32 // kept.bits
    if size % per_word:
        raise ValueError(f"its {size} {what} are not a multiple of {per_word}, the number of codes in a 32-bit word")
    return size // per_word


def _decode_awq(kept: WeightFormat, tensors: ReadTensors, out_size: int, in_size: int) -> StoredWeight:
    codes, zeros = (_awq_columns(unpack(tensors[kind], kept.bits)) for kind in ("qweight", "qzeros"))
    return _assembled(kept, tensors, codes.t(), zeros)


def _awq_columns(numbers: Tensor) -> Tensor:
    """Reorder the columns of a matrix from the interleaved order in which AutoAWQ packs them to the order of the
    weight's outputs."""
    return numbers.unflatten(1, (-1, 8)).index_select(2, _AWQ_NIBBLES).flatten(1)


def _decode_gptq(num_less: int, kept: WeightFormat, tensors: ReadTensors, out_size: int, in_size: int) -> StoredWeight:
    """Decode the tensors of a GPTQ weight. Checkpoints of the first GPTQ format store each zero point minus 1.
    `num_less` is the number to add to the stored zero points: 1 for this format, otherwise 0. Some symmetric
    checkpoints claim the first format, but store the zero points unchanged."""
    stored = unpack(tensors["qzeros"], kept.bits)
    if kept.is_symmetric and (stored == 1 << (kept.bits - 1)).all():
        num_less = 0
    zeros = (stored + num_less) & (2**kept.bits - 1)
    return _assembled(kept, tensors, unpack(tensors["qweight"].t(), kept.bits), zeros)


def _assembled(kept: WeightFormat, tensors: ReadTensors, codes: Tensor, zeros: Tensor) -> StoredWeight:
    """Convert unsigned codes [out, in] and unsigned zero points [groups, out] to a signed `StoredWeight`. Raises
    FaultyTensorError if config.json says that the weight is symmetric, but a zero point is not in the middle of the
    range."""
    scale, middle = checked_scale("scales", tensors["scales"].t()), 1 << (kept.bits - 1)
    if kept.is_symmetric and (zeros != middle).any():
        raise FaultyTensorError("qzeros", f"contains zero points other than {middle}, but sym is true")
    return assemble(
        signed(codes, kept.bits).contiguous(),
        scale,
        signed(zeros, kept.bits).t(),
        groups_of_columns("g_idx", tensors, scale.shape[1]),
    )


AWQ = Layout("awq", _stored_awq, _decode_awq)
# The first version of the format stores each zero point minus 1.
GPTQ = Layout("gptq", _stored_gptq, partial(_decode_gptq, 1), may_have_zero_biases=True)
GPTQ_V2 = replace(GPTQ, name="gptq_v2", decode=partial(_decode_gptq, 0))
