"""Corrections of errors in Triton's interpreter, and removal of its most expensive superfluous work.

The interpreter truncates where a device rounds to nearest even.
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

# The torch dtype of each type, and the numpy integers of the same size that store its bits.
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
    """Convert the interpreter's floats: `array` has elements of `source`; the result has the bits of `target`."""
    # The most frequent conversions, ten times as fast as with torch.
    if (source, target) == (tl.bfloat16, tl.float32):
        return array.astype(np.uint32) << 16
    if (source, target) == (tl.float32, tl.bfloat16):
        return narrowed(array.view(np.uint32))
    source_dtype, _ = TORCH_DTYPES[source]
    target_dtype, bits = TORCH_DTYPES[target]
    numbers = torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy()).view(source_dtype).to(target_dtype)
    return numbers.view(torch.uint8).numpy().view(bits).reshape(array.shape)


def narrowed(bits: np.ndarray) -> np.ndarray:
    """Return the bits of the bfloat16 numbers nearest to float32 bits, rounding ties to even. NaN stays NaN."""
    nearest = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, 0x7FC0, nearest).astype(np.uint16)


def call(function: interpreter.InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    """Call a function that a kernel calls.

    Triton patches its language module for the interpreter at every call, which takes a millisecond. The launch of the
    kernel has already done it; see `repair`.
    """
    return function.rewrite()(*args, **kwargs)


@cache
def sizes_of(*shape: int) -> tuple[tl.constexpr, tl.core.tuple]:
    """Return the number of elements and the shape in the form of Triton's tensors."""
    return tl.constexpr(math.prod(shape)), tl.core.tuple([tl.constexpr(size) for size in shape])


def make_tensor(tensor: tl.tensor, handle: interpreter.TensorHandle, kind: tl.dtype) -> None:
    """Initialize a tensor. Tensors of equal shape share the objects of the shape."""
    tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
    tensor.numel, tensor.shape = sizes_of(*kind.shape) if kind.is_block() else sizes_of()


@cache
def shape_of(*shape: int) -> tuple[int, tl.core.tuple, str]:
    """Return the number of elements, the shape, and its name in the form of Triton's block types."""
    kind = object.__new__(tl.block_type)
    _make_block_type(kind, tl.void, list(shape))
    return kind.numel, kind.shape, str(kind.shape)


def make_block_type(kind: tl.block_type, element: tl.dtype, shape: Sequence[SupportsIndex]) -> None:
    """Initialize a block type. Types of equal shape share the objects of the shape."""
    kind.numel, kind.shape, name = shape_of(*map(operator.index, shape))
    kind.element_ty, kind.name = element, f"<{name}, {element}>"


def broadcast(semantic: TritonSemantic, one: tl.tensor, other: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Broadcast two tensors, with a fast path for tensors that share one shape object.

    Triton compares the sizes of every dimension, though the operands of most operations have equal shapes.
    """
    if one.shape is other.shape:
        return one, other
    return _broadcast(semantic, one, other)


def reduce(operation: interpreter.ReduceOps, given: tuple[tl.tensor, ...]) -> list[tl.tensor]:
    """Reduce by an associative function of a kernel, along an axis.

    Each pass combines all pairs of neighbours, until one element is left along the axis. Triton's interpreter calls the
    function for each element.
    """
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
    # Kernels refer to one of the two modules, and the Triton functions that they call refer to the other.
    language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang = lambda kernel: of_module(language)
    interpreter.InterpretedFunction.__call__ = call
    interpreter.ReduceOps.generic_reduce = reduce
    tl.tensor.__init__, tl.block_type.__init__ = make_tensor, make_block_type
    TritonSemantic.broadcast_impl_value = broadcast
    # The result of these checks is not used, because assertions are off.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
