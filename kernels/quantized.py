"""Weights of few bits, as every format's loader gives them and the CPU kernels pack them; how floats are rounded to
such, and what the codes of MXFP4 are.

Floats are rounded as llama.cpp does, bit for bit what PyPI `gguf` makes of them: 8 bits are its Q8_0, 4 bits its Q4_0.
Scales are float16 numbers; codes are found by the scale before it is rounded. This is in plain torch, which
`CpuKernels.quantize` is compared with.

MXFP4 are floats of 4 bits (E2M1) in groups of 32 with a power of two in common (E8M0), as the OCP Microscaling Formats
define them: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
All E2M1 numbers are halves of integers: a weight is codes of twice them, by scales of half the powers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Group sizes are multiples of this.
GROUP_UNIT = 16
# Inputs whose scales may have a factor in common.
BLOCK = 256
GROUP_SIZE = 32  # of MXFP4, and of floats that are rounded to codes
BITS = {"int8": 8, "int4": 4}  # that floats are rounded to, by the names that users have for them
_DOUBLED = torch.tensor((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), dtype=torch.int8)
# Of the two numbers of a byte, the one in its lower half first.
_PAIRS = torch.stack((_DOUBLED.repeat(16), _DOUBLED.repeat_interleave(16)), dim=1)  # [256, 2]
# Of each exponent, whose last stands for no number; ldexp is exact where the powers of torch need not be.
_HALVED = torch.tensor([*(math.ldexp(1.0, exponent - 128) for exponent in range(255)), math.nan])


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


MXFP4 = QuantizedFormat(4, GROUP_SIZE, has_half_scales=True, has_minima=False, has_power_scales=True)


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
        if self.group_size < GROUP_UNIT or self.group_size % GROUP_UNIT:
            raise ValueError(
                f"groups of {self.group_size} are not served; their size must be a multiple of {GROUP_UNIT}"
            )
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


def quantized_format(bits: int) -> QuantizedFormat:
    """Return the format of weights of 8 or 4 bits."""
    return QuantizedFormat(bits, GROUP_SIZE, has_half_scales=True, has_minima=False)


def quantize(values: Tensor, bits: int) -> QuantizedWeight:
    """Quantise float32 [rows, columns], whose columns are whole groups, to 8 or 4 bits.

    Raises ValueError for what is no finite number, or so large that a scale is none.
    """
    groups = values.unflatten(1, (-1, GROUP_SIZE))
    # By a tensor: by a number, torch on a GPU multiplies by its inverse, and the last bit differs.
    exact = groups.abs().amax(-1) / groups.new_tensor(127.0) if bits == 8 else _largest(groups) / -8
    scale = round_scale(exact)
    inverse = 1 / exact
    # All of a group is 0, or so small that its scale is.
    scaled = groups * inverse.where(inverse.isfinite(), 0.0)[..., None]
    codes = _rounded_away(scaled) if bits == 8 else scaled.add_(8.5).trunc_().clamp_(0, 15).sub_(8)
    return QuantizedWeight(codes.to(torch.int8).flatten(1), scale, None, GROUP_SIZE)


def round_scale(exact: Tensor) -> Tensor:
    """To float16 numbers. Raises ValueError for what is no finite one."""
    scale = exact.half().float()
    if not scale.isfinite().all():
        raise ValueError("it holds numbers that are not finite, or too large")
    return scale


def _largest(groups: Tensor) -> Tensor:
    """The number of each group that is furthest from 0, with its sign; the first of several."""
    return groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)


def _rounded_away(values: Tensor) -> Tensor:
    """To the nearest integer, and from halves away from 0."""
    whole = values.trunc()
    return whole.add_(((values - whole) * 2).trunc_())


def mxfp4_codes(packed: Tensor) -> Tensor:
    """Twice the MXFP4 numbers of bytes, int8 [bytes, 2], whatever the shape of the bytes is."""
    return _PAIRS.view(torch.int16).flatten().index_select(0, packed.flatten().int()).view(torch.int8).view(-1, 2)


def mxfp4_scales(exponents: Tensor, codes: Tensor) -> Tensor:
    """Half the powers of two that bytes of MXFP4 stand for, in float32 and of their shape; NaN where they stand for
    none.

    Args:
        codes: of the groups, [*exponents.shape, GROUP_SIZE]. Groups of zeros that have a power below all normal numbers
            are given 0 instead, which means the same.
    """
    scales = _HALVED.index_select(0, exponents.flatten().int()).view(exponents.shape)
    is_tiny = exponents < 2
    if is_tiny.any():
        scales.masked_fill_(is_tiny & ~codes.any(-1), 0.0)
    return scales
