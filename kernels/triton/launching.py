"""How kernels are launched: the tensors that they take, and one launch after another of the same kernel."""

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
ALIGNMENT = 16  # bytes: kernels are compiled for whether addresses are multiples of it


class Strided(NamedTuple):
    """A tensor whose last dimension is dense, and the distances between elements of all others, as one argument of a
    kernel: a device gets the fields of a tuple one by one."""

    data: Tensor
    strides: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> "Strided":
        """A tensor as a kernel takes it."""
        return Strided(tensor, tensor.stride()[:-1])


def check_tensor(
    name: str, tensor: Tensor | None, shape: tuple[int | str, ...], *dtypes: torch.dtype, is_strided: bool = False
) -> None:
    """Raises ValueError unless a tensor has this shape, one of these dtypes, and lies densely.

    Args:
        tensor: None, of an argument that may be left out, passes.
        shape: a size that may be any is given by its name.
        is_strided: only its last dimension needs to be dense.
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
    """The type of the operands of products.

    8-bit floats become float16, exactly and in fewer instructions than bfloat16 takes. The interpreter cannot multiply
    bfloat16.
    """
    if query_dtype == torch.bfloat16 and cache_dtype == torch.float8_e4m3fn:
        return tl.float16
    if query_dtype == torch.bfloat16 and INTERPRETED:
        return tl.float32
    return FLOATS[query_dtype]


@dataclass(frozen=True, slots=True)
class RepeatedLaunch:
    """A kernel with its grid and constants, which is told what kind of arguments it gets.

    At every launch Triton looks at all arguments to find the variant that is compiled for such, which takes ten times
    as long as the launch. Arguments of a kind that was launched before go to the variant that was launched then.

    Attributes:
        kernel: a function of `triton.jit`.
        grid: three numbers of programs.
        constants: the last parameters of the kernel, by name and in their order.
        options: of the compiler, by name.
    """

    kernel: Any
    grid: tuple[int, int, int]
    constants: dict[str, Any]
    options: dict[str, Any]
    _variants: dict[Hashable, Callable[..., None]] = field(default_factory=dict)

    def __call__(self, kind: Hashable, *arguments: Any) -> None:
        """Launch it.

        `kind`: equal only where everything that a kernel is compiled for is: types, strides, numbers, and whether
        addresses are multiples of 16. None: of no kind that comes again.
        """
        launch = self._variants.get(kind)
        if launch is not None:
            launch(*arguments, *self.constants.values())
            return
        variant = self.kernel[self.grid](*arguments, **self.constants, **self.options)
        if kind is not None and variant is not None:  # the interpreter compiles nothing
            self._variants[kind] = variant[self.grid]
