"""The weights of a GGUF file, under the names that checkpoint directories have for them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pagewire.common.gguf import ARCHITECTURES, ROPE_FACTORS, ElementType, GgufError, config_json
from pagewire.kernels.weight import HeldFormat, HeldWeight
from pagewire.network.checkpoint_files import CheckpointError
from pagewire.network.gguf_files import open_gguf
from worker_service.models.checkpoint import FLOATS, Piece, Tensors
from worker_service.models.layouts.gguf import BLOCKS, decode_rows, is_finite

_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# What some architectures call otherwise, or have beside these.
_GEMMA_MODULES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERT_MODULES = {
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
_OTHER_LAYER_MODULES = {
    "gemma2": _GEMMA_MODULES,
    "gemma3": _GEMMA_MODULES,
    "qwen3moe": {"ffn_gate_inp": "mlp.gate", **_EXPERT_MODULES},
    "gpt-oss": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
        **_EXPERT_MODULES,
    },
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
_OWN_MODULES = {ours: own for own, ours in _MODULES.items()}
_SINKS = {"self_attn.sinks": "attn_sinks.weight"}  # neither weight nor bias in checkpoint directories
_IN_CONFIG = frozenset({"rope_freqs.weight", *ROPE_FACTORS.values()})  # tensors that hold no weights
_TURNED = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)")
_MAX_CHUNK = 1 << 20  # elements that are decoded at once; one row, or head, that is longer too
_WORKING_BYTES = 16  # that an element takes meanwhile: codes and their parts, and twice float32


@dataclass(frozen=True, slots=True)
class _Source:
    """What a tensor of a checkpoint directory is in the file: a tensor, or what one has of an expert."""

    name: str
    shape: tuple[int, ...]
    first_row: int = 0


class GgufCheckpoint(Tensors):
    """The tensors of a file by name. Opening it reads the header only; a tensor is read when asked for."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError for a file that cannot be served."""
        self._file = open_gguf(path)
        architecture = self._file.metadata.get("general.architecture", "")
        self._own_names = _own_names(architecture)
        self._our_names = {own: ours for ours, own in self._own_names.items()}
        names = self._file.tensors.keys() - _IN_CONFIG
        self._sources = {ours: source for name in sorted(names) for ours, source in self._found_in(name)}
        self.names = frozenset(self._sources)
        self.formats = tuple(sorted({info.type_name for info in self._file.tensors.values()} - FLOATS.keys()))
        self._adds_one = architecture in ARCHITECTURES and ARCHITECTURES[architecture].adds_one_to_norms
        # These files turn pairs of neighbours: halves of heads are interleaved in what makes queries and keys.
        self._turned_rows = config_json(self._file)["head_dim"] if architecture == "llama" else 0

    def format(self, name: str, in_size: int) -> HeldFormat | None:
        """See `Tensors.format`."""
        layout = BLOCKS.get(self._type_name(name))
        if layout is None:
            return FLOATS.get(self._type_name(name))
        return layout.format if in_size % layout.format.group_size == 0 else None

    def quantized(self, name: str, piece: Piece) -> HeldWeight:
        """See `Tensors.quantized`."""
        row_index, columns = piece.rows_and_columns()
        return HeldWeight.join([rows.cut(columns) for _, rows in self._rows(name, row_index)])

    def working_bytes(self, name: str, num_elements: int) -> int:
        """Return how much memory beside the target reading a weight of this many elements takes at most."""
        return _WORKING_BYTES * min(num_elements, _MAX_CHUNK)

    def check(self, name: str, piece: Piece) -> None:
        """See `Tensors.check`."""
        expected = list(piece.shape or piece.target.shape)
        if name not in self._sources:
            raise CheckpointError(
                f"tensor {self._own_name(name)} is missing in {self._file.path}; expected shape {expected}"
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
                f"tensor {own_name} in {self._file.path} is {element_type.name}; one of one dimension must be "
                f"{', '.join(FLOATS)}"
            )

    def copy(self, name: str, piece: Piece) -> None:
        """Reads a tensor, or the rows of a part of it, into the piece's target, to its dtype and device.

        The piece has been checked. Raises CheckpointError if the file cannot be read, or a scale is no number.
        """
        row_index, *columns = piece.index or (slice(None),)
        for place, rows in self._rows(name, row_index):
            piece.target[place].copy_(rows.dequantized()[(slice(None), *columns)])

    def _rows(self, name: str, index: slice) -> Iterator[tuple[slice, HeldWeight]]:
        """Yield rows of a tensor as they are stored, some at a time, until all of `index` are there; and their place
        among these.

        Of what makes queries and keys, `index` has whole heads. Raises CheckpointError as `copy` does.
        """
        source = self._sources[name]
        own_name, shape = source.name, source.shape
        info, element_type = self._file.tensors[own_name], self._file.element_type(own_name)
        row_size = shape[1] if len(shape) > 1 else 1
        row_bytes = row_size * element_type.block_bytes // element_type.block_size
        unit = self._turned_rows if self._turned_rows and _TURNED.fullmatch(own_name) else 1
        num_rows = max(1, _MAX_CHUNK // row_size // unit) * unit
        first, stop, _ = index.indices(shape[0])
        try:
            with self._file.path.open("rb") as stream:
                for start in range(first, stop, num_rows):
                    length = min(num_rows, stop - start)
                    stream.seek(info.offset + (source.first_row + start) * row_bytes)
                    buffer = bytearray(length * row_bytes)
                    if stream.readinto(buffer) != len(buffer):
                        raise CheckpointError(f"tensor {own_name} cannot be read: {self._file.path} is cut off")
                    place = slice(start - first, start - first + length)
                    yield place, self._decode(own_name, element_type, buffer, (length, *shape[1:]), unit)
        except OSError as error:
            raise CheckpointError(f"tensor {own_name} cannot be read from {self._file.path}: {error}") from error

    def _decode(
        self, own_name: str, element_type: ElementType, buffer: bytearray, shape: tuple[int, ...], head_dim: int
    ) -> HeldWeight:
        """Decode whole rows, which the file has in pairs of neighbours if heads have more than one."""
        if not element_type.is_quantized:
            rows = _halved(torch.frombuffer(buffer, dtype=FLOATS[element_type.name].element).view(shape), head_dim)
            # What a file has of 1 + w comes out bit for bit when 1 is added again.
            return HeldWeight(rows.float() - 1 if self._adds_one and own_name.endswith("_norm.weight") else rows)
        weight = decode_rows(element_type, torch.frombuffer(buffer, dtype=torch.uint8).view(shape[0], -1))
        if not is_finite(weight):
            raise CheckpointError(f"tensor {own_name} in {self._file.path} has a scale that is not a number")
        return weight.with_each(lambda rows: _halved(rows, head_dim))

    def _type_name(self, name: str) -> str:
        """Return the type of a tensor; nothing, if it is not there."""
        return self._file.tensors[self._sources[name].name].type_name if name in self._sources else ""

    def _found_in(self, own_name: str) -> Iterator[tuple[str, _Source]]:
        """Yield what a tensor of the file holds: itself, or a tensor of each expert."""
        name, shape = self._our_name(own_name), self._file.tensors[own_name].shape
        if "{expert}" not in name or len(shape) != (2 if own_name.endswith(".bias") else 3):
            yield name, _Source(own_name, shape)
            return
        for expert in range(shape[0]):
            yield name.format(expert=expert), _Source(own_name, shape[1:], expert * shape[1])

    def _our_name(self, own_name: str) -> str:
        """Return the name that checkpoint directories have for a tensor; its own for one that they do not have."""
        module, _, kind = own_name.rpartition(".")
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", own_name)
        if match is None:
            return f"{_MODULES[module]}.{kind}" if module in _MODULES else own_name
        layer, part = match.groups()
        return f"model.layers.{layer}.{self._our_names[part]}" if part in self._our_names else own_name

    def _own_name(self, name: str) -> str:
        """Return the name that GGUF files have for a tensor of a checkpoint directory."""
        module, _, kind = name.rpartition(".")
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if match is None:
            return f"{_OWN_MODULES[module]}.{kind}"
        layer, part = match.groups()
        part = re.sub(r"\.experts\.\d+\.", ".experts.{expert}.", part)
        return f"blk.{layer}.{self._own_names[part]}"


def _own_names(architecture: str) -> dict[str, str]:
    """Return what files of an architecture call the tensors of a layer, by their names in checkpoint directories."""
    modules = {**_LAYER_MODULES, **_OTHER_LAYER_MODULES.get(architecture, {})}
    # Of two words for one module, the architecture's own is the last, which stays.
    own_modules = {ours: own for own, ours in modules.items()}
    return {
        f"{ours}.{kind}": f"{own}.{kind}" for ours, own in own_modules.items() for kind in ("weight", "bias")
    } | _SINKS


def _halved(rows: Tensor, head_dim: int) -> Tensor:
    """Bring rows of whole heads from pairs of neighbours, (0, 1), (2, 3) and so on, to pairs of two halves. Heads of
    one row stay as they are."""
    if head_dim == 1:
        return rows
    heads = rows.unflatten(0, (-1, head_dim // 2, 2))
    return heads.swapaxes(1, 2).flatten(0, 2)
