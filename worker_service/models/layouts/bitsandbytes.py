"""bitsandbytes (https://github.com/bitsandbytes-foundation/bitsandbytes): 4-bit numbers from a table (nf4, fp4), and
8-bit codes with a scale per output (LLM.int8).

The values of nf4 and fp4 are floats that no integers represent, so these weights are always widened.
"""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pagewire.common.gguf import shown
from pagewire.kernels.weight import StoredWeight
from pagewire.network.weight_formats import WeightFormat
from worker_service.models.layouts.layout import (
    FaultyTensorError,
    Layout,
    ReadTensors,
    StoredTensor,
    checked_scale,
    num_blocks,
)

# Consecutive numbers of the flattened weight that share a scale.
_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_MAX_STATE_BYTES = 1 << 16
_SCALES, _NESTED, _STATE = "weight.absmax", "weight.nested_absmax", "weight.quant_state.bitsandbytes__"


def _stored_table(kind: str, kept: WeightFormat, out_size: int, in_size: int) -> dict[str, StoredTensor]:
    """Return the tensors that store a weight of type `kind`: its numbers, two in a byte, their table, the scales of
    blocks, and the settings in JSON. The scales may themselves be numbers of a table, with scales of their own."""
    size = out_size * in_size
    lengths = [num_blocks(size, block_size) for block_size in _BLOCK_SIZES]
    nested = {num_blocks(length, block_size) for length in lengths for block_size in _BLOCK_SIZES}
    shapes = tuple((length,) for length in lengths)
    return {
        "weight": StoredTensor.of(("U8",), (num_blocks(size, 2), 1)),
        "weight.quant_map": StoredTensor.of(("F32",), (16,)),
        _SCALES: StoredTensor({"F32": shapes, "U8": shapes}),
        _NESTED: StoredTensor.of(("F32",), *((length,) for length in sorted(nested)), is_optional=True),
        "weight.nested_quant_map": StoredTensor.of(("F32",), (256,), is_optional=True),
        f"{_STATE}{kind}": StoredTensor.of(("U8",)),
    }


def _decode_table(kind: str, kept: WeightFormat, tensors: ReadTensors, out_size: int, in_size: int) -> StoredWeight:
    state_kind = f"{_STATE}{kind}"
    state = _read_state(state_kind, tensors[state_kind])
    if state.get("shape") != [out_size, in_size]:
        raise FaultyTensorError(state_kind, f"says shape {shown(state.get('shape'))}, expected [{out_size}, {in_size}]")
    scales = tensors[_SCALES]
    if scales.dtype == torch.uint8:
        if _NESTED not in tensors or "weight.nested_quant_map" not in tensors:
            raise FaultyTensorError(_SCALES, "is quantised, but a tensor of its scales or of its table is missing")
        numbers = tensors["weight.nested_quant_map"][scales.int()]
        scales = _scaled(numbers, tensors[_NESTED], state_kind, state.get("nested_blocksize"))
        scales += state["nested_offset"]
    # A byte stands for two entries of the table, the upper half first.
    table = tensors["weight.quant_map"]
    pairs = torch.stack((table.repeat_interleave(16), table.repeat(16)), dim=1)
    numbers = pairs.index_select(0, tensors["weight"].flatten().int()).flatten()[: out_size * in_size]
    weight = _scaled(numbers, checked_scale(_SCALES, scales), state_kind, state.get("blocksize"))
    return StoredWeight(weight.view(out_size, in_size))


def _read_state(kind: str, stored: Tensor) -> Mapping[str, Any]:
    """Return the settings of a weight, which its checkpoint stores as a tensor of JSON."""
    try:
        state = json.loads(bytes(stored[:_MAX_STATE_BYTES].tolist()))
        if isinstance(state, dict) and type(state.setdefault("nested_offset", 0.0)) is float:
            return state
    except (ValueError, RecursionError):
        pass
    raise FaultyTensorError(kind, "is not an object in JSON with the settings of the weight")


def _scaled(numbers: Tensor, scales: Tensor, kind: str, block_size: object) -> Tensor:
    """Multiply each block of numbers in place by its scale. The last block may be shorter."""
    if (
        not isinstance(block_size, int)
        or block_size not in _BLOCK_SIZES
        or len(scales) != num_blocks(len(numbers), block_size)
    ):
        raise FaultyTensorError(kind, f"says blocks of {shown(block_size)}, which do not fit the {len(scales)} scales")
    num_whole = len(numbers) // block_size
    end = num_whole * block_size
    numbers[:end].view(num_whole, block_size).mul_(scales[:num_whole, None])
    numbers[end:].mul_(scales[num_whole:])
    return numbers


def _stored_codes(kept: WeightFormat, out_size: int, in_size: int) -> dict[str, StoredTensor]:
    return {
        "weight": StoredTensor.of(("I8",), (out_size, in_size)),
        "SCB": StoredTensor.of(("F32",), (out_size,)),
        "weight_format": StoredTensor.of(("U8",), (), (1,), is_optional=True),
    }


def _decode_codes(kept: WeightFormat, tensors: ReadTensors, out_size: int, in_size: int) -> StoredWeight:
    order = tensors.get("weight_format")
    if order is not None and order.any():
        raise FaultyTensorError("weight_format", f"is {order.item()}, but must be 0: rows in their order")
    return StoredWeight(tensors["weight"], (checked_scale("SCB", tensors["SCB"]) / 127)[:, None], in_size)


NF4 = Layout("nf4", partial(_stored_table, "nf4"), partial(_decode_table, "nf4"), held=None, read_bytes=7)
FP4 = Layout("fp4", partial(_stored_table, "fp4"), partial(_decode_table, "fp4"), held=None, read_bytes=7)
INT8 = Layout("llm-int8", _stored_codes, _decode_codes, read_bytes=2)
