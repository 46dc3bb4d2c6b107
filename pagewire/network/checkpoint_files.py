"""Reads the files of a checkpoint directory without their weights: JSON files and safetensors headers."""

import json
import math
import re
from collections.abc import Iterable
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
ADAPTER_FILE = "adapter_config.json"
# The end of an error message about a model's files; the beginning names the model.
ADAPTER_ALONE = f"is an adapter ({ADAPTER_FILE}) without its model: merge both with merge_and_unload of peft"
FLOAT_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}  # bytes per element, by the dtype's name in safetensors
# Element types that quantised weights are stored in.
_QUANTISED_BYTES = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
ELEMENT_BYTES = {**FLOAT_BYTES, **_QUANTISED_BYTES}
_MAX_HEADER_BYTES = 100_000_000  # of a safetensors file; the format's own limit
_PICKLED = ("*.bin", "*.pt", "*.pth")
_INDEX_SUFFIX = ".safetensors.index.json"
_PART = re.compile(r"(.*)-\d+-of-(\d+)\.safetensors")
_OTHER_FORMATS = ("adapter_model.", "consolidated")  # files that are no weights, or have the publisher's tensor names


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
    """Return the headers of all tensors of a checkpoint directory, by tensor name. As in transformers, all tensors of a
    file count, even if the index does not list them; of tensors with the same name, the one in the last file counts.

    Raises CheckpointError if there are no safetensors files, if the index names a missing file, or if a file is not
    safetensors.
    """
    files, found = weight_files(path), dict[str, TensorHeader]()
    if not files:
        raise CheckpointError(_without_weights(path))
    for name in files:
        if not (path / name).is_file():
            raise CheckpointError(f"{path / name} is missing; the index of the safetensors files names it")
        found |= _read_header(path / name)
    return found


def weight_files(path: Path, names: Iterable[str] | None = None) -> list[str]:
    """Return the names of the safetensors files with a model's weights, in order, or an empty list if there are none.

    As in transformers, model.safetensors is the whole checkpoint if it exists, even next to an outdated index. But if
    the index lists this file together with other files, it is one of several parts. If neither exists, files of other
    names are accepted, as in vLLM: one index, one file, or all numbered parts of one model.

    Args:
        path: the checkpoint directory.
        names: the names of the model's files; by default the files in `path`. The index must be in `path`.

    Raises:
        CheckpointError: the index is broken, or it is unclear which files belong to the model.
    """
    there = sorted(entry.name for entry in path.glob("*")) if names is None else sorted(names)
    found = [name for name in there if name.endswith(".safetensors") and not name.startswith(_OTHER_FORMATS)]
    indexes = [INDEX_FILE] if INDEX_FILE in there else [name for name in there if name.endswith(_INDEX_SUFFIX)]
    if SINGLE_FILE in found and not (indexes and _is_part(path / indexes[0])):
        return [SINGLE_FILE]
    if len(indexes) == 1:
        return _listed_files(path / indexes[0])
    models = {match.groups() if (match := _PART.fullmatch(name)) else (name, "1") for name in found}
    if len(models) > 1:
        some = " and ".join(found[:2])
        raise CheckpointError(f"{path} has the weights of several models, {some}, and no {INDEX_FILE}: keep one model")
    num_parts = max((int(total) for _, total in models), default=0)
    if len(found) != num_parts:
        raise CheckpointError(f"{path} has {len(found)} of {num_parts} parts of the weights, such as {found[0]}")
    return found


def _listed_files(index: Path) -> list[str]:
    """Return the names of the safetensors files that an index lists, in order."""
    weight_map = read_json(index, MAX_LISTING_BYTES).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} has no weight_map")
    names = {shown(name): name for name in weight_map.values()}.values()
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index} names {shown(name)}, which is not a file in the same directory")
    return sorted(names)


def _is_part(index: Path) -> bool:
    """Return whether a safetensors index lists model.safetensors together with other files. Then model.safetensors is
    only one part of the checkpoint."""
    try:
        names = _listed_files(index)
    except CheckpointError:
        return False
    return SINGLE_FILE in names and len(names) > 1


def _without_weights(path: Path) -> str:
    if (path / ADAPTER_FILE).is_file():
        return f"{path} {ADAPTER_ALONE}"
    text = f"{path} holds neither {SINGLE_FILE} nor {INDEX_FILE}"
    pickled = sorted(file.name for pattern in _PICKLED for file in path.glob(pattern))
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
