"""The weights of a GGUF file, under the names that checkpoint directories use for them."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pagewire.common.gguf import ARCHITECTURES, ROPE_FACTORS, ElementType, GgufError, config_json
from pagewire.kernels.weight import StoredFormat, StoredWeight
from pagewire.network.checkpoint_files import CheckpointError
from pagewire.network.gguf_files import open_gguf
from worker_service.models.checkpoint import FLOATS, Piece, Tensors
from worker_service.models.gguf_heads import HeadTiles
from worker_service.models.gguf_names import GgufNames
from worker_service.models.layouts.gguf import BLOCKS, decode_rows, is_finite

_IN_CONFIG = frozenset({"rope_freqs.weight", *ROPE_FACTORS.values()})  # tensors that describe the rope, not weights
_ONE_ROW = ".ffn_gate_inp_shexp.weight"  # a matrix with one row, which some files store as a vector
_LAYER = re.compile(r"blk\.(\d+)\.")
_TURNED = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)")
_WITH_ONE = re.compile(r"(?<!\.ssm)_norm\.weight$")  # norms, except norms in delta nets
_MAX_CHUNK = 1 << 20  # elements decoded at once; one row or head is always decoded whole
_WORKING_BYTES = 16  # temporary bytes per element: the code and its group's parts, and two float32 values


@dataclass(frozen=True, slots=True)
class _Source:
    """The location in a GGUF file of one weight, which a checkpoint directory would store as one tensor. It is a whole
    tensor of the file, or the rows of one expert in a tensor that contains all experts of a layer."""

    name: str
    shape: tuple[int, ...]
    first_row: int = 0


class GgufCheckpoint(Tensors):
    """The weights of a GGUF file. They are requested by the names that the tensors have in checkpoint directories with
    safetensors files.

    The constructor reads only the header of the file. Each tensor is read on request.
    """

    is_exact = True

    def __init__(self, path: Path) -> None:
        """Read the header of the GGUF file `path`, which `load_config` accepts. Raises CheckpointError if the file is
        not a supported GGUF file."""
        self._file = open_gguf(path)
        architecture = self._file.metadata["general.architecture"]
        self._architecture, self._names = ARCHITECTURES[architecture], GgufNames(architecture)
        config = config_json(self._file)
        # Layers for multi-token prediction follow the last layer. They are not used.
        first_unused = config["num_hidden_layers"] if config.get("num_nextn_predict_layers") else math.inf
        names = [
            name
            for name in self._file.tensors.keys() - _IN_CONFIG
            if not (layer := _LAYER.match(name)) or int(layer[1]) < first_unused
        ]
        self._sources = {ours: source for name in sorted(names) for ours, source in self._contained_tensors(name)}
        self.names = frozenset(self._sources)
        self.formats = tuple(sorted({info.type_name for info in self._file.tensors.values()} - FLOATS.keys()))
        self._turned_rows = config["head_dim"] if self._architecture.pairs_neighbours else 0
        self._tiles = HeadTiles.of(config) if self._architecture.has_tiled_heads else None

    def format(self, name: str, in_size: int) -> StoredFormat | None:
        """Return the format in which a weight with `in_size` inputs can be kept in memory as the file stores it. Return
        None if the weight is missing or `in_size` is not a multiple of the group size."""
        layout = BLOCKS.get(self._type_name(name))
        if layout is None:
            return FLOATS.get(self._type_name(name))
        stored = layout.format if in_size % layout.format.group_size == 0 else None
        return stored if self._tiles is None else self._tiles.format(self._sources[name].name, stored)

    def quantized(self, name: str, piece: Piece) -> StoredWeight:
        """Read a quantised weight, or the rows and columns that `piece` selects. The codes and scales are returned
        without conversion to floats. Raises CheckpointError if the file cannot be read or a scale is not finite."""
        row_index, columns = piece.rows_and_columns()
        return piece.choose_rows(StoredWeight.join([rows.cut(columns) for _, rows in self._rows(name, row_index)]))

    def working_bytes(self, name: str, num_elements: int) -> int:
        """Return an upper bound on the temporary memory, in bytes, needed to read a weight with `num_elements`
        elements. Weights are read in chunks, so the bound does not grow with large weights."""
        return _WORKING_BYTES * min(num_elements, _MAX_CHUNK)

    def check(self, name: str, piece: Piece) -> None:
        """Raise CheckpointError unless the file has a tensor of this name, with the shape that `piece` expects and a
        supported type. Quantised types are supported only for matrices."""
        expected = list(piece.shape or piece.target.shape)
        if name not in self._sources:
            raise CheckpointError(
                f"tensor {self._names.gguf_name(name)} is missing in {self._file.path}; expected shape {expected}"
            )
        own_name, shape = self._sources[name].name, list(self._sources[name].shape)
        if shape != expected:
            raise CheckpointError(
                f"tensor {own_name} in {self._file.path} has shape {shape}, expected {expected} from its metadata"
            )
        try:
            element_type = self._file.element_type(own_name)
        except GgufError as error:
            raise CheckpointError(str(error)) from error
        if element_type.is_quantized and len(shape) == 1:
            raise CheckpointError(
                f"tensor {own_name} in {self._file.path} is {element_type.name}; a one-dimensional tensor must be "
                f"{', '.join(FLOATS)}"
            )

    def copy(self, name: str, piece: Piece) -> None:
        """Read a tensor, or the part that `piece` selects, into the piece's target. The values are dequantised and
        converted to the target's dtype and device.

        The piece must have passed `check`. Raises CheckpointError if the file cannot be read, or if a scale is not
        finite.
        """
        row_index, *columns = piece.index or (slice(None),)
        if piece.rows is not None:
            piece.target.copy_(self.quantized(name, piece).dequantized())
            return
        for place, rows in self._rows(name, row_index):
            piece.target[place].copy_(rows.dequantized()[(slice(None), *columns)])

    def _rows(self, name: str, index: slice) -> Iterator[tuple[slice, StoredWeight]]:
        """Read the rows `index` of a tensor in chunks, to limit the memory, without conversion to floats. Yield each
        chunk and its slice, which is relative to the start of `index`. For query and key projections, `index` must
        contain only whole attention heads. Raises CheckpointError if the file cannot be read or a scale is not
        finite."""
        source = self._sources[name]
        own_name, shape = source.name, source.shape
        info, element_type = self._file.tensors[own_name], self._file.element_type(own_name)
        row_size = shape[1] if len(shape) > 1 else 1
        row_bytes = row_size * element_type.block_bytes // element_type.block_size
        unit = self._turned_rows if self._turned_rows and _TURNED.fullmatch(own_name) else 1
        num_rows = max(1, _MAX_CHUNK // row_size // unit) * unit
        first, stop, _ = index.indices(shape[0])
        path, tiles = self._file.paths[info.part], self._tiles
        if tiles is not None and (size := tiles.unit(own_name)):
            num_rows = math.gcd(size, first)  # so that no chunk has rows of several heads
        try:
            with path.open("rb") as stream:
                for start in range(first, stop, num_rows):
                    length = min(num_rows, stop - start)
                    row = start if tiles is None else tiles.stored_row(own_name, start)
                    stream.seek(info.offset + (source.first_row + row) * row_bytes)
                    buffer = bytearray(length * row_bytes)
                    if stream.readinto(buffer) != len(buffer):
                        raise CheckpointError(f"tensor {own_name} cannot be read: {path} is truncated")
                    place = slice(start - first, start - first + length)
                    rows = self._decode(own_name, element_type, buffer, (length, *shape[1:]), unit)
                    yield place, rows if tiles is None else tiles.with_columns(own_name, rows)
        except OSError as error:
            raise CheckpointError(f"tensor {own_name} cannot be read from {path}: {error}") from error

    def _decode(
        self, own_name: str, element_type: ElementType, buffer: bytearray, shape: tuple[int, ...], head_dim: int
    ) -> StoredWeight:
        """Decode the bytes of whole rows of a tensor. If `head_dim` is not 1, reorder the rows of each attention head
        from interleaved rotary pairs to half-split pairs."""
        if not element_type.is_quantized:
            rows = _to_half_split(
                torch.frombuffer(buffer, dtype=FLOATS[element_type.name].element).view(shape), head_dim
            )
            # The file stores 1 + w; adding 1 again later restores the stored value bit for bit.
            adds_one = self._architecture.adds_one_to_norms and _WITH_ONE.search(own_name)
            return StoredWeight(rows.float() - 1 if adds_one else rows)
        weight = decode_rows(element_type, torch.frombuffer(buffer, dtype=torch.uint8).view(shape[0], -1))
        if not is_finite(weight):
            raise CheckpointError(f"tensor {own_name} in {self._file.path} has a scale that is not finite")
        return weight.with_each(lambda rows: _to_half_split(rows, head_dim))

    def _type_name(self, name: str) -> str:
        """Return the name of a tensor's GGUF element type, such as "Q4_K", or an empty string if the tensor does not
        exist."""
        return self._file.tensors[self._sources[name].name].type_name if name in self._sources else ""

    def _contained_tensors(self, own_name: str) -> Iterator[tuple[str, _Source]]:
        """Yield the names and locations of the weights that one tensor of the file contains. If the tensor stacks the
        experts of a layer, there is one weight for each expert, otherwise one weight for the tensor."""
        name, shape = self._names.checkpoint_name(own_name), self._file.tensors[own_name].shape
        if own_name.endswith(_ONE_ROW) and len(shape) == 1:
            shape = (1, *shape)
        if "{expert}" not in name or len(shape) != (2 if own_name.endswith(".bias") else 3):
            yield name, _Source(own_name, shape)
            return
        for expert in range(shape[0]):
            yield name.format(expert=expert), _Source(own_name, shape[1:], expert * shape[1])


def _to_half_split(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of whole attention heads from GGUF's order to the order that `rotate` expects. In the input, the
    two rows of a rotary pair are neighbours: (0, 1), (2, 3) and so on. In the result, row i of a head is paired with
    row i + head_dim / 2. If `head_dim` is 1, the rows are returned unchanged."""
    if head_dim == 1:
        return rows
    heads = rows.unflatten(0, (-1, head_dim // 2, 2))
    return heads.swapaxes(1, 2).flatten(0, 2)
