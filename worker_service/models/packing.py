"""How each layout of quantised weights keeps a weight [out, in] in a checkpoint, and what its bits mean.

The layouts are those of compressed-tensors, AutoAWQ (https://github.com/casper-hansen/AutoAWQ), GPTQModel
(https://github.com/ModelCloud/GPTQModel), of DeepSeek's checkpoints in FP8 and of gpt-oss' in MXFP4. A weight is
`(code - zero) * scale`, in float32, whatever the scale is stored in.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.common.network.quantization import WeightFormat
from pagewire.kernels.quantized import MXFP4, mxfp4_codes, mxfp4_scales
from pagewire.kernels.weight import HeldWeight

_SCALES = ("F32", "BF16", "F16")
_NO_NUMBER = 0x7F  # in float8_e4m3fn, whatever its sign
_CHUNK_ELEMENTS = 1 << 20  # of a weight that are made floats at a time
# Column 8c + j of AutoAWQ's layout is in this nibble of word c.
_AWQ_NIBBLES = torch.tensor((0, 4, 1, 5, 2, 6, 3, 7))


TensorShape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a tensor of a weight must be in the checkpoint: of one of these dtypes, as safetensors spells them, in one
    of the shapes of that."""

    shapes: Mapping[str, tuple[TensorShape, ...]]
    is_optional: bool = False

    @staticmethod
    def of(dtypes: Iterable[str], *shapes: TensorShape, is_optional: bool = False) -> "StoredTensor":
        """One of these shapes, whichever dtype it has."""
        return StoredTensor(dict.fromkeys(dtypes, shapes), is_optional)


class FaultyTensorError(Exception):
    """A tensor of a weight holds what it cannot. `kind` is the end of its name."""

    def __init__(self, kind: str, fault: str) -> None:
        super().__init__(fault)
        self.kind = kind


def stored_tensors(weight_format: WeightFormat, out_size: int, in_size: int) -> dict[str, StoredTensor]:
    """Return the tensors that a weight is made of, by the ends of their names.

    Raises ValueError if a weight of these sizes cannot be in this format.
    """
    layout, columns = weight_format.layout, weight_format.columns
    if layout in ("fp8", "float-quantized"):
        scale_kind = "weight_scale_inv" if layout == "fp8" else "weight_scale"
        return {
            "weight": StoredTensor.of(("F8_E4M3",), (out_size, in_size)),
            scale_kind: StoredTensor.of((*_SCALES, "F8_E8M0"), *_scale_shapes(weight_format, out_size, in_size)),
        }
    if columns and in_size % columns:
        raise ValueError(f"its {in_size} inputs are no multiple of the group size {columns}")
    if layout == "mxfp4":
        return {
            "blocks": StoredTensor.of(("U8",), (out_size, in_size // columns, columns // 2)),
            "scales": StoredTensor.of(("U8",), (out_size, in_size // columns)),
        }
    if layout == "int-quantized":
        weight = StoredTensor.of(("I8",), (out_size, in_size))
        return {"weight": weight, **_compressed(weight_format, out_size, in_size)}
    if layout == "pack-quantized":
        num_words = -(-in_size * weight_format.bits // 32)
        return {
            "weight_packed": StoredTensor.of(("I32",), (out_size, num_words)),
            "weight_shape": StoredTensor.of(("I64", "I32"), (2,), is_optional=True),
            "weight_g_idx": StoredTensor.of(("I32",), (in_size,), is_optional=not weight_format.has_ordered_columns),
            **_compressed(weight_format, out_size, in_size),
        }
    return _awq_or_gptq(weight_format, out_size, in_size)


def _compressed(weight_format: WeightFormat, out_size: int, in_size: int) -> dict[str, StoredTensor]:
    """The scales, and the zero points where there are any: in bytes, or packed along the outputs."""
    shapes = _scale_shapes(weight_format, out_size, in_size)
    tensors = {"weight_scale": StoredTensor.of(_SCALES, *shapes)}
    if not weight_format.is_symmetric:
        num_rows, num_columns = shapes[0]
        packed = {"I32": ((-(-num_rows * weight_format.bits // 32), num_columns),)}
        is_packed = weight_format.layout == "pack-quantized"
        tensors["weight_zero_point"] = StoredTensor({"I8": shapes, **(packed if is_packed else {})})
    return tensors


def _awq_or_gptq(weight_format: WeightFormat, out_size: int, in_size: int) -> dict[str, StoredTensor]:
    is_awq, per_word = weight_format.layout == "awq", 32 // weight_format.bits
    for what, size in {"outputs": out_size, **({} if is_awq else {"inputs": in_size})}.items():
        if size % per_word:
            raise ValueError(f"its {size} {what} are no multiple of the {per_word} that a word of 32 bits holds")
    num_groups = in_size // (weight_format.columns or in_size)
    tensors = {
        "qweight": StoredTensor.of(
            ("I32",), (in_size, out_size // per_word) if is_awq else (in_size // per_word, out_size)
        ),
        "qzeros": StoredTensor.of(("I32",), (num_groups, out_size // per_word)),
        "scales": StoredTensor.of(_SCALES, (num_groups, out_size)),
    }
    if is_awq:
        return tensors
    order = StoredTensor.of(("I32", "I64"), (in_size,), is_optional=not weight_format.has_ordered_columns)
    return {**tensors, "g_idx": order}


def _scale_shapes(weight_format: WeightFormat, out_size: int, in_size: int) -> tuple[TensorShape, ...]:
    """A scale for each block; dimensions of length 1 may be left out from the end."""
    num_rows, num_columns = _num_blocks(out_size, weight_format.rows), _num_blocks(in_size, weight_format.columns)
    if num_columns > 1:
        return ((num_rows, num_columns),)
    if num_rows > 1 or weight_format.rows == 1:
        return (num_rows, 1), (num_rows,)
    return (1, 1), (1,), ()


def _num_blocks(size: int, block: int) -> int:
    return -(-size // block) if block else 1


def decode(weight_format: WeightFormat, tensors: Mapping[str, Tensor], out_size: int, in_size: int) -> HeldWeight:
    """Return the weight [out, in] that the tensors of `stored_tensors` make up.

    Raises FaultyTensorError if one holds what it cannot.
    """
    layout, bits = weight_format.layout, weight_format.bits
    if layout in ("fp8", "float-quantized"):
        return _decode_float8(weight_format, tensors)
    if layout in ("int-quantized", "pack-quantized"):
        return _decode_compressed(weight_format, tensors, out_size, in_size)
    if layout == "mxfp4":
        return _decode_mxfp4(tensors, out_size, in_size)
    scale = tensors["scales"].t()
    _check_scale("scales", scale)
    # [groups, out]; the first version of GPTQ stores them less 1.
    zeros = unpack(tensors["qzeros"], bits)
    if layout == "awq":
        codes, zeros = _awq_columns(unpack(tensors["qweight"], bits)).t(), _awq_columns(zeros)
    else:
        codes = unpack(tensors["qweight"].t(), bits)
        zeros = (zeros + 1) & (2**bits - 1) if layout == "gptq" else zeros
    middle = 1 << (bits - 1)
    if weight_format.is_symmetric and (zeros != middle).any():
        raise FaultyTensorError("qzeros", f"holds other zero points than {middle}, but sym is true")
    return _assemble(
        signed(codes, bits).contiguous(),
        scale,
        signed(zeros, bits).t(),
        _column_groups("g_idx", tensors, scale.shape[1]),
    )


def _decode_compressed(
    weight_format: WeightFormat, tensors: Mapping[str, Tensor], out_size: int, in_size: int
) -> HeldWeight:
    bits, stored_scale = weight_format.bits, tensors["weight_scale"]
    _check_scale("weight_scale", stored_scale)
    shape = tensors.get("weight_shape")
    if shape is not None and shape.tolist() != [out_size, in_size]:
        raise FaultyTensorError("weight_shape", f"says {shape.tolist()}, expected [{out_size}, {in_size}]")
    if weight_format.layout == "int-quantized":
        codes = tensors["weight"]
    else:
        codes = signed(unpack(tensors["weight_packed"], bits)[:, :in_size], bits).contiguous()
    zeros = tensors.get("weight_zero_point")
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = signed(unpack(zeros.t(), bits)[:, : _num_blocks(out_size, weight_format.rows)], bits).t()
    scale = _by_row(stored_scale, weight_format, out_size)
    zeros = None if zeros is None else _by_row(zeros, weight_format, out_size)
    return _assemble(codes, scale, zeros, _column_groups("weight_g_idx", tensors, scale.shape[1]))


def _decode_float8(weight_format: WeightFormat, tensors: Mapping[str, Tensor]) -> HeldWeight:
    values = tensors["weight"]
    kind, stored_scale = next((kind, tensor) for kind, tensor in tensors.items() if kind != "weight")
    scale = stored_scale.float()
    _check_scale(kind, scale)
    if (scale < 0).any():
        raise FaultyTensorError(kind, "holds a negative scale")
    if values.numel() and (values.view(torch.uint8) & 0x7F).max() == _NO_NUMBER:
        raise FaultyTensorError("weight", "holds values that are no numbers")
    out_size, in_size = values.shape
    return HeldWeight(values, _by_row(scale, weight_format, out_size), weight_format.columns or in_size)


def _decode_mxfp4(tensors: Mapping[str, Tensor], out_size: int, in_size: int) -> HeldWeight:
    codes = mxfp4_codes(tensors["blocks"]).view(out_size, in_size)
    scale = mxfp4_scales(tensors["scales"], codes.unflatten(1, (-1, MXFP4.group_size)))
    _check_scale("scales", scale)
    return HeldWeight(codes, scale, MXFP4.group_size)


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return the 4 or 8 bits wide numbers of words of 32 bits, lowest bits first: uint8 [rows, words * 32 / bits]."""
    # Flat, since strides of dimensions of length 1 are anything. All CPUs that torch is built for are little-endian.
    numbers = words.contiguous().flatten().view(torch.uint8).view(len(words), -1)
    if bits == 8:
        return numbers
    return torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(1)


def signed(numbers: Tensor, bits: int) -> Tensor:
    """Return what is stored with an offset of half the range as int8."""
    return (numbers - (1 << (bits - 1))).view(torch.int8)


def _awq_columns(numbers: Tensor) -> Tensor:
    """Brings the columns of AutoAWQ's layout into their order."""
    return numbers.unflatten(1, (-1, 8)).index_select(2, _AWQ_NIBBLES).flatten(1)


def _by_row(blocks: Tensor, weight_format: WeightFormat, out_size: int) -> Tensor:
    """Return what belongs to blocks for each output: [out, blocks of columns]."""
    rows = blocks.reshape(blocks.shape[0] if blocks.dim() else 1, -1)
    return rows if len(rows) == out_size else rows.repeat_interleave(weight_format.rows or out_size, 0)[:out_size]


def _check_scale(kind: str, scale: Tensor) -> None:
    if not scale.float().isfinite().all():
        raise FaultyTensorError(kind, "holds scales that are no numbers")


def _column_groups(kind: str, tensors: Mapping[str, Tensor], num_groups: int) -> Tensor | None:
    """The group of each column; None: groups are consecutive columns."""
    groups = tensors.get(kind)
    if groups is None:
        return None
    found = groups.long()
    if found.min() < 0 or found.max() >= num_groups:
        odd = found[(found < 0) | (found >= num_groups)][0].item()
        raise FaultyTensorError(kind, f"names group {odd} of a weight that has {num_groups}")
    consecutive = torch.arange(len(found)) // (len(found) // num_groups)
    return None if torch.equal(found, consecutive) else found


def _assemble(codes: Tensor, stored_scale: Tensor, zeros: Tensor | None, column_groups: Tensor | None) -> HeldWeight:
    """(code - zero) * scale, for codes int8 [out, in], and scales and zeros [out, groups]; floats, where groups are not
    of neighbours."""
    scale = stored_scale.float().contiguous()
    group_size = codes.shape[1] // scale.shape[1]
    zeros = None if zeros is None or not zeros.any() else zeros.contiguous()
    if column_groups is None:
        return HeldWeight(codes, scale, group_size, zero=zeros)
    weight = torch.empty(codes.shape)
    for rows in _chunks(*codes.shape):
        chunk = weight[rows].copy_(codes[rows])
        if zeros is not None:
            chunk.sub_(zeros[rows].float().index_select(1, column_groups))
        chunk.mul_(scale[rows].index_select(1, column_groups))
    return HeldWeight(weight)


def _chunks(out_size: int, in_size: int) -> Iterator[slice]:
    num_rows = max(1, _CHUNK_ELEMENTS // max(1, in_size))
    for start in range(0, out_size, num_rows):
        yield slice(start, start + num_rows)


def copy_floats(target: Tensor, weight: HeldWeight) -> None:
    """Fills a tensor [out, in] of any dtype with a weight, dequantised."""
    for rows in _chunks(*target.shape):
        target[rows].copy_(weight[rows].dequantized())


def working_bytes(weight_format: WeightFormat, num_elements: int) -> int:
    """Return how much memory decoding a weight and `copy_floats` take at most beside the target."""
    chunk = 16 * min(num_elements, _CHUNK_ELEMENTS)
    layout = weight_format.layout
    # The bytes that are read, and the numbers that they become on their way into the order of columns.
    per_element = 2 if layout in ("fp8", "float-quantized", "int-quantized") else 5
    scales = (
        12 * num_elements // weight_format.columns if weight_format.columns else 0
    )  # as stored, and by row in floats
    return (per_element + (4 if weight_format.has_ordered_columns else 0)) * num_elements + scales + chunk
