"""What C declares, read from `source/abi.h`: constants, and structures filled in by the names of their members."""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cffi
import torch
from torch import Tensor

ffi = cffi.FFI()
ffi.cdef(re.sub("^#.*", "", (Path(__file__).parent / "source" / "abi.h").read_text(), flags=re.MULTILINE))
constants = ffi.dlopen(None)
POINTER = ffi.typeof("void *")
# What pointers of C lead to.
_POINTED = {
    "float": torch.float32,
    "int8_t": torch.int8,
    "uint8_t": torch.uint8,
    "int32_t": torch.int32,
    "uint32_t": torch.int32,
    "int64_t": torch.int64,
    "_Bool": torch.bool,
}


@functools.cache
def element_of(dtype: torch.dtype) -> int:
    """Raises ValueError if kernels do not know it."""
    element = getattr(constants, f"ELEMENT_{str(dtype).removeprefix('torch.').upper()}", None)
    if element is None:
        raise ValueError(f"{dtype} has no kernels")
    return element


def address_of(tensor: Tensor | None) -> Any:
    """Where its first element is."""
    return ffi.NULL if tensor is None else ffi.cast(POINTER, tensor.data_ptr())


def check(
    name: str, tensor: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...], *, is_strided: bool = False
) -> None:
    """Raises ValueError unless the tensor is what the kernels read. None, of one that may be left out, passes.

    `is_strided`: what the first dimension has may lie at any distance, such as tokens, but not their heads.
    """
    if tensor is None:
        return
    dense = tensor[:1] if is_strided else tensor
    if tensor.shape != shape or tensor.dtype != dtype or not dense.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}; "
            f"it must be {dtype} {shape}, {'each token' if is_strided else 'all'} contiguous, on the CPU"
        )


class Structure:
    """A structure in memory, at `at`. It names tensors and holds none of them."""

    def __init__(self, name: str, **values: Any) -> None:
        self.at = ffi.new(f"{name} *")
        self._words = ffi.cast("uintptr_t *", self.at)
        self._pointers = _pointers(name)
        self.put(**values)

    def put(self, **values: Any) -> None:
        """Fill members in: numbers, and pointers by tensors, by what cffi made, or by addresses. Raises ValueError if a
        tensor is not dense, or of another dtype."""
        for name, value in values.items():
            word, dtype = self._pointers.get(name, (None, None))
            if word is None or isinstance(value, ffi.CData):
                setattr(self.at, name, value)
                continue
            if isinstance(value, Tensor):
                if not (value.is_contiguous() and value.is_cpu and (dtype is None or value.dtype is dtype)):
                    check(name, value, dtype or value.dtype, tuple(value.shape))
                value = value.data_ptr()
            self._words[word] = value or 0


@functools.cache
def _pointers(name: str) -> Mapping[str, tuple[int, torch.dtype | None]]:
    """Of a structure's pointers by name, which of its words each is, and the dtype of what it leads to."""
    members = ((name, member) for name, member in ffi.typeof(name).fields if member.type.kind == "pointer")
    return {name: (member.offset // 8, _POINTED.get(member.type.item.cname)) for name, member in members}
