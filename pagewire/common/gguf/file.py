"""The header of a GGUF file: its metadata, and the positions and types of its tensors."""

import hashlib
import math
import os
import re
import struct
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from pagewire.common.gguf.model_file import ModelFileError, check_pointer

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Headers consist mostly of tokens and merges, a few megabytes. A larger header is broken, and would fill the memory.
_MAX_HEADER_BYTES = 64 << 20
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# The least size of a key with its value, or of a tensor's entry: lengths and types alone need more.
_LEAST_ENTRY_BYTES = 12
_MAX_SHOWN = 100  # characters of a value in an error message


class GgufError(ValueError):
    """A GGUF file is broken or not supported. The error message is one line that names the file and the fault."""


@dataclass(frozen=True, slots=True)
class ElementType:
    """An element type of GGUF tensors that this project supports. Elements are stored in blocks of fixed size, and a
    block never spans two rows of a tensor.
    """

    name: str
    block_size: int  # number of elements
    block_bytes: int

    @property
    def is_quantized(self) -> bool:
        return self.block_size > 1


SUPPORTED_TYPES = {
    0: ElementType("F32", 1, 4),
    1: ElementType("F16", 1, 2),
    2: ElementType("Q4_0", 32, 18),
    3: ElementType("Q4_1", 32, 20),
    6: ElementType("Q5_0", 32, 22),
    7: ElementType("Q5_1", 32, 24),
    8: ElementType("Q8_0", 32, 34),
    10: ElementType("Q2_K", 256, 84),
    11: ElementType("Q3_K", 256, 110),
    12: ElementType("Q4_K", 256, 144),
    13: ElementType("Q5_K", 256, 176),
    14: ElementType("Q6_K", 256, 210),
    16: ElementType("IQ2_XXS", 256, 66),
    17: ElementType("IQ2_XS", 256, 74),
    18: ElementType("IQ3_XXS", 256, 98),
    19: ElementType("IQ1_S", 256, 50),
    20: ElementType("IQ4_NL", 32, 18),
    21: ElementType("IQ3_S", 256, 110),
    22: ElementType("IQ2_S", 256, 82),
    23: ElementType("IQ4_XS", 256, 136),
    29: ElementType("IQ1_M", 256, 56),
    30: ElementType("BF16", 1, 2),
    34: ElementType("TQ1_0", 256, 54),
    35: ElementType("TQ2_0", 256, 66),
    39: ElementType("MXFP4", 32, 17),
}
_OTHER_NAMES = {
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    40: "NVFP4",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The shape, element type and position of one tensor, as described in the header of a GGUF file."""

    shape: tuple[int, ...]  # row-major: the last dimension is contiguous
    type_number: int
    offset: int  # of the first byte, from the start of the file
    part: int = 0  # the index in `GgufFile.paths` of the file that contains the tensor

    @property
    def type_name(self) -> str:
        """The name of the tensor's element type in GGUF, such as "Q4_K", or its number if the type has
        no known name.
        """
        served = SUPPORTED_TYPES.get(self.type_number)
        return served.name if served is not None else _OTHER_NAMES.get(self.type_number, f"number {self.type_number}")


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The complete header of a GGUF file: metadata and descriptions of the tensors. `metadata` maps keys to numbers,
    strings, arrays of numbers and lists of strings. If the model is split into several files, `path` is the first.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    # SHA-256 of the header, which contains the configuration, the tokenizer, and the types and shapes of all tensors.
    digest: bytes
    further_paths: tuple[Path, ...] = ()  # of a model that is split into several files

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that contain the model's tensors."""
        return (self.path, *self.further_paths)

    @staticmethod
    def open(path: Path) -> "GgufFile":
        """Read the header of a GGUF file. If it is the first part of a model, read the headers of all parts. Raises
        GgufError if a file is not a GGUF file, is broken, or is missing, or if `path` is another part of a model.
        """
        file = _open(path)
        if file.metadata.get("split.count", 0) not in (0, 1):
            file = _with_parts(file)
        kind = file.metadata.get("general.type", "model")
        if kind != "model":
            raise GgufError(f"{path} contains no model: general.type is {shown(kind)}")
        return file

    def element_type(self, name: str) -> ElementType:
        """Return the element type of the tensor with this name. Raises GgufError if the type is not supported."""
        info = self.tensors[name]
        if info.type_number not in SUPPORTED_TYPES:
            raise GgufError(
                f"{self.path}: tensor {name} is of type {info.type_name}, which is not supported; docs/models.md lists "
                "the supported types"
            )
        return SUPPORTED_TYPES[info.type_number]

    def row_bytes(self, name: str) -> int:
        """Return the number of bytes in one row of the tensor with this name. Raises GgufError if the element type is
        not supported, or if its block size does not divide the length of a row.
        """
        element_type, row_size = self.element_type(name), self.tensors[name].shape[-1]
        if row_size % element_type.block_size:
            raise GgufError(
                f"{self.path}: tensor {name} is {element_type.name} with rows of {row_size} elements, but blocks of "
                f"this type have {element_type.block_size}"
            )
        return row_size // element_type.block_size * element_type.block_bytes

    def check_tensors(self) -> None:
        """Check that the GGUF file contains all its tensors completely. Raises GgufError if the type of a tensor is not
        supported, or if the file ends before the end of a tensor.
        """
        sizes = [path.stat().st_size for path in self.paths]
        for name, info in self.tensors.items():
            end, size = info.offset + math.prod(info.shape[:-1]) * self.row_bytes(name), sizes[info.part]
            if end > size:
                path = self.paths[info.part]
                raise GgufError(
                    f"{path} has {size} bytes, but tensor {name} ends at byte {end}: the file may be truncated"
                )


@dataclass(frozen=True, slots=True)
class Metadata:
    """A checked view of the metadata keys of a GGUF file that begin with a prefix. If a key without a default is
    missing, or a value has another type, the methods raise GgufError, which names the file and the key.
    """

    file: GgufFile
    prefix: str  # prepended to every key

    def error(self, key: str, expected: str) -> GgufError:
        """Return the error for a metadata key of a GGUF file whose value is missing or not as expected. `expected` says
        what the value must be.
        """
        name = self.prefix + key
        value = self.file.metadata.get(name)
        if value is None:
            return GgufError(f"{self.file.path} has no {name}, which must be {expected}")
        return GgufError(f"{self.file.path}: {name} is {shown(value)}, but must be {expected}")

    def whole(self, key: str, default: int | None = None, *, ignores_zeros: bool = False) -> int:
        """Return a whole number, from 0. The file may have it for each layer, in an array, if all layers have the same
        number, or, with `ignores_zeros`, all layers that do not have 0."""

        def of_layers(value: Any) -> Any:
            numbers = set(value) - ({0} if ignores_zeros else set()) if isinstance(value, array) else ()
            return numbers.pop() if len(numbers) == 1 else value

        def is_legal(value: Any) -> bool:
            number = of_layers(value)
            return type(number) is int and number >= 0

        return of_layers(self._checked(key, default, is_legal, "a whole number from 0"))

    def number(self, key: str, default: float | None = None) -> float:
        return float(
            self._checked(key, default, lambda value: type(value) in (int, float) and math.isfinite(value), "a number")
        )

    def flag(self, key: str, default: bool) -> bool:
        return self._checked(key, default, lambda value: type(value) is bool, "true or false")

    def text(self, key: str, default: str | None = None) -> str:
        return self._checked(key, default, lambda value: isinstance(value, str), "a text")

    def texts(self, key: str) -> list[str]:
        return self._checked(key, None, lambda value: isinstance(value, list), "an array of texts")

    def numbers(self, key: str, length: int | None = None) -> Sequence[float] | None:
        """Return the array of numbers that a GGUF file has for a metadata key, or None if the key is missing. If
        `length` is given, the array must have that length; otherwise GgufError is raised.
        """
        if not self.has(key):
            return None
        expected = f"an array of {'' if length is None else f'{length} '}numbers"
        return self._checked(
            key, None, lambda value: isinstance(value, array) and length in (None, len(value)), expected
        )

    def has(self, key: str) -> bool:
        return self.prefix + key in self.file.metadata

    def _checked(self, key: str, default: Any, is_legal: Callable[[Any], bool], expected: str) -> Any:
        value = self.file.metadata.get(self.prefix + key, default)
        if not is_legal(value):
            raise self.error(key, expected)
        return value


def is_gguf(path: Path) -> bool:
    """Return whether a path is a GGUF file: an existing file with the suffix .gguf, or with the bytes `GGUF` at its
    beginning.
    """
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


def shown(value: object) -> str:
    """Return the representation of a Python value for an error message, shortened to about 100 characters."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


class _Cursor:
    """A reader for the values in the header of a GGUF file, which are read in sequence. Raises GgufError for a value
    that would extend past the end of the file or past the maximum header size.
    """

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path = path
        self.position = 0
        self._stream = stream
        self._size = os.fstat(stream.fileno()).st_size
        self._end = min(self._size, _MAX_HEADER_BYTES)

    def take(self, num_bytes: int) -> bytes:
        self.expect(num_bytes)
        self.position += num_bytes
        taken = self._stream.read(num_bytes)
        if len(taken) != num_bytes:
            raise self.error("it was truncated while it was read")
        return taken

    def expect(self, num_bytes: int) -> None:
        """Raise GgufError unless the GGUF file's header has at least `num_bytes` more bytes to read."""
        if num_bytes <= self._end - self.position:
            return
        if self._end < self._size:
            raise self.error(f"its header has more than {_MAX_HEADER_BYTES >> 20} MiB")
        raise self.error(
            f"it has {self._size} bytes, but its header requires {self.position + num_bytes} or more: the file may be "
            "truncated"
        )

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self, what: str) -> str:
        taken = self.take(int.from_bytes(self.take(8), "little"))
        try:
            return taken.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is {shown(taken)}, which is not UTF-8") from error

    def texts(self, number: int, key: str) -> list[str]:
        """Read `number` consecutive strings from the header of a GGUF file. This needs a third of the time of `number`
        calls of `text`. `key` is the metadata key, for error messages.
        """
        read, found, left = self._stream.read, [], self._end - self.position
        for _ in range(number):
            length = int.from_bytes(read(8), "little")
            left -= 8 + length
            if left < 0:
                self.position = self._end - left - 8 - length
                self.expect(8 + length)
            found.append(read(length))
        self.position = self._end - left
        try:
            return [taken.decode("utf-8") for taken in found]
        except UnicodeDecodeError as error:
            raise self.error(f"{shown(key)} has {shown(error.object)}, which is not UTF-8") from error

    def error(self, why: str) -> GgufError:
        return GgufError(f"{self.path} is not a complete GGUF file: {why}")


def _open(path: Path) -> GgufFile:
    try:
        check_pointer(path)
        with path.open("rb") as stream:
            return _read_header(path, stream)
    except OSError as error:
        raise GgufError(f"{path} cannot be read: {error.strerror}") from error
    except ModelFileError as error:
        raise GgufError(str(error)) from error


def _with_parts(first: GgufFile) -> GgufFile:
    """Read the headers of the other parts of a model, of which `first` is the first part, and return the header of the
    whole model. The names of the files end with their numbers, such as -00001-of-00003.gguf, as llama.cpp writes them.
    """
    keys = Metadata(first, "split.")
    number, count = keys.whole("no"), keys.whole("count")
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", first.path.name)
    if match is None or int(match[2]) != count:
        raise GgufError(
            f"{first.path} is one of {count} parts of a model, but its name is not like -00001-of-00003.gguf"
        )
    paths = [first.path.with_name(f"{match[1]}-{nth:05}-of-{match[2]}.gguf") for nth in range(1, count + 1)]
    if number or first.path != paths[0]:
        raise GgufError(
            f"{first.path} is part {number + 1} of {count} of a model: give the first part, {paths[0].name}"
        )
    tensors, digest = dict(first.tensors), hashlib.sha256(first.digest)
    for number, path in enumerate(paths[1:], start=1):
        part = _open(path)
        for key, expected in (("no", number), ("count", count)):
            if part.metadata.get(f"split.{key}") != expected:
                raise Metadata(part, "split.").error(key, f"{expected}, to be a part of {paths[0].name}")
        if twice := sorted(tensors.keys() & part.tensors.keys()):
            raise GgufError(f"{path} has tensor {shown(twice[0])}, which is in another part of the model, too")
        tensors |= {name: replace(info, part=number) for name, info in part.tensors.items()}
        digest.update(part.digest)
    if keys.whole("tensors.count", len(tensors)) != len(tensors):
        raise keys.error("tensors.count", f"{len(tensors)}, the number of tensors in all {count} parts")
    return replace(first, tensors=tensors, digest=digest.digest(), further_paths=tuple(paths[1:]))


def _read_header(path: Path, stream: BinaryIO) -> GgufFile:
    cursor = _Cursor(path, stream)
    magic = stream.read(len(MAGIC))
    if magic != MAGIC:
        raise GgufError(f"{path} is not a GGUF file: it begins with {magic!r}, not with {MAGIC!r}")
    cursor.position = len(MAGIC)
    version = cursor.number("I")
    if version not in _VERSIONS:
        is_swapped = version and not version & 0xFFFF
        kind = "in big-endian byte order" if is_swapped else f"of version {version}"
        raise GgufError(f"{path} is a GGUF file {kind}; supported are versions 2 and 3, little-endian")
    num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
    cursor.expect(_LEAST_ENTRY_BYTES * (num_tensors + num_keys))
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.text("a key")
        if key in metadata:
            raise cursor.error(f"it has {shown(key)} twice")
        metadata[key] = _read_value(cursor, key, cursor.number("I"))
    infos: dict[str, TensorInfo] = {}
    for _ in range(num_tensors):
        name = cursor.text("a tensor's name")
        if name in infos:
            raise cursor.error(f"it has tensor {shown(name)} twice")
        infos[name] = _read_tensor_info(cursor, name)
    header_bytes = cursor.position
    start = _data_start(cursor, metadata)
    tensors = {name: TensorInfo(info.shape, info.type_number, start + info.offset) for name, info in infos.items()}
    stream.seek(0)
    return GgufFile(path, metadata, tensors, hashlib.sha256(stream.read(header_bytes)).digest())


def _read_value(cursor: _Cursor, key: str, kind: int) -> Any:
    if kind == _STRING:
        return cursor.text(shown(key))
    if kind in _SCALARS:
        value = cursor.number(_SCALARS[kind])
        return _shortest(value) if _SCALARS[kind] == "f" else value
    if kind != _ARRAY:
        raise cursor.error(f"{shown(key)} is of type {kind}, which does not exist in the format")
    item_kind, length = cursor.number("I"), cursor.number("Q")
    if item_kind == _STRING:
        return cursor.texts(length, key)
    if item_kind not in _SCALARS:
        raise cursor.error(f"{shown(key)} is an array of type {item_kind}, which is not supported")
    code = _SCALARS[item_kind]
    numbers = array("B" if code == "?" else code, cursor.take(length * struct.calcsize("<" + code)))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _shortest(value: float) -> float:
    """Return the number with the fewest decimal digits that rounds to the given float32. A setting such as 0.1 thus
    gets the value that the converter to GGUF received, without the rounding error of float32.
    """
    if not math.isfinite(value):
        return value
    pack: Callable[[float], bytes] = struct.Struct("<f").pack
    candidates = (float(f"{value:.{digits}g}") for digits in range(6, 9))
    return next((short for short in candidates if abs(short) < 3e38 and pack(short) == pack(value)), value)


def _read_tensor_info(cursor: _Cursor, name: str) -> TensorInfo:
    num_dimensions = cursor.number("I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise cursor.error(f"tensor {shown(name)} has {num_dimensions} dimensions, not 1 to {_MAX_DIMENSIONS}")
    shape = struct.unpack(f"<{num_dimensions}Q", cursor.take(8 * num_dimensions))[::-1]
    type_number, offset = cursor.number("I"), cursor.number("Q")
    if 0 in shape or math.prod(shape) >= 1 << 63:
        raise cursor.error(f"tensor {shown(name)} has shape {list(shape)}")
    return TensorInfo(shape, type_number, offset)


def _data_start(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    """Return the offset in a GGUF file at which the tensor data begins. The offsets of the tensors in the file's header
    are relative to this offset.
    """
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    is_power = type(alignment) is int and 1 <= alignment <= _MAX_ALIGNMENT and not alignment & (alignment - 1)
    if not is_power:
        raise cursor.error(f"general.alignment is {shown(alignment)}, not a power of two up to {_MAX_ALIGNMENT}")
    return -(-cursor.position // alignment) * alignment
