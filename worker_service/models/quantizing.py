"""A checkpoint of floats whose projections and embedding are quantised as they are read, and the bits of each."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pagewire.kernels.quantized import GROUP_SIZE, quantized_format
from pagewire.kernels.weight import BLOCK, StoredFormat, StoredWeight
from pagewire.network.checkpoint_files import CheckpointError
from pagewire.network.operations import (
    Activate,
    Multiply,
    MultiplyRouted,
    OperationList,
    Projection,
    embedding_of,
    head_of,
    weights_of,
)
from worker_service.models.checkpoint import Piece, Tensors

_CHUNK_ELEMENTS = 1 << 20  # elements that are read and quantised at once; at least the rows of one head
_WORKING_BYTES = 8  # temporary bytes per element: its float32 value, its code, and scales


def choose_bits(listed: OperationList, bits: int) -> dict[str, int]:
    """Return the bits of the codes of each weight to quantise, by its name. With 8, all have 8.

    With 4, some weights have 6, as in llama.cpp's Q4_K_M: the LM head and the embedding; weights whose rows do not
    divide into blocks; and the last down projection, by far the one whose rounding costs most. If all rows divide, the
    memory that this leaves is for further down projections: those of the first and last eighth of the layers, and of
    each eighth one between.
    """
    found = [weight for weight in weights_of(listed) if type(weight) is Projection and not weight.is_float32]
    undivided, downs = {weight for weight in found if weight.in_size % BLOCK}, _down_projections(listed)
    num_outer = 0 if undivided else len(downs) // 8
    inner = [] if undivided else downs[num_outer : len(downs) - num_outer]
    wide = {*undivided, *downs[-1:], *downs[:num_outer], *inner[4::8], *downs[len(downs) - num_outer :]}
    more = wide if bits == 4 else set()
    by_name = {f"{module}.weight": 6 if weight in more else bits for weight in found for module in weight.modules}
    ends = {f"{weight.name}.weight": max(bits, 6) for weight in (head_of(listed), embedding_of(listed))}
    return by_name | ends


def _down_projections(listed: OperationList) -> list[Projection]:
    activated = {each.output for each in listed if type(each) is Activate}
    multiplied = [each for each in listed if isinstance(each, Multiply | MultiplyRouted)]
    return [each.projection for each in multiplied if each.input in activated]


class QuantizingTensors(Tensors):
    """A source of weights that reads a checkpoint with float weights and quantises them to 8, 6 or 4 bits while loading
    (`--quantization`).

    Quantised matrices are returned as [outputs, inputs], even if the checkpoint stores a matrix transposed.
    """

    def __init__(
        self,
        source: Tensors,
        quantize: Callable[[Tensor, int, Tensor | None], StoredWeight],
        bits: Mapping[str, int],
        importance: Mapping[str, Tensor],
        transposed: frozenset[str],
        unit: int,
    ) -> None:
        """Quantise the weights that are read from a source of float weights.

        Args:
            source: the checkpoint with float weights.
            quantize: quantises float32 [rows, columns] to the given number of bits, 8, 6 or 4, with the importance of
                each column or None.
            bits: the number of bits of each weight to quantise, by name.
            importance: the importance of each weight's inputs, by name; weights may be missing.
            transposed: names of the weights that the checkpoint stores as [inputs, outputs].
            unit: the number of rows that are read from `source` together is a multiple of this number, so that no
                attention head is divided.
        """
        self.names, self.is_exact = source.names, source.is_exact
        self._source = source
        self._quantize = quantize
        self._bits = bits
        self._importance = importance
        self._transposed = transposed
        self._unit = unit

    def stored_names(self, name: str) -> frozenset[str]:
        """Return the names of the checkpoint tensors that store the weight `name`. The tensors need not exist."""
        return self._source.stored_names(name)

    def working_bytes(self, name: str, num_elements: int) -> int:
        """Return an upper bound on the temporary memory, in bytes, needed to read and quantise a weight with
        `num_elements` elements. Only a few rows of one weight, in units of whole attention heads, are in floats at a
        time."""
        own = self._source.working_bytes(name, num_elements)
        return own + _WORKING_BYTES * min(num_elements, 2 * _CHUNK_ELEMENTS) if name in self._bits else own

    def check(self, name: str, piece: Piece) -> None:
        """Check that the float checkpoint can fill the target of a piece; see `Tensors.check`. Also raise
        CheckpointError if the number of inputs of a weight to quantise is not a multiple of the group size."""
        if name not in self._bits:
            self._source.check(name, piece)
            return
        self._source.check(name, piece.transposed() if name in self._transposed else piece)
        in_size = (piece.shape or piece.target.shape)[1]
        if in_size % GROUP_SIZE:
            raise CheckpointError(
                f"tensor {name} cannot be quantised: its {in_size} inputs are not a multiple of the group size "
                f"{GROUP_SIZE}; remove --quantization"
            )

    def copy(self, name: str, piece: Piece) -> None:
        """Read a weight as floats, without quantisation, into the target of `piece`. The piece must have passed
        `check`. Raises CheckpointError if a file cannot be read."""
        self._source.copy(name, piece.transposed() if name in self._transposed else piece)

    def format(self, name: str, in_size: int) -> StoredFormat | None:
        """Return the format in which a weight will be kept in memory: the quantised format if the weight is one of
        those to quantise, else the checkpoint's format. Return None if the weight is missing or must be converted."""
        return quantized_format(self._bits[name]) if name in self._bits else self._source.format(name, in_size)

    def quantized(self, name: str, piece: Piece) -> StoredWeight:
        """Read a weight, or the rows that `piece` selects, and quantise it a few rows at a time. Raises CheckpointError
        if a file cannot be read, or if the weight contains values that cannot be quantised."""
        out_size, in_size = piece.target.shape
        first = (piece.index[0].start or 0) if piece.index else 0
        source_rows = torch.arange(out_size) if piece.rows is None else piece.rows
        whole: StoredWeight | None = None
        num_rows = max(1, _CHUNK_ELEMENTS // in_size // self._unit) * self._unit
        for start in range(0, out_size, num_rows):
            rows = slice(start, min(start + num_rows, out_size))
            values = torch.empty(rows.stop - start, in_size)
            chosen = source_rows[rows]
            lowest = int(chosen[0])
            index = (slice(first + lowest, first + int(chosen[-1]) + 1), *piece.index[1:])
            shape = piece.shape or tuple(piece.target.shape)
            self.copy(name, Piece(values, shape, index, None if piece.rows is None else chosen - lowest))
            try:
                part = self._quantize(values, self._bits[name], self._importance.get(name))
            except ValueError as error:
                raise CheckpointError(f"tensor {name} cannot be quantised: {error}") from error
            whole = whole or part.with_each(lambda of_part: of_part.new_empty(out_size, of_part.shape[1]))
            for kind, of_rows in part.parts().items():
                whole.parts()[kind][rows] = of_rows
        assert whole is not None, "a weight has rows"
        return whole
