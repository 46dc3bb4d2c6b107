"""The common representation of weights, which all checkpoint readers produce and all packing kernels accept."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
# Number of inputs whose scales may share a factor.
BLOCK = 256
# Inputs that share a scale in packed panels of the CPU kernels, called a unit: at most _MAX_UNITS, and a multiple of
# GROUP_UNIT.
_MAX_UNITS = {torch.int8: 32, FLOAT8: 128}
GROUP_UNIT = 16
# The value of each float8 byte. On CPUs a table lookup is several times as fast as torch's conversion.
_FLOATS = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float()


def unit_size(element: torch.dtype, group_size: int, in_size: int) -> int:
    """Return the size of the units into which the CPU kernels divide the quantization groups of a weight when they pack
    it. The inputs of a unit share a scale. The unit is the group itself or a part of it.

    Return 0 if groups of this size cannot be packed.
    """
    unit = math.gcd(group_size, in_size, _MAX_UNITS[element])
    is_cut = element == torch.int8 and in_size % group_size
    return 0 if is_cut or unit % GROUP_UNIT else unit


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """The memory format of a weight as far as it is known before the weight is read from the checkpoint. The weight
    that is then read may need less memory."""

    element: torch.dtype  # float32, bfloat16, float16 (values), or int8 (codes), float8_e4m3fn
    group_size: int = 0  # inputs that share a scale, for codes a multiple of 16; 0: no scales
    bits: int = 8  # bits of a code; CPU kernels store it in 4, 6 or 8, GPU kernels in 4 or 8
    has_half_scales: bool = False  # scales and minima are float16 or bfloat16 numbers
    has_minima: bool = False
    has_zeros: bool = False
    has_factors: bool = False  # scales and minima are integers of 8 bits with a factor for each 256 inputs
    has_power_scales: bool = False  # scales are powers of two
    rounds_inputs: bool = False  # inputs are to be rounded to 8 bits of the same kind
    # Codes of 4 bits stand for at most 16 values of 8 bits, which GPU kernels store instead. The name of these values.
    table: str = ""

    def describe(self) -> str:
        """Return the name of the type of the weight's elements for log lines, such as "bfloat16" or "codes of 4
        bits"."""
        names = {FLOAT8: "float8", torch.int8: f"codes of {self.bits} bits"}
        return names.get(self.element) or str(self.element).removeprefix("torch.")

    def num_bytes(self, out_size: int, in_size: int) -> int:
        """Estimate the memory, in bytes, of a weight [out_size, in_size] of this format after the CPU kernels have
        packed it. The CPU kernels must support the group size, so `unit_size` must not be 0."""
        num_scales, has_factors = 1 + self.has_minima, self.has_factors and in_size % BLOCK == 0
        scale_bytes = 1 if has_factors or self.has_power_scales else 2 if self.has_half_scales else 4
        groups = in_size // unit_size(self.element, self.group_size, in_size)
        factors = in_size // BLOCK * 2 * num_scales if has_factors else 0
        codes = in_size * (4 if self.bits <= 4 else 6 if self.bits <= 6 else 8) // 8
        return out_size * (codes + groups * (num_scales * scale_bytes + self.has_zeros) + factors)

    @staticmethod
    def join(formats: Sequence["StoredFormat"]) -> "StoredFormat":
        """Return the format of several weights that are concatenated along the outputs, such as Q, K and V. All formats
        must have the same element type."""
        (element,) = {each.element for each in formats}
        table, *others = {each.table for each in formats}  # several tables have more than 16 values together
        return StoredFormat(
            element,
            math.gcd(*(each.group_size for each in formats)),
            8 if others else max(each.bits for each in formats),
            all(each.has_half_scales for each in formats),
            any(each.has_minima for each in formats),
            any(each.has_zeros for each in formats),
            all(each.has_factors for each in formats),
            all(each.has_power_scales for each in formats),
            all(each.rounds_inputs for each in formats),
            "" if others else table,
        )


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeight:
    """The weight [out_size, in_size] of a linear layer, as read from a checkpoint: floats, or quantised values in
    groups of inputs that share a scale.

    With scales, the weight is `scale * (values - zero) - minimum`, in float32. A group is a number of consecutive
    inputs of one output; the last group may be shorter.

    Attributes:
        values: [out_size, in_size]; float32, bfloat16 or float16 without scales, or float8_e4m3fn or int8 codes with
            scales.
        scale: float32 [out_size, ceil(in_size / group_size)]; None means no scales.
        group_size: number of inputs that share a scale; 0 means no scales.
        minimum: float32 of the same shape, subtracted from the scaled values; None means 0.
        zero: int8 of the same shape, the code of the value 0; None means 0.
        scale_factor: float32 [out_size, in_size / 256], a factor that the scales of 256 inputs share: a scale is `scale
            * scale_factor`, rounded to float32. None means 1.
        minimum_factor: the same for minima. It exists exactly if both `minimum` and `scale_factor` exist.
    """

    values: Tensor
    scale: Tensor | None = None
    group_size: int = 0
    minimum: Tensor | None = None
    zero: Tensor | None = None
    scale_factor: Tensor | None = None
    minimum_factor: Tensor | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if the sizes or dtypes of the weight's values, scales, minima and zeros do not match."""
        if self.scale is None:
            return
        if self.element not in _MAX_UNITS or self.values.ndim != 2:
            shape = tuple(self.values.shape)
            raise ValueError(f"values are {self.element} {shape}; with scales they must be int8 or float8_e4m3fn, 2-D")
        out_size, in_size = self.values.shape
        if self.scale_factor is not None and (in_size % BLOCK or BLOCK % self.group_size):
            raise ValueError(f"blocks of {BLOCK} do not divide {in_size} inputs in groups of {self.group_size}")
        if (self.minimum_factor is None) != (self.scale_factor is None or self.minimum is None):
            raise ValueError("minimum_factor must be set exactly if minimum and scale_factor are set")
        for name, part in self.parts().items():
            dtype = {"values": self.element, "zero": torch.int8}.get(name, torch.float32)
            size = 1 if name == "values" else BLOCK if "factor" in name else self.group_size
            if part.dtype != dtype or part.shape != (out_size, -(-in_size // size)):
                shape = (out_size, -(-in_size // size))
                raise ValueError(f"{name} is {part.dtype} {tuple(part.shape)}; it must be {dtype} {shape}")

    @property
    def element(self) -> torch.dtype:
        return self.values.dtype

    def parts(self) -> dict[str, Tensor]:
        """Return a dictionary of the tensors of this weight (values, scales, minima and so on) that are not None, keyed
        by attribute name. Each row of a tensor belongs to one output."""
        names = ("values", "scale", "minimum", "zero", "scale_factor", "minimum_factor")
        return {name: part for name in names if (part := getattr(self, name)) is not None}

    def with_each(self, change: Callable[[Tensor], Tensor]) -> "StoredWeight":
        """Return a new weight in which each tensor (values, scales and so on) is replaced by `change(tensor)`. `change`
        may select or reorder outputs, but must not alter the inputs."""
        changed = {name: change(part) for name, part in self.parts().items()}
        return replace(self, **changed)  # type: ignore[arg-type]

    def __getitem__(self, rows: Tensor | slice) -> "StoredWeight":
        """Return the weight with only the selected outputs, in the order of `rows`."""
        return self.with_each(lambda part: part[rows])

    def cut(self, columns: slice) -> "StoredWeight":
        """Return the weight with only the inputs (columns) in the slice `columns`, for example the part that one rank
        computes. The slice must begin and end between groups of inputs that share a scale."""
        if columns == slice(None):
            return self
        whole = self.without_factors()  # because the slice may cut blocks of 256 inputs
        first, stop, _ = columns.indices(self.values.shape[1])
        size = self.group_size
        groups = {
            name: part if part.shape[1] == 1 else part[:, first // size : -(-stop // size)].contiguous()
            for name, part in whole.parts().items()
            if name != "values"
        }
        values = self.values[:, columns].contiguous()
        return replace(whole, values=values, group_size=min(size, stop - first), **groups)

    def without_factors(self) -> "StoredWeight":
        """Multiply the scales and minima by the factors that they share, and return the weight in this form. The
        represented values do not change."""
        if self.scale is None or self.scale_factor is None:
            return self
        per_block = BLOCK // self.group_size
        scale = self.scale * self.scale_factor.repeat_interleave(per_block, 1)
        minimum = self.minimum
        if minimum is not None and self.minimum_factor is not None:
            minimum = minimum * self.minimum_factor.repeat_interleave(per_block, 1)
        return replace(self, scale=scale, minimum=minimum, scale_factor=None, minimum_factor=None)

    def dequantized(self) -> Tensor:
        """Return the values that the weight represents, as float32 [out_size, in_size]. The product of code and scale
        is rounded to float32 before the minimum is subtracted."""
        whole = self.without_factors()
        values = _widened(self.values)
        if whole.zero is not None:
            values.sub_(whole._expand_groups(whole.zero))
        if whole.scale is not None:
            values.mul_(whole._expand_groups(whole.scale))
        if whole.minimum is not None:
            values.sub_(whole._expand_groups(whole.minimum))
        return values

    def to_floats(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in the float dtype `dtype`, and dequantise it first if it has scales. Values that already
        have this dtype are not copied."""
        return (self.values if self.scale is None else self.dequantized()).to(dtype)

    def in_groups_of(self, size: int) -> "StoredWeight":
        """Return the same quantised weight with smaller groups of `size` inputs, by repeating scales, minima and zeros.
        `size` must divide the current group size."""
        num_groups = -(-self.values.shape[1] // size) if size else 0
        finer = {
            name: part.repeat_interleave(self.group_size // size, 1)[:, :num_groups]
            for name, part in self.parts().items()
            if name in ("scale", "minimum", "zero")
        }
        return replace(self, group_size=size, **finer)

    @staticmethod
    def join(weights: Sequence["StoredWeight"]) -> "StoredWeight":
        """Concatenate several weights along the outputs, for example to merge Q, K and V into one matrix
        multiplication.

        All weights must have the same number of inputs. If their element types differ, the result is float32.
        """
        if len(weights) == 1:
            return weights[0]
        if len({weight.element for weight in weights}) > 1:
            return StoredWeight(torch.cat([weight.dequantized() for weight in weights]))
        if any(weight.scale_factor is None for weight in weights):
            weights = [weight.without_factors() for weight in weights]
        group_size = math.gcd(*(weight.group_size for weight in weights))
        found = [weight.in_groups_of(group_size).parts() for weight in weights]
        # A part that is missing in one weight counts as zero.
        joined = {
            name: torch.cat([parts[name] if name in parts else _missing_part(name, parts) for parts in found])
            for name in {name for parts in found for name in parts}
        }
        return StoredWeight(**joined, group_size=group_size)

    def _expand_groups(self, part: Tensor) -> Tensor:
        """Expand scales, minima or zeros from one value per group to one value per input, [out_size, in_size]. If there
        is only one group, return [out_size, 1], which broadcasts."""
        return part if part.shape[1] == 1 else part.repeat_interleave(self.group_size, 1)[:, : self.values.shape[1]]


def _widened(values: Tensor) -> Tensor:
    """Convert the values of a weight to float32. The result is a new tensor unless the values are already float32."""
    if values.dtype != FLOAT8:
        return values.float()
    codes = values.view(torch.uint8).int()
    return _FLOATS.to(codes.device).index_select(0, codes.flatten()).view(codes.shape)


def _missing_part(name: str, parts: dict[str, Tensor]) -> Tensor:
    like = parts["scale_factor" if "factor" in name else "scale"]
    return torch.zeros_like(like, dtype=torch.int8 if name == "zero" else torch.float32)
