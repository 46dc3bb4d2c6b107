"""Reads the description of a model from a GGUF file."""

import math
from array import array
from dataclasses import replace
from pathlib import Path

from pagewire.common.gguf import ROPE_FACTORS, GgufError, GgufFile, config_json
from pagewire.network.blocks import parts_of
from pagewire.network.checkpoint_files import CheckpointError, TensorHeader
from pagewire.network.families import parse_config
from pagewire.network.network import Network
from pagewire.network.operations import Projection, Share, Vector
from pagewire.network.rewrites import rewrite, with_ropes

_FREQUENCIES = "rope_freqs.weight"
_WITH_GATES = "qkvz"  # the end of the name of a projection for queries, keys, values and gates


def open_gguf(path: Path) -> GgufFile:
    """Open a GGUF model file and read its header. Like all functions of this module, this function raises
    CheckpointError if the file is broken or not supported."""
    try:
        return GgufFile.open(path)
    except GgufError as error:
        raise CheckpointError(str(error)) from error


def load_gguf_config(path: Path) -> Network:
    """Return the model that a GGUF file describes. The descriptions of the file's tensors are checked, but the weights
    are not read. Raises CheckpointError if the file is broken or the model is not supported."""
    file = open_gguf(path)
    try:
        file.check_tensors()
        config = config_json(file)
    except GgufError as error:
        raise CheckpointError(str(error)) from error
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "longrope":
        num_pairs = int(config["head_dim"] * rope["partial_rotary_factor"]) // 2
        found = {key: name for key, name in ROPE_FACTORS.items() if name in file.tensors}
        rope |= {key: list(_read_divisors(file, name, num_pairs)) for key, name in found.items()}
    try:
        model = parse_config(config)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: its metadata does not describe a supported model: {error}") from error
    model = replace(model, operations=rewrite(model.operations, {Projection: _as_in_gguf, Vector: _without_log}))
    if _FREQUENCIES not in file.tensors or model.rope is None:
        return model
    divisors = _read_divisors(file, _FREQUENCIES, model.rope.rotary_size(model.heads.head_dim) // 2)
    return replace(model, operations=with_ropes(model.operations, lambda rope: replace(rope, divisors=divisors)))


def _as_in_gguf(projection: Projection) -> Projection:
    """Return a projection as GGUF files store it: no weight is transposed, and the rows of all queries come first, then
    those of all keys and of all values. The gates of a delta net are in a module of their own."""
    first = projection.parts[0]
    if first.name.endswith(_WITH_GATES):
        name = f"{first.name.removesuffix(_WITH_GATES)}{'z' if len(projection.parts) == 1 else 'qkv'}"
        return replace(projection, parts=tuple(parts_of([name], [part.rows for part in projection.parts])))
    unit, rows = projection.stored.unit, projection.parts[0].rows
    if not unit:
        return replace(projection, is_transposed=False)
    shares = [Share.of(rows.size // sum(unit) * size, size, rows.counted) for size in unit]
    parts = tuple(parts_of([projection.name], shares))
    return replace(projection, parts=parts, stored=replace(projection.stored, unit=()))


def _without_log(vector: Vector) -> Vector:
    """Return a vector as GGUF files store it: the decay of a delta net is not stored as a logarithm."""
    return replace(vector, is_log=False) if vector.is_log else vector


def read_gguf_headers(path: Path) -> dict[str, TensorHeader]:
    """Return the headers of all tensors of a GGUF file. Names and data types are those that GGUF uses, which differ
    from safetensors."""
    file = open_gguf(path)
    return {
        name: TensorHeader(file.paths[info.part].name, info.type_name, info.shape)
        for name, info in file.tensors.items()
    }


def _read_divisors(file: GgufFile, name: str, length: int) -> tuple[float, ...]:
    """Read the tensor of a GGUF file that scales the frequencies of rotary position embedding. Return one divisor for
    each of the `length` pairs of rotated values. Raises CheckpointError if the tensor has another shape or type, or a
    divisor is not finite and positive."""
    info = file.tensors[name]
    if info.type_name != "F32" or info.shape != (length,):
        raise CheckpointError(
            f"{file.path}: tensor {name} is {info.type_name} of shape {list(info.shape)}, but must be F32 of "
            f"shape {[length]}"
        )
    with file.paths[info.part].open("rb") as stream:
        stream.seek(info.offset)
        divisors = array("f", stream.read(4 * length))
    if not all(math.isfinite(divisor) and divisor > 0 for divisor in divisors):
        raise CheckpointError(f"{file.path}: tensor {name} has numbers that are not finite or not above 0")
    return tuple(divisors)
