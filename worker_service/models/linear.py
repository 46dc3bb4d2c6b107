"""Layers that load their weights: linear ones, laid out as whoever multiplies likes them, and embeddings."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagewire.kernels.float8 import Float8Format, Float8Weight
from pagewire.kernels.quantized import QuantizedFormat, QuantizedWeight
from worker_service.models.operations import Operations, Product

# Rows of a weight or bias.
_Rows = TypeVar("_Rows", Tensor, QuantizedWeight | Float8Weight)
# Makes a product, with its bias, of a weight that was quantised and packed at an earlier start.
KeptProduct = Callable[[Tensor | None], Product]


class Linear(nn.Module):
    """y = x W^T + b, where W may be several projections of the same input, one below the other.

    `out_sizes` are the rows of each. `finish_loading` must be called once the weights are in. Of several ranks whose
    outputs are summed one alone `adds_bias`.
    """

    def __init__(
        self,
        in_size: int,
        out_sizes: Sequence[int],
        operations: Operations,
        *,
        bias: bool,
        adds_bias: bool = True,
    ) -> None:
        super().__init__()
        self.out_sizes = tuple(out_sizes)
        self.weight: Tensor | None = nn.Parameter(torch.empty(sum(out_sizes), in_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(out_sizes)), requires_grad=False) if bias else None
        self.product: Product | None = None
        # What the weight stays in, where it stays quantised.
        self.quantized_format: QuantizedFormat | Float8Format | None = None
        # Which row of the checkpoint's each row is; None: they are in that order.
        self.row_order: list[int] | None = None
        self._parts: list[QuantizedWeight | Float8Weight | Tensor] = []
        self._operations = operations
        self._adds_bias = adds_bias

    def rows(self, part: int) -> slice:
        """The rows of weight and bias that belong to the projection of this index."""
        start = sum(self.out_sizes[:part])
        return slice(start, start + self.out_sizes[part])

    def finish_loading(self, dtype: torch.dtype, kept: KeptProduct | None = None) -> None:
        """Hands the weight over to whoever multiplies, once. `dtype`: what the model computes in; `kept` has the weight
        already."""
        if self.product is not None:
            return
        assert self.weight is not None
        bias = self._ordered(self.bias.data) if self.bias is not None and self._adds_bias else None
        quantized = _join(self._parts)
        if kept is not None:
            self.product = kept(bias)
        elif quantized is not None:
            self.product = self._operations.prepare_quantized(self._ordered(quantized), bias, dtype)
        else:
            self.product = self._operations.prepare_product(self._ordered(self._whole(dtype)), bias, dtype)
        self.weight, self._parts = None, []

    def add_part(self, weight: QuantizedWeight | Float8Weight | Tensor) -> None:
        """Take the next projection, in place of rows of the weight."""
        self._parts.append(weight)

    def _ordered(self, rows: _Rows) -> _Rows:
        return rows if self.row_order is None else rows[torch.tensor(self.row_order)]

    def _whole(self, dtype: torch.dtype) -> Tensor:
        assert self.weight is not None
        if not self._parts:
            return self.weight.data
        parts = [part if isinstance(part, Tensor) else part.dequantized() for part in self._parts]
        return torch.cat([part.to(dtype) for part in parts])

    def embedding(self) -> Callable[[Tensor], Tensor] | None:
        """Takes rows of the weight by their indexes, once it is loaded, if its layout is good for that."""
        assert self.product is not None
        return self._operations.embedding_of(self.product)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_size] -> [T, sum(out_sizes)]"""
        assert self.product is not None
        return self.product(x)


def _join(parts: Sequence[QuantizedWeight | Float8Weight | Tensor]) -> QuantizedWeight | Float8Weight | None:
    """Return projections of one kind as one; None: they are not, or there are none."""
    codes = [part for part in parts if isinstance(part, QuantizedWeight)]
    floats = [part for part in parts if isinstance(part, Float8Weight)]
    if codes and len(codes) == len(parts):
        return QuantizedWeight.join(codes)
    return Float8Weight.join(floats) if floats and len(floats) == len(parts) else None


class Embedding(nn.Module):
    """A row of weights for each index, in the model's dtype. No random weights are drawn: they are loaded."""

    def __init__(self, num_embeddings: int, size: int) -> None:
        super().__init__()
        self.weight: Tensor | None = nn.Parameter(torch.empty(num_embeddings, size), requires_grad=False)
        self.rows: Linear | None = None  # holds the weight, where this does not
        self._dtype = torch.float32
        self._take_rows: Callable[[Tensor], Tensor] | None = None

    def hold_rows(self, operations: Operations) -> str:
        """Let a layer hold the weight instead, in whatever that can be in. Returns the layer's name in the model."""
        assert self.weight is not None
        num_embeddings, size = self.weight.shape
        with self.weight.device:
            self.rows = Linear(size, [num_embeddings], operations, bias=False)
        self.weight = None
        return "embedding.rows"

    def finish_loading(self, dtype: torch.dtype, holder: Linear | None = None) -> None:
        """`dtype`: what rows are given in; `holder`: whose weight this is too, already loaded."""
        self._dtype = dtype
        if holder is not None:
            self._take_rows = holder.embedding()
            if self._take_rows is not None:
                self.weight = None

    def forward(self, indexes: Tensor) -> Tensor:
        """[T] int64 -> [T, size]"""
        if self._take_rows is not None:
            return self._take_rows(indexes)
        assert self.weight is not None
        return F.embedding(indexes, self.weight).to(self._dtype)
