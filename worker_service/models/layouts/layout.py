"""The description of a layout of quantised weights, and functions that several layouts share.

A weight [out, in] is `(code - zero) * scale`, computed in float32 for any dtype of the scale.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagewire.kernels.weight import GROUP_UNIT, StoredFormat, StoredWeight, unit_size
from pagewire.network.weight_formats import WeightFormat

SCALES = ("F32", "BF16", "F16")
_CODES = StoredFormat(torch.int8, GROUP_UNIT, has_half_scales=True)
_CHUNK_ELEMENTS = 1 << 20  # elements of a weight that are converted to floats at a time


TensorShape = tuple[int, ...]
ReadTensors = Mapping[str, Tensor]  # keyed by the suffixes of their names


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The dtypes and shapes that a checkpoint may use for one tensor of a quantised weight, such as its scales.
    `shapes` maps each allowed dtype, by its name in safetensors, to the shapes that are allowed with this dtype; an
    empty tuple allows all shapes."""

    shapes: Mapping[str, tuple[TensorShape, ...]]
    is_optional: bool = False
    other_kind: str = ""  # the suffix of an alternative name for the tensor

    @staticmethod
    def of(
        dtypes: Iterable[str], *shapes: TensorShape, is_optional: bool = False, other_kind: str = ""
    ) -> "StoredTensor":
        """Describe a tensor for which each of the given shapes, or any shape, is allowed with each of the given
        dtypes."""
        return StoredTensor(dict.fromkeys(dtypes, shapes), is_optional, other_kind)


class FaultyTensorError(Exception):
    """Raised if a tensor of a quantised weight has invalid content, such as a scale that is not finite. The two
    arguments are the suffix of the tensor's name and a description of the fault."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout in which checkpoints store quantised weights, such as AWQ or GPTQ, with the functions that check and
    decode the tensors. The functions receive a `WeightFormat` that names this layout.

    Attributes:
        stored: returns the tensors that store a weight [out_size, in_size], keyed by the suffixes of their names.
            Raises ValueError if a weight of these sizes cannot have this format.
        decode: returns the weight that these tensors represent. Raises FaultyTensorError if one has invalid content.
        held: the format in which kernels keep a weight, before the fields of its `WeightFormat` are applied. If None,
            weights are always dequantised to floats.
        read_bytes: memory per element while a weight is decoded: the bytes read, and the numbers they are converted to
            before their columns are reordered.
        may_have_zero_biases: checkpoints may contain biases of 0 for models without biases.
    """

    name: str
    stored: Callable[[WeightFormat, int, int], dict[str, StoredTensor]]
    decode: Callable[[WeightFormat, ReadTensors, int, int], StoredWeight]
    held: StoredFormat | None = _CODES
    read_bytes: int = 5
    may_have_zero_biases: bool = False

    def stored_format(self, kept: WeightFormat, in_size: int, has_wide_scales: bool) -> StoredFormat | None:
        """Return the format in which the kernels keep a weight with `in_size` inputs. Return None if the weight must be
        dequantised to floats: if the kernels do not support the layout or the group size, or if the columns of a group
        are not neighbours (act-order)."""
        group_size = kept.columns or in_size
        if self.held is None or kept.has_act_order or not unit_size(self.held.element, group_size, in_size):
            return None
        return replace(
            self.held,
            group_size=group_size,
            bits=kept.bits,
            has_half_scales=self.held.has_half_scales and not has_wide_scales,
            has_zeros=not kept.is_symmetric,
            rounds_inputs=kept.rounds_inputs,
        )

    def working_bytes(self, kept: WeightFormat, num_elements: int) -> int:
        """Return an upper bound on the temporary memory, in bytes, needed to decode a weight with `num_elements`
        elements and dequantise it with `copy_floats`. The memory of the target tensor is not included."""
        # The scales as stored, and expanded to one float32 row per output.
        scales = 12 * num_elements // kept.columns if kept.columns else 0
        chunk = 16 * min(num_elements, _CHUNK_ELEMENTS)
        return (self.read_bytes + 4 * kept.has_act_order) * num_elements + scales + chunk


def num_groups(kept: WeightFormat, in_size: int) -> int:
    """Return the number of quantization groups among the `in_size` inputs of a weight. The inputs of a group share a
    scale. Raises ValueError if the group size does not divide `in_size`."""
    group_size = kept.columns or in_size
    if in_size % group_size:
        raise ValueError(f"its {in_size} inputs are not a multiple of the group size {group_size}")
    return in_size // group_size


def scale_shapes(kept: WeightFormat, out_size: int, in_size: int) -> tuple[TensorShape, ...]:
    """Return the shapes that a checkpoint may use for the scales of a weight [out_size, in_size] with one scale per
    quantization block. Dimensions of length 1 at the end may be left out."""
    num_rows, num_columns = num_blocks(out_size, kept.rows), num_blocks(in_size, kept.columns)
    if num_columns > 1:
        return ((num_rows, num_columns),)
    if num_rows > 1 or kept.rows == 1:
        return (num_rows, 1), (num_rows,)
    return (1, 1), (1,), ()


def num_blocks(size: int, block: int) -> int:
    """Return how many quantization blocks of `block` elements are needed for a dimension of length `size`. If `block`
    is 0, one block covers the whole dimension."""
    return -(-size // block) if block else 1


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack 4-bit or 8-bit codes from 32-bit words, lowest bits first: [rows, words] -> uint8 [rows, words * 32 /
    bits]."""
    # Flatten first: strides of dimensions of length 1 are arbitrary. All CPUs that torch supports are little-endian.
    numbers = words.contiguous().flatten().view(torch.uint8).view(len(words), -1)
    return numbers if bits == 8 else torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(1)


def signed(numbers: Tensor, bits: int) -> Tensor:
    """Convert unsigned codes of `bits` bits to signed int8 codes. Half the number of possible codes is subtracted."""
    return (numbers - (1 << (bits - 1))).view(torch.int8)


def expand_rows(blocks: Tensor, kept: WeightFormat, out_size: int) -> Tensor:
    """Repeat scales or zero points that several rows of a weight share, so that the result has one line for each row of
    the weight: [blocks of rows, blocks of columns] -> [out, blocks of columns]."""
    rows = blocks.reshape(blocks.shape[0] if blocks.dim() else 1, -1)
    return rows if len(rows) == out_size else rows.repeat_interleave(kept.rows or out_size, 0)[:out_size]


def checked_scale(kind: str, stored: Tensor) -> Tensor:
    """Return the stored scales of a weight in float32. `kind` is the suffix of the tensor's name. Raises
    FaultyTensorError if a scale is not finite."""
    scale = stored.float().contiguous()
    if not scale.isfinite().all():
        raise FaultyTensorError(kind, "has scales that are not finite")
    return scale


def groups_of_columns(kind: str, tensors: ReadTensors, num_groups: int) -> Tensor | None:
    """Return the index of the quantization group to which each column of a weight belongs (the g_idx tensor of GPTQ).
    Return None if each group consists of consecutive columns. Raises FaultyTensorError if a column refers to a group
    that does not exist."""
    groups = tensors.get(kind)
    if groups is None or not groups.any():  # some files without reordering have zeros
        return None
    found = groups.long()
    if found.min() < 0 or found.max() >= num_groups:
        odd = found[(found < 0) | (found >= num_groups)][0].item()
        raise FaultyTensorError(kind, f"refers to group {odd} of a weight that has {num_groups} groups")
    consecutive = torch.arange(len(found)) // (len(found) // num_groups)
    return None if torch.equal(found, consecutive) else found


def assemble(codes: Tensor, scale: Tensor, zeros: Tensor | None, column_groups: Tensor | None) -> StoredWeight:
    """Build the weight `(code - zero) * scale` from int8 codes [out, in], and scales and zero points [out, groups].
    Normally each group consists of consecutive columns, and the weight stays quantised. If `column_groups` gives
    another group for each column, the weight is returned in floats."""
    zeros = None if zeros is None or not zeros.any() else zeros.contiguous()
    if column_groups is None:
        return StoredWeight(codes, scale, codes.shape[1] // scale.shape[1], zero=zeros)
    weight = torch.empty(codes.shape)
    for rows in _chunks(*codes.shape):
        chunk = weight[rows].copy_(codes[rows])
        if zeros is not None:
            chunk.sub_(zeros[rows].float().index_select(1, column_groups))
        chunk.mul_(scale[rows].index_select(1, column_groups))
    return StoredWeight(weight)


def copy_floats(target: Tensor, weight: StoredWeight) -> None:
    """Convert a quantised weight to floats in `target` [out, in], which may have any dtype. The weight is converted a
    few rows at a time, to limit the temporary memory."""
    for rows in _chunks(*target.shape):
        target[rows].copy_(weight[rows].dequantized())


def _chunks(out_size: int, in_size: int) -> Iterator[slice]:
    num_rows = max(1, _CHUNK_ELEMENTS // max(1, in_size))
    for start in range(0, out_size, num_rows):
        yield slice(start, start + num_rows)
