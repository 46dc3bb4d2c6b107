"""A weight as every source of weights gives it, whatever it is made of, and as every kernel that packs it takes it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
# Inputs whose scales may have a factor in common.
BLOCK = 256
# Inputs that have a scale together in panels of the CPU kernels, a unit, are at most so many, and a multiple of those.
_MAX_UNITS = {torch.int8: 32, FLOAT8: 128}
GROUP_UNIT = 16
# What each byte of float8 means. A look-up is several times as fast as torch's conversion on CPUs.
_FLOATS = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float()


def unit_size(element: torch.dtype, group_size: int, in_size: int) -> int:
    """Inputs that have a scale together in panels of the CPU kernels; 0: such groups have no panels."""
    unit = math.gcd(group_size, in_size, _MAX_UNITS[element])
    is_cut = element == torch.int8 and in_size % group_size
    return 0 if is_cut or unit % GROUP_UNIT else unit


@dataclass(frozen=True, slots=True)
class HeldFormat:
    """What is known of a weight before it is read. It may turn out smaller."""

    element: torch.dtype  # float32, bfloat16 or float16, which mean themselves; int8, of codes, or float8_e4m3fn
    group_size: int = 0  # inputs that have a scale in common: of codes a multiple of 16; 0: there are no scales
    bits: int = 8  # of a code: more than 4 are kept in 8
    has_half_scales: bool = False  # scales and minima are float16 or bfloat16 numbers
    has_minima: bool = False
    has_zeros: bool = False
    has_factors: bool = False  # scales and minima are integers of 8 bits with a factor for each 256 inputs
    has_power_scales: bool = False  # scales are powers of two
    rounds_inputs: bool = False  # made for inputs that are rounded to 8 bits of the same kind

    def describe(self) -> str:
        """Name the elements."""
        names = {FLOAT8: "float8", torch.int8: f"codes of {self.bits} bits"}
        return names.get(self.element) or str(self.element).removeprefix("torch.")

    def num_bytes(self, out_size: int, in_size: int) -> int:
        """Estimate the memory that a weight takes in panels of the CPU kernels, which there must be."""
        num_scales, has_factors = 1 + self.has_minima, self.has_factors and in_size % BLOCK == 0
        scale_bytes = 1 if has_factors or self.has_power_scales else 2 if self.has_half_scales else 4
        groups = in_size // unit_size(self.element, self.group_size, in_size)
        factors = in_size // BLOCK * 2 * num_scales if has_factors else 0
        codes = in_size * (4 if self.bits <= 4 else 8) // 8
        return out_size * (codes + groups * (num_scales * scale_bytes + self.has_zeros) + factors)

    @staticmethod
    def join(formats: Sequence["HeldFormat"]) -> "HeldFormat":
        """Return the format of weights of one element, one below the other."""
        (element,) = {each.element for each in formats}
        return HeldFormat(
            element,
            math.gcd(*(each.group_size for each in formats)),
            max(each.bits for each in formats),
            all(each.has_half_scales for each in formats),
            any(each.has_minima for each in formats),
            any(each.has_zeros for each in formats),
            all(each.has_factors for each in formats),
            all(each.has_power_scales for each in formats),
            all(each.rounds_inputs for each in formats),
        )


@dataclass(frozen=True, slots=True, eq=False)
class HeldWeight:
    """A weight [out_size, in_size] of floats, or in groups of inputs that have a scale in common:
    `scale * (values - zero) - minimum`, in float32. Groups are consecutive inputs of one output; the last may be
    shorter.

    Attributes:
        values: [out_size, in_size], float32, bfloat16 or float16, which mean themselves; or float8_e4m3fn, or int8, of
            codes, which have a scale.
        scale: float32 [out_size, in_size / group_size].
        group_size: 0: there are no scales.
        minimum: float32 of the same shape, what stands below 0; None: nothing.
        zero: int8 of the same shape, the value that stands for 0; None: 0.
        scale_factor: float32 [out_size, in_size / 256], what the scales of 256 inputs have in common: a scale is
            `scale * scale_factor`, rounded to float32. None: 1.
        minimum_factor: the same of minima. There is one if both `minimum` and `scale_factor` are there.
    """

    values: Tensor
    scale: Tensor | None = None
    group_size: int = 0
    minimum: Tensor | None = None
    zero: Tensor | None = None
    scale_factor: Tensor | None = None
    minimum_factor: Tensor | None = None

    def __post_init__(self) -> None:
        """Raises ValueError if sizes or dtypes do not fit each other."""
        if self.scale is None:
            return
        if self.element not in _MAX_UNITS or self.values.ndim != 2:
            shape = tuple(self.values.shape)
            raise ValueError(f"values are {self.element} {shape}; with scales they must be int8 or float8_e4m3fn, 2-D")
        out_size, in_size = self.values.shape
        if self.scale_factor is not None and (in_size % BLOCK or BLOCK % self.group_size):
            raise ValueError(f"blocks of {BLOCK} do not divide {in_size} inputs in groups of {self.group_size}")
        if (self.minimum_factor is None) != (self.scale_factor is None or self.minimum is None):
            raise ValueError("minima have factors if scales have some")
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
        """The tensors that are there, by the names of their attributes; rows of each belong to outputs."""
        names = ("values", "scale", "minimum", "zero", "scale_factor", "minimum_factor")
        return {name: part for name in names if (part := getattr(self, name)) is not None}

    def with_each(self, change: Callable[[Tensor], Tensor]) -> "HeldWeight":
        """The weight of other outputs, whose parts are what `change` makes of these."""
        changed = {name: change(part) for name, part in self.parts().items()}
        return replace(self, **changed)  # type: ignore[arg-type]

    def __getitem__(self, rows: Tensor | slice) -> "HeldWeight":
        """Return the weight that has these outputs, in this order."""
        return self.with_each(lambda part: part[rows])

    def cut(self, columns: slice) -> "HeldWeight":
        """Return the weight that has these inputs, which are cut between groups."""
        if columns == slice(None):
            return self
        whole = self.without_factors()  # whose blocks may be cut
        first, stop, _ = columns.indices(self.values.shape[1])
        size = self.group_size
        groups = {
            name: part if part.shape[1] == 1 else part[:, first // size : -(-stop // size)].contiguous()
            for name, part in whole.parts().items()
            if name != "values"
        }
        values = self.values[:, columns].contiguous()
        return replace(whole, values=values, group_size=min(size, stop - first), **groups)

    def without_factors(self) -> "HeldWeight":
        """The same weight, whose scales and minima are what they stand for."""
        if self.scale is None or self.scale_factor is None:
            return self
        per_block = BLOCK // self.group_size
        scale = self.scale * self.scale_factor.repeat_interleave(per_block, 1)
        minimum = self.minimum
        if minimum is not None and self.minimum_factor is not None:
            minimum = minimum * self.minimum_factor.repeat_interleave(per_block, 1)
        return replace(self, scale=scale, minimum=minimum, scale_factor=None, minimum_factor=None)

    def dequantized(self) -> Tensor:
        """The weight in float32, [out_size, in_size]: a product that is rounded, then a difference."""
        whole = self.without_factors()
        values = _widened(self.values)
        if whole.zero is not None:
            values.sub_(whole._of_inputs(whole.zero))
        if whole.scale is not None:
            values.mul_(whole._of_inputs(whole.scale))
        if whole.minimum is not None:
            values.sub_(whole._of_inputs(whole.minimum))
        return values

    def to_floats(self, dtype: torch.dtype) -> Tensor:
        """The weight in a dtype of floats, which may be the one that it has."""
        return (self.values if self.scale is None else self.dequantized()).to(dtype)

    def in_groups_of(self, size: int) -> "HeldWeight":
        """The same weight in smaller groups, whose size divides that of today's."""
        num_groups = -(-self.values.shape[1] // size) if size else 0
        finer = {
            name: part.repeat_interleave(self.group_size // size, 1)[:, :num_groups]
            for name, part in self.parts().items()
            if name in ("scale", "minimum", "zero")
        }
        return replace(self, group_size=size, **finer)

    @staticmethod
    def join(weights: Sequence["HeldWeight"]) -> "HeldWeight":
        """Return the weight that has the outputs of several, all of as many inputs, one below the other. Where their
        elements differ, it is of float32."""
        if len(weights) == 1:
            return weights[0]
        if len({weight.element for weight in weights}) > 1:
            return HeldWeight(torch.cat([weight.dequantized() for weight in weights]))
        if any(weight.scale_factor is None for weight in weights):
            weights = [weight.without_factors() for weight in weights]
        group_size = math.gcd(*(weight.group_size for weight in weights))
        found = [weight.in_groups_of(group_size).parts() for weight in weights]
        # Nothing is 0 of what only others have.
        joined = {
            name: torch.cat([parts[name] if name in parts else _nothing(name, parts) for parts in found])
            for name in {name for parts in found for name in parts}
        }
        return HeldWeight(**joined, group_size=group_size)

    def _of_inputs(self, part: Tensor) -> Tensor:
        """[out_size, in_size] of what groups have; [out_size, 1] where there is one group."""
        return part if part.shape[1] == 1 else part.repeat_interleave(self.group_size, 1)[:, : self.values.shape[1]]


def _widened(values: Tensor) -> Tensor:
    """Float32 numbers, which are new ones where they are not of floats of 16 or 32 bits."""
    if values.dtype != FLOAT8:
        return values.float()
    codes = values.view(torch.uint8).int()
    return _FLOATS.to(codes.device).index_select(0, codes.flatten()).view(codes.shape)


def _nothing(name: str, parts: dict[str, Tensor]) -> Tensor:
    like = parts["scale_factor" if "factor" in name else "scale"]
    return torch.zeros_like(like, dtype=torch.int8 if name == "zero" else torch.float32)
