"""The C declarations of `source/abi.h`: its constants, and structures whose members are filled in by name."""

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
# The dtype of the values that a C pointer points to, by its C type.
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
    """Return the number by which the C kernels identify a torch dtype. Raises ValueError if the C kernels do not
    support the dtype."""
    element = getattr(constants, f"ELEMENT_{str(dtype).removeprefix('torch.').upper()}", None)
    if element is None:
        raise ValueError(f"no kernel supports {dtype}")
    return element


def address_of(tensor: Tensor | None) -> Any:
    """Return the memory address of a tensor's first element as a `void *` for C. Return a null pointer for None."""
    return ffi.NULL if tensor is None else ffi.cast(POINTER, tensor.data_ptr())


def check(
    name: str, tensor: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...], *, is_strided: bool = False
) -> None:
    """Raise ValueError unless a tensor for a C kernel has this dtype and shape, is contiguous and is on the CPU.

    `name` is used in the error message. A `tensor` of None is accepted, for optional arguments. With `is_strided`, the
    first dimension may have any stride, and only the inner dimensions must be contiguous. For example, tokens may be
    strided, but the heads of one token may not.
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
    """A C structure that Python fills in by the names of its members. The attribute `at` is the pointer to pass to C.

    The structure stores addresses of tensors and does not keep the tensors alive.
    """

    def __init__(self, name: str, **values: Any) -> None:
        self.at = ffi.new(f"{name} *")
        self._words = ffi.cast("uintptr_t *", self.at)
        self._pointers = _pointers(name)
        self.put(**values)

    def put(self, **values: Any) -> None:
        """Set members of the C structure by name.

        A pointer member accepts a tensor, a cffi pointer, an integer address, or None for null. Raises ValueError if a
        tensor is not contiguous, is not on the CPU, or does not have the member's dtype.
        """
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
    """Return the members of a C structure that are pointers, keyed by name. The value for each member is a tuple: its
    index in the structure in 8-byte words, and the torch dtype of the values to which it points. The dtype is None for
    pointers to other C types."""
    members = ((name, member) for name, member in ffi.typeof(name).fields if member.type.kind == "pointer")
    return {name: (member.offset // 8, _POINTED.get(member.type.item.cname)) for name, member in members}
