"""What a layout of quantised weights says, and what several have in common.

A weight [out, in] is `(code - zero) * scale`, in float32, whatever the scale is stored in.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagewire.kernels.weight import GROUP_UNIT, HeldFormat, HeldWeight, unit_size
from pagewire.network.quantization import WeightFormat

SCALES = ("F32", "BF16", "F16")
_CODES = HeldFormat(torch.int8, GROUP_UNIT, has_half_scales=True)
_CHUNK_ELEMENTS = 1 << 20  # of a weight that are made floats at a time


TensorShape = tuple[int, ...]
ReadTensors = Mapping[str, Tensor]  # by the ends of their names


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a tensor of a weight must be in the checkpoint: of one of these dtypes, as safetensors spells them, in one
    of the shapes of that."""

    shapes: Mapping[str, tuple[TensorShape, ...]]
    is_optional: bool = False
    other_kind: str = ""  # the end of another name that it may have

    @staticmethod
    def of(
        dtypes: Iterable[str], *shapes: TensorShape, is_optional: bool = False, other_kind: str = ""
    ) -> "StoredTensor":
        """One of these shapes, whichever dtype it has."""
        return StoredTensor(dict.fromkeys(dtypes, shapes), is_optional, other_kind)


class FaultyTensorError(Exception):
    """A tensor of a weight holds what it cannot. Of two arguments: the end of its name, and the fault."""


@dataclass(frozen=True, slots=True)
class Layout:
    """All that is known of a layout. Its functions are given a `WeightFormat` that has its name.

    Attributes:
        stored: returns the tensors that a weight [out_size, in_size] is made of, by the ends of their names. Raises
            ValueError if none of these sizes can be in this format.
        decode: returns the weight that these tensors make up. Raises FaultyTensorError if one holds what it cannot.
        held: what kernels hold a weight in, but for what its own format says.
        read_bytes: for an element, those that are read, and the numbers that they become on their way into the order of
            columns.
        has_spare_biases: checkpoints may hold biases of 0 for models without any.
    """

    name: str
    stored: Callable[[WeightFormat, int, int], dict[str, StoredTensor]]
    decode: Callable[[WeightFormat, ReadTensors, int, int], HeldWeight]
    held: HeldFormat = _CODES
    read_bytes: int = 5
    has_spare_biases: bool = False

    def held_format(self, kept: WeightFormat, in_size: int, has_wide_scales: bool) -> HeldFormat | None:
        """Return what kernels hold a weight of so many inputs in; None: in floats, as groups that have no panels, and
        those of columns that are not neighbours."""
        group_size = kept.columns or in_size
        if kept.has_ordered_columns or not unit_size(self.held.element, group_size, in_size):
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
        """Return how much memory decoding a weight and `copy_floats` take at most beside the target."""
        # As stored, and by row in floats.
        scales = 12 * num_elements // kept.columns if kept.columns else 0
        chunk = 16 * min(num_elements, _CHUNK_ELEMENTS)
        return (self.read_bytes + 4 * kept.has_ordered_columns) * num_elements + scales + chunk


def num_groups(kept: WeightFormat, in_size: int) -> int:
    """Return how many groups the inputs make up. Raises ValueError where one would be cut."""
    group_size = kept.columns or in_size
    if in_size % group_size:
        raise ValueError(f"its {in_size} inputs are no multiple of the group size {group_size}")
    return in_size // group_size


def scale_shapes(kept: WeightFormat, out_size: int, in_size: int) -> tuple[TensorShape, ...]:
    """A scale for each block; dimensions of length 1 may be left out from the end."""
    num_rows, num_columns = num_blocks(out_size, kept.rows), num_blocks(in_size, kept.columns)
    if num_columns > 1:
        return ((num_rows, num_columns),)
    if num_rows > 1 or kept.rows == 1:
        return (num_rows, 1), (num_rows,)
    return (1, 1), (1,), ()


def num_blocks(size: int, block: int) -> int:
    return -(-size // block) if block else 1


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return the 4 or 8 bits wide numbers of words of 32 bits, lowest bits first: uint8 [rows, words * 32 / bits]."""
    # Flat, since strides of dimensions of length 1 are anything. All CPUs that torch is built for are little-endian.
    numbers = words.contiguous().flatten().view(torch.uint8).view(len(words), -1)
    return numbers if bits == 8 else torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(1)


def signed(numbers: Tensor, bits: int) -> Tensor:
    """Return what is stored with an offset of half the range as int8."""
    return (numbers - (1 << (bits - 1))).view(torch.int8)


def by_row(blocks: Tensor, kept: WeightFormat, out_size: int) -> Tensor:
    """Return what belongs to blocks for each output: [out, blocks of columns]."""
    rows = blocks.reshape(blocks.shape[0] if blocks.dim() else 1, -1)
    return rows if len(rows) == out_size else rows.repeat_interleave(kept.rows or out_size, 0)[:out_size]


def checked_scale(kind: str, stored: Tensor) -> Tensor:
    """Return the scales in float32. Raises FaultyTensorError if one is no number."""
    scale = stored.float().contiguous()
    if not scale.isfinite().all():
        raise FaultyTensorError(kind, "holds scales that are no numbers")
    return scale


def groups_of_columns(kind: str, tensors: ReadTensors, num_groups: int) -> Tensor | None:
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


def assemble(codes: Tensor, scale: Tensor, zeros: Tensor | None, column_groups: Tensor | None) -> HeldWeight:
    """(code - zero) * scale, for codes int8 [out, in], and scales and zeros [out, groups]; floats, where groups are not
    of neighbours."""
    zeros = None if zeros is None or not zeros.any() else zeros.contiguous()
    if column_groups is None:
        return HeldWeight(codes, scale, codes.shape[1] // scale.shape[1], zero=zeros)
    weight = torch.empty(codes.shape)
    for rows in _chunks(*codes.shape):
        chunk = weight[rows].copy_(codes[rows])
        if zeros is not None:
            chunk.sub_(zeros[rows].float().index_select(1, column_groups))
        chunk.mul_(scale[rows].index_select(1, column_groups))
    return HeldWeight(weight)


def copy_floats(target: Tensor, weight: HeldWeight) -> None:
    """Fills a tensor [out, in] of any dtype with a weight, dequantised."""
    for rows in _chunks(*target.shape):
        target[rows].copy_(weight[rows].dequantized())


def _chunks(out_size: int, in_size: int) -> Iterator[slice]:
    num_rows = max(1, _CHUNK_ELEMENTS // max(1, in_size))
    for start in range(0, out_size, num_rows):
        yield slice(start, start + num_rows)
