"""What C declares, read from `source/abi.h`: constants, and structures filled in by the names of their members."""

import dataclasses
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


class Structure:
    """A structure in memory, at `at`. It names tensors and holds none of them."""

    def __init__(self, name: str, **values: Any) -> None:
        self.at = ffi.new(f"{name} *")
        self._words = ffi.cast("uintptr_t *", self.at)
        self._pointers = _pointers(name)
        self.put(**values)

    def take(self, values: Any) -> None:
        """Fill in what a dataclass has."""
        self.put(**{field.name: getattr(values, field.name) for field in dataclasses.fields(values)})

    def put(self, **values: Any) -> None:
        """Fill members in. Raises ValueError if a tensor is not dense, or of another dtype."""
        for name, value in values.items():
            if name not in self._pointers or not isinstance(value, Tensor):
                setattr(self.at, name, ffi.NULL if value is None else value)
                continue
            word, dtype = self._pointers[name]
            if not (value.is_contiguous() and value.is_cpu and (dtype is None or value.dtype is dtype)):
                found = f"{value.dtype} {tuple(value.shape)} with strides {value.stride()} on {value.device}"
                raise ValueError(f"{name} is {found}; make it {dtype or 'anything'}, dense, on the CPU")
            self._words[word] = value.data_ptr()


@functools.cache
def _pointers(name: str) -> Mapping[str, tuple[int, torch.dtype | None]]:
    """Of a structure's pointers by name, which of its words each is, and the dtype of what it leads to."""
    members = ((name, member) for name, member in ffi.typeof(name).fields if member.type.kind == "pointer")
    return {name: (member.offset // 8, _POINTED.get(member.type.item.cname)) for name, member in members}
