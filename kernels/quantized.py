"""Weights of few bits, as every format's loader gives them and the CPU kernels pack them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Group sizes are multiples of this.
GROUP = 16
# Inputs whose scales may have a factor in common.
BLOCK = 256


@dataclass(frozen=True, slots=True)
class QuantizedFormat:
    """What is known of a quantised weight before it is read. It may turn out smaller."""

    bits: int  # of a code: more than 4 are kept in 8
    group_size: int  # a multiple of 16
    has_half_scales: bool  # scales and minima are float16 or bfloat16 numbers
    has_minima: bool
    has_zeros: bool = False
    has_factors: bool = False  # scales and minima are integers of 8 bits with a factor for each 256 inputs
    has_power_scales: bool = False  # scales are powers of two
    rounds_inputs: bool = False  # made for inputs that are rounded to codes of 8 bits

    def num_bytes(self, out_size: int, in_size: int) -> int:
        """Estimate the memory that a weight takes in the panels of the CPU kernels."""
        num_scales = 2 if self.has_minima else 1
        has_factors = self.has_factors and in_size % BLOCK == 0
        has_bytes = has_factors or self.has_power_scales
        scales = num_scales * (1 if has_bytes else 2 if self.has_half_scales else 4) + self.has_zeros
        groups = -(-in_size // min(self.group_size, 32))
        factors = in_size // BLOCK * 2 * num_scales if has_factors else 0
        return out_size * (in_size * (4 if self.bits <= 4 else 8) // 8 + groups * scales + factors)

    @staticmethod
    def join(formats: Sequence["QuantizedFormat"]) -> "QuantizedFormat":
        """Return the format of weights one below the other."""
        return QuantizedFormat(
            max(each.bits for each in formats),
            math.gcd(*(each.group_size for each in formats)),
            all(each.has_half_scales for each in formats),
            any(each.has_minima for each in formats),
            any(each.has_zeros for each in formats),
            all(each.has_factors for each in formats),
            all(each.has_power_scales for each in formats),
            all(each.rounds_inputs for each in formats),
        )


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight [out_size, in_size] in groups of `group_size` inputs: `scale * (codes - zero) - minimum`, in float32.

    Attributes:
        codes: int8 [out_size, in_size].
        scale: float32 [out_size, in_size / group_size].
        minimum: float32 of the same shape, what stands below 0; None: nothing.
        group_size: a multiple of 16.
        zero: int8 of the same shape, the code that stands for 0; None: 0.
        scale_factor: float32 [out_size, in_size / 256], what the scales of 256 inputs have in common: a scale is
            `scale * scale_factor`, rounded to float32. None: 1.
        minimum_factor: the same of minima. There is one if both `minimum` and `scale_factor` are there.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None
    group_size: int
    zero: Tensor | None = None
    scale_factor: Tensor | None = None
    minimum_factor: Tensor | None = None

    def __post_init__(self) -> None:
        """Raises ValueError if sizes or dtypes do not fit each other."""
        codes = self.codes
        if codes.dtype != torch.int8 or codes.ndim != 2:
            raise ValueError(f"codes are {codes.dtype} {tuple(codes.shape)}; they must be int8 in two dimensions")
        out_size, in_size = codes.shape
        if self.group_size < GROUP or self.group_size % GROUP:
            raise ValueError(f"groups of {self.group_size} are not served; their size must be a multiple of {GROUP}")
        if in_size % self.group_size:
            raise ValueError(f"groups of {self.group_size} do not divide {in_size} inputs")
        if self.scale_factor is not None and (in_size % BLOCK or BLOCK % self.group_size):
            raise ValueError(f"blocks of {BLOCK} do not divide {in_size} inputs in groups of {self.group_size}")
        if (self.minimum_factor is None) != (self.scale_factor is None or self.minimum is None):
            raise ValueError("minima have factors if scales have some")
        for name, values in self.parts().items():
            dtype = torch.int8 if name in ("codes", "zero") else torch.float32
            shape = (out_size, in_size // (1 if name == "codes" else BLOCK if "factor" in name else self.group_size))
            if values.dtype != dtype or values.shape != shape:
                raise ValueError(f"{name} is {values.dtype} {tuple(values.shape)}; it must be {dtype} {shape}")

    def parts(self) -> dict[str, Tensor]:
        """The tensors that are there, by the names of their attributes; rows of each belong to outputs."""
        names = ("codes", "scale", "minimum", "zero", "scale_factor", "minimum_factor")
        return {name: values for name in names if (values := getattr(self, name)) is not None}

    def with_each(self, change: Callable[[Tensor], Tensor]) -> "QuantizedWeight":
        """The weight of other outputs, whose parts are what `change` makes of these."""
        changed = {name: change(values) for name, values in self.parts().items()}
        return replace(self, **changed)  # type: ignore[arg-type]

    def without_factors(self) -> "QuantizedWeight":
        """The same weight, whose scales and minima are what they stand for."""
        if self.scale_factor is None:
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
        groups = self.codes.float().unflatten(1, (-1, self.group_size))
        if self.zero is not None:
            groups = groups - self.zero.float()[..., None]
        groups = groups * whole.scale[..., None]
        if whole.minimum is not None:
            groups = groups - whole.minimum[..., None]
        return groups.flatten(1)

    def __getitem__(self, rows: Tensor) -> "QuantizedWeight":
        """Return the weight that has these outputs, in this order."""
        return self.with_each(lambda values: values[rows])

    def in_groups_of(self, size: int) -> "QuantizedWeight":
        """The same weight in smaller groups, whose size divides that of today's."""
        finer = {
            name: values.repeat_interleave(self.group_size // size, 1)
            for name, values in self.parts().items()
            if name in ("scale", "minimum", "zero")
        }
        return replace(self, group_size=size, **finer)

    @staticmethod
    def join(weights: Sequence["QuantizedWeight"]) -> "QuantizedWeight":
        """Return the weight that has the outputs of several, all of as many inputs, one below the other."""
        if len(weights) == 1:
            return weights[0]
        if any(weight.scale_factor is None for weight in weights):
            weights = [weight.without_factors() for weight in weights]
        group_size = math.gcd(*(weight.group_size for weight in weights))
        found = [weight.in_groups_of(group_size).parts() for weight in weights]
        joined: dict[str, Tensor | None] = dict.fromkeys(("minimum", "minimum_factor"))
        for name in sorted({name for parts in found for name in parts}):
            like = "scale_factor" if name == "minimum_factor" else "scale"
            dtype = torch.int8 if name in ("codes", "zero") else torch.float32
            # Nothing is 0 of what only others have.
            joined[name] = torch.cat([parts.get(name, torch.zeros_like(parts[like], dtype=dtype)) for parts in found])
        return QuantizedWeight(**joined, group_size=group_size)  # type: ignore[arg-type]
