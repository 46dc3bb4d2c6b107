"""Repairs what Triton's interpreter gets wrong, and what takes most of its time without any effect.

It truncates where a device rounds to the nearest, and to even.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, SupportsIndex

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

# Types that numpy does not have, as integers of their size.
TORCH_DTYPES = {
    tl.float32: (torch.float32, np.uint32),
    tl.float16: (torch.float16, np.uint16),
    tl.bfloat16: (torch.bfloat16, np.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
    tl.float8e5: (torch.float8_e5m2, np.uint8),
}

_make_block_type = tl.block_type.__init__
_reduce = interpreter.ReduceOps.generic_reduce
_broadcast = TritonSemantic.broadcast_impl_value
POINTER = np.dtype(np.uint64)


def convert(array: np.ndarray, source: tl.dtype, target: tl.dtype, rounding_mode: object) -> np.ndarray:
    """Of the interpreter's floats: `array` holds elements of `source`; the result has the bits of `target`."""
    # Most of all, and a tenth as long as by way of torch.
    if (source, target) == (tl.bfloat16, tl.float32):
        return array.astype(np.uint32) << 16
    if (source, target) == (tl.float32, tl.bfloat16):
        return narrowed(array.view(np.uint32))
    source_dtype, _ = TORCH_DTYPES[source]
    target_dtype, bits = TORCH_DTYPES[target]
    numbers = torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy()).view(source_dtype).to(target_dtype)
    return numbers.view(torch.uint8).numpy().view(bits).reshape(array.shape)


def narrowed(bits: np.ndarray) -> np.ndarray:
    """Bits of bfloat16 nearest to those of float32, of two equally near the even ones; NaN stays NaN."""
    nearest = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, 0x7FC0, nearest).astype(np.uint16)


def call(function: interpreter.InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    """Of a function that a kernel calls. Triton maps its language to the interpreter's anew in each call, which takes
    a millisecond; the launch of the kernel has done it: see `repair`."""
    return function.rewrite()(*args, **kwargs)


@cache
def sizes_of(*shape: int) -> tuple[tl.constexpr, tl.core.tuple]:
    """The number of elements, and the shape, as tensors have them."""
    return tl.constexpr(math.prod(shape)), tl.core.tuple([tl.constexpr(size) for size in shape])


def make_tensor(tensor: tl.tensor, handle: interpreter.TensorHandle, kind: tl.dtype) -> None:
    """Tensors of a shape share the objects that say it."""
    tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
    tensor.numel, tensor.shape = sizes_of(*kind.shape) if kind.is_block() else sizes_of()


@cache
def shape_of(*shape: int) -> tuple[int, tl.core.tuple, str]:
    """The number of elements, the shape and its name, as types of blocks have them."""
    kind = object.__new__(tl.block_type)
    _make_block_type(kind, tl.void, list(shape))
    return kind.numel, kind.shape, str(kind.shape)


def make_block_type(kind: tl.block_type, element: tl.dtype, shape: Sequence[SupportsIndex]) -> None:
    """Types of a shape share the objects that say it."""
    kind.numel, kind.shape, name = shape_of(*map(operator.index, shape))
    kind.element_ty, kind.name = element, f"<{name}, {element}>"


def broadcast(semantic: TritonSemantic, one: tl.tensor, other: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Triton compares the sizes of each dimension, where most of the operands of an operation are of one shape."""
    if one.shape is other.shape:
        return one, other
    return _broadcast(semantic, one, other)


def reduce(operation: interpreter.ReduceOps, given: tuple[tl.tensor, ...]) -> list[tl.tensor]:
    """By a function of a kernel, which is associative: of all neighbours at a time, until one is left along the axis,
    where Triton's interpreter calls it for each element."""
    axis = operation.axis
    while axis is not None and (size := given[0].handle.data.shape[axis]) > 1:
        pairs = [
            operation.to_tensor(np.take(part.handle.data, range(first, size, 2), axis), part.dtype)
            for first in (0, 1)
            for part in given
        ]
        found = operation.combine_fn.fn(*pairs)
        given = found if isinstance(found, tuple) else (found,)
    return _reduce(operation, given)


def repair() -> None:
    if interpreter._convert_float is convert:
        return
    interpreter._convert_float = convert
    of_scalar, of_module = cache(interpreter._get_np_dtype), interpreter._patch_lang
    interpreter._get_np_dtype = lambda kind: POINTER if kind.scalar.is_ptr() else of_scalar(kind.scalar)
    # Kernels see one of the two modules, and the functions of Triton that they call the other.
    language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang = lambda kernel: of_module(language)
    interpreter.InterpretedFunction.__call__ = call
    interpreter.ReduceOps.generic_reduce = reduce
    tl.tensor.__init__, tl.block_type.__init__ = make_tensor, make_block_type
    TritonSemantic.broadcast_impl_value = broadcast
    # What it finds is thrown away: assertions are not on.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
