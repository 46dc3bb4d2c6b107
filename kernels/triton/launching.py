"""Launching of kernels: tensors as kernel arguments, their validation, and repeated launches of the same kernel."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

import triton
import triton.language as tl

FLOATS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
INTEGERS = (torch.int32, torch.int64)
INTERPRETED = bool(triton.knobs.runtime.interpret)
ALIGNMENT = 16  # bytes: Triton compiles one variant for addresses that are multiples of this, one for others


class Strided(NamedTuple):
    """A tensor and its strides, passed to a Triton kernel as one tuple, whose fields the kernel receives as separate
    parameters. The last dimension must be dense, and its stride is left out."""

    data: Tensor
    strides: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> "Strided":
        """Return a tensor and its strides as one argument for a Triton kernel."""
        return Strided(tensor, tensor.stride()[:-1])


def check_tensor(
    name: str, tensor: Tensor | None, shape: tuple[int | str, ...], *dtypes: torch.dtype, is_strided: bool = False
) -> None:
    """Raise ValueError unless a tensor argument of a kernel has this shape, one of these dtypes, and dense memory.

    Args:
        name: name of the argument in the error message.
        tensor: the tensor; None is valid, for optional arguments.
        shape: the expected size of each dimension. A string, such as "max_blocks", matches any size.
        dtypes: accepted dtypes.
        is_strided: only the last dimension must be dense.
    """
    if tensor is None:
        return
    has_sizes = all(isinstance(size, str) or size == found for size, found in zip(shape, tensor.shape, strict=False))
    has_shape = tensor.dim() == len(shape) and has_sizes
    is_dense = tensor.is_contiguous() or (is_strided and (tensor.shape[-1] <= 1 or tensor.stride(-1) == 1))
    if not has_shape or tensor.dtype not in dtypes or not is_dense:
        raise ValueError(
            f"{name} is {list(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}; make it "
            f"[{', '.join(map(str, shape))}] {' or '.join(map(str, dtypes))}, "
            f"{'its last dimension dense' if is_strided else 'dense'}"
        )


def operand(query_dtype: torch.dtype, cache_dtype: torch.dtype) -> object:
    """Return the Triton dtype to which both operands of a dot product are converted. 8-bit floats are converted to
    float16, which is exact and needs fewer instructions than bfloat16. In Triton's interpreter, bfloat16 is converted
    to float32, because the interpreter cannot multiply bfloat16."""
    if query_dtype == torch.bfloat16 and cache_dtype == torch.float8_e4m3fn:
        return tl.float16
    if query_dtype == torch.bfloat16 and INTERPRETED:
        return tl.float32
    return FLOATS[query_dtype]


@dataclass(frozen=True, slots=True)
class RepeatedLaunch:
    """A Triton kernel with its grid and constants, which is launched many times. Repeated launches are fast because
    they skip Triton's inspection of the arguments.

    At every ordinary launch, Triton inspects all arguments to find the matching compiled variant of the kernel. This
    takes ten times as long as the launch itself. Here the caller instead passes a key for the arguments (their kind).
    All launches with the same kind use the variant that was found at the first one.

    Attributes:
        kernel: a function of `triton.jit`.
        grid: number of programs in three dimensions.
        constants: the last parameters of the kernel, by name and in their order.
        options: compiler options, by name.
    """

    kernel: Any
    grid: tuple[int, int, int]
    constants: dict[str, Any]
    options: dict[str, Any]
    _variants: dict[Hashable, Callable[..., None]] = field(default_factory=dict)

    def __call__(self, kind: Hashable, *arguments: Any) -> None:
        """Launch the kernel with these arguments.

        `kind` is a key for the arguments' types and memory layout. The first launch of each kind finds or compiles the
        variant of the kernel, and later launches of the kind reuse it. Two launches may have the same kind only if all
        properties for which a kernel is compiled are equal: types, strides, numbers, and whether addresses are
        multiples of 16. Pass None if no later launch will have the same kind.
        """
        launch = self._variants.get(kind)
        if launch is not None:
            launch(*arguments, *self.constants.values())
            return
        variant = self.kernel[self.grid](*arguments, **self.constants, **self.options)
        if kind is not None and variant is not None:  # the interpreter compiles nothing
            self._variants[kind] = variant[self.grid]
