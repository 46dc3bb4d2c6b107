"""Reads the files of a checkpoint directory without their weights: JSON files and safetensors headers."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagewire.common.gguf import (
    MAX_LISTING_BYTES,
    MAX_SETTINGS_BYTES,
    ModelFileError,
    check_pointer,
    read_settings,
    shown,
)
from pagewire.common.gguf.tokenizer_files import TokenizerFiles, directory_digest

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}  # bytes per element, by the dtype's name in safetensors
# Element types that quantised weights are stored in.
_QUANTISED_BYTES = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
ELEMENT_BYTES = {**FLOAT_BYTES, **_QUANTISED_BYTES}
_MAX_HEADER_BYTES = 100_000_000  # of a safetensors file; the format's own limit
_PICKLED = ("*.bin", "*.pt", "*.pth")


class CheckpointError(Exception):
    """Raised for a model checkpoint that is broken or not supported. The message names the file, setting or tensor at
    fault, and the expected value."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A checkpoint tensor as described in the header of its file: the file, data type and shape, without the data."""

    file: str  # file name
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]


def read_json(path: Path, max_bytes: int = MAX_SETTINGS_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file of a checkpoint. Raises CheckpointError if the file is missing, is larger than
    `max_bytes`, or does not contain a JSON object."""
    try:
        return read_settings(path, required=True, max_bytes=max_bytes)
    except (OSError, ValueError) as error:
        raise CheckpointError(str(error)) from error


def model_digest(path: Path) -> bytes:
    """Return a digest of 32 bytes that identifies the model in a checkpoint directory. The scheduler service and the
    worker service compare their digests to verify that they use the same model. Raises CheckpointError if a required
    file is missing or broken."""
    try:
        return directory_digest(path, TokenizerFiles.in_directory(path))
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename} is missing; a checkpoint directory must have it") from error
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def read_headers(path: Path) -> dict[str, TensorHeader]:
    """Return the headers of all tensors of a checkpoint directory, by tensor name. As in transformers,
    model.safetensors is the whole checkpoint if it exists, even next to an outdated index. But if the index lists this
    file together with other files, it is one of several shards.

    Raises CheckpointError if there are no safetensors files, if the index names a missing file, or if a file is not
    safetensors.
    """
    has_single, has_index = (path / SINGLE_FILE).is_file(), (path / INDEX_FILE).is_file()
    if not has_single and not has_index:
        raise CheckpointError(_without_weights(path))
    if has_single and not (has_index and _is_part(path / INDEX_FILE)):
        return _read_header(path / SINGLE_FILE)
    weight_map = read_json(path / INDEX_FILE, MAX_LISTING_BYTES).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path / INDEX_FILE} has no weight_map")
    found: dict[str, TensorHeader] = {}
    for file_name in {shown(name): name for name in weight_map.values()}.values():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise CheckpointError(
                f"{path / INDEX_FILE} names {shown(file_name)}, which is not a file in the same directory"
            )
        if not (path / file_name).is_file():
            raise CheckpointError(f"{path / file_name} is missing; {INDEX_FILE} names it")
        in_file = _read_header(path / file_name)
        found |= {name: header for name, header in in_file.items() if weight_map.get(name) == file_name}
    for name, file_name in weight_map.items():
        if name not in found:
            raise CheckpointError(f"tensor {name} is not in {path / file_name}, although {INDEX_FILE} lists it there")
    return found


def _is_part(index: Path) -> bool:
    """Return whether a safetensors index lists model.safetensors together with other files. Then model.safetensors is
    only one shard of the checkpoint."""
    try:
        weight_map = read_json(index, MAX_LISTING_BYTES).get("weight_map")
    except CheckpointError:
        return False
    names = [*weight_map.values()] if isinstance(weight_map, dict) else []
    return SINGLE_FILE in names and any(name != SINGLE_FILE for name in names)


def _without_weights(path: Path) -> str:
    pickled = sorted(file.name for pattern in _PICKLED for file in path.glob(pattern))
    text = f"{path} holds neither {SINGLE_FILE} nor {INDEX_FILE}"
    if not pickled:
        return f"{text}; use a checkpoint with safetensors files, or convert this one"
    return f"{text}; pickled weights, such as {pickled[0]}, are never loaded: convert the checkpoint to safetensors"


def _read_header(file: Path) -> dict[str, TensorHeader]:
    """Return the headers of the tensors in one safetensors file, by tensor name. Raises CheckpointError if the file is
    shorter or longer than its header says, or if the header is invalid."""
    try:
        check_pointer(file)
        with file.open("rb") as stream:
            size = file.stat().st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise _broken(file, f"it has {size} bytes, too few for its header")
            header = json.loads(stream.read(length))
    except ModelFileError as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise _broken(file, "its header is not JSON") from error
    if not isinstance(header, dict):
        raise _broken(file, "its header is not an object")
    header.pop("__metadata__", None)
    tensors, end = {}, 0
    for name, entry in header.items():
        try:
            tensors[name], tensor_end = _parse_entry(file.name, entry)
        except (KeyError, TypeError, ValueError) as error:
            raise _broken(file, f"its header describes tensor {shown(name)} as {shown(entry)}") from error
        end = max(end, tensor_end)
    if size != 8 + length + end:
        raise _broken(
            file, f"it has {size} bytes, but its header describes {8 + length + end}: the file may be truncated"
        )
    return tensors


def _parse_entry(file_name: str, entry: Any) -> tuple[TensorHeader, int]:
    """Parse the entry of one tensor in a safetensors header. Return the tensor's header and the end offset of its data
    in bytes. Raises KeyError, TypeError or ValueError if the entry is invalid."""
    dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if not isinstance(dtype, str) or not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ValueError
    if start > end or (dtype in ELEMENT_BYTES and end - start != math.prod(shape) * ELEMENT_BYTES[dtype]):
        raise ValueError
    return TensorHeader(file_name, dtype, shape), end


def _broken(file: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{file} is not a complete safetensors file: {why}")
