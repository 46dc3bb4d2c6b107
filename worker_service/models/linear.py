"""Layers that load their weights: linear ones, laid out as the product likes them, and embeddings."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagewire.kernels.weight import HeldFormat, HeldWeight
from worker_service.models.operations import ExpertProduct, Float32Product, Operations, Product

# Makes a product, with its bias, of a weight that was quantised and packed at an earlier start.
KeptProduct = Callable[[Tensor | None], Product]


class Linear(nn.Module):
    """y = x W^T + b, where W may be several projections of the same input, one below the other.

    `out_sizes` are the rows of each. `finish_loading` must be called once the weights are in. Of several ranks whose
    outputs are summed one alone `adds_bias`. `is_float32`: whatever the model computes in, and not quantised.
    `gives_float32`: there is `multiply_to_float32`, and no bias.
    `row_order`: which row of the checkpoint's each row is; none: they are in that order.
    """

    def __init__(
        self,
        in_size: int,
        out_sizes: Sequence[int],
        operations: Operations,
        *,
        bias: bool,
        adds_bias: bool = True,
        is_float32: bool = False,
        gives_float32: bool = False,
        row_order: Sequence[int] = (),
    ) -> None:
        super().__init__()
        assert not (bias and gives_float32)
        self.is_float32 = is_float32
        self._gives_float32 = gives_float32
        self.out_sizes = tuple(out_sizes)
        self.shape = sum(out_sizes), in_size
        self.weight: Tensor | None = nn.Parameter(torch.empty(self.shape), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(out_sizes)), requires_grad=False) if bias else None
        self.product: Product | None = None
        self._float32_product: Float32Product | None = None
        # What the weight stays in, where it stays quantised.
        self.quantized_format: HeldFormat | None = None
        self._row_order = row_order
        self._parts: list[HeldWeight] = []
        self._operations = operations
        self._adds_bias = adds_bias

    def rows(self, part: int) -> slice:
        """The rows of weight and bias that belong to the projection of this index."""
        start = sum(self.out_sizes[:part])
        return slice(start, start + self.out_sizes[part])

    def finish_loading(self, dtype: torch.dtype, kept: KeptProduct | None = None) -> None:
        """Hands the weight over to the product, once. `dtype`: what the model computes in; `kept` has the weight
        already."""
        if self.weight is None:
            return
        dtype = torch.float32 if self.is_float32 else dtype
        bias = self.added_bias()
        if kept is None:
            rounds_inputs = self.quantized_format is not None and self.quantized_format.rounds_inputs
            self.product = self._operations.prepare_product(
                self.take_weight(), bias, dtype, rounds_inputs=rounds_inputs
            )
        else:
            self.product = kept(bias)
        if self._gives_float32:
            self._float32_product = self._operations.float32_product_of(self.product)
        self.weight = None

    def take_weight(self) -> HeldWeight:
        """Give the weight away, in the order of rows that the product has."""
        assert self.weight is not None
        weight = HeldWeight.join(self._parts or [HeldWeight(self.weight.data)])
        self.weight, self._parts = None, []
        return weight[torch.tensor(self._row_order)] if self._row_order else weight

    def added_bias(self) -> Tensor | None:
        """The bias that the product adds."""
        if self.bias is None or not self._adds_bias:
            return None
        return self.bias.data[torch.tensor(self._row_order)] if self._row_order else self.bias.data

    def add_part(self, weight: HeldWeight) -> None:
        """Take the next projection, in place of rows of the weight."""
        self._parts.append(weight)

    def embedding(self) -> Callable[[Tensor], Tensor] | None:
        """Takes rows of the weight by their indexes, once it is loaded, if its layout is good for that."""
        assert self.product is not None
        return self._operations.embedding_of(self.product)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_size] -> [T, sum(out_sizes)]"""
        assert self.product is not None
        return self.product(x)

    def multiply_to_float32(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[T, in_size] -> [T, sum(out_sizes)] float32, not rounded to the model's dtype where the operations can.

        `out`: where to write, dense; None: new memory.
        """
        if self._float32_product is not None:
            return self._float32_product(x, out)
        values = self(x)
        return values.float() if out is None else out.copy_(values)


class ExpertLinear(nn.ModuleList):
    """A `Linear` of each expert, of one size, by which slots are multiplied: see `ExpertProduct`."""

    def __init__(self, linears: Sequence[Linear], operations: Operations) -> None:
        super().__init__(linears)
        self.product: ExpertProduct | None = None
        self._operations = operations

    def num_bytes(self) -> int:
        """Return what the weights take that are not quantised."""
        linears = [linear for linear in self.linears if linear.quantized_format is None]
        return sum(linear.weight.nbytes for linear in linears if linear.weight is not None)

    def allocate(self, device: torch.device) -> dict[int, Tensor]:
        """Return memory for parameters by their ids: that of all experts is one, so that `stack` need not copy."""
        memory: dict[int, Tensor] = {}
        linears = [linear for linear in self.linears if linear.quantized_format is None]
        for parameters in ([linear.weight for linear in linears], [linear.bias for linear in self.linears]):
            found = [parameter for parameter in parameters if parameter is not None]
            if found:
                whole = torch.empty(len(found), *found[0].shape, dtype=found[0].dtype, device=device)
                memory |= {id(parameter): part for parameter, part in zip(found, whole, strict=True)}
        return memory

    @property
    def linears(self) -> list[Linear]:
        return [linear for linear in self if isinstance(linear, Linear)]

    def finish_loading(self, dtype: torch.dtype) -> None:
        """Hands the weights over to the product. Those that are quantised have been already."""
        products = [linear.product for linear in self.linears if linear.product is not None]
        if products:
            assert len(products) == len(self)
            self.product = self._operations.join_experts(products)
            for linear in self.linears:
                linear.product = None  # or what was joined in one memory would be held twice
            return
        biases = [linear.added_bias() for linear in self.linears]
        added = [bias for bias in biases if bias is not None]
        weights = stack([linear.take_weight().values for linear in self.linears])
        self.product = self._operations.prepare_experts(weights, stack(added) if added else None, dtype)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """[T or T * num_chosen, in_size] and [T, num_chosen] -> [T * num_chosen, sum(out_sizes)]"""
        assert self.product is not None
        return self.product(x, ids)


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """As `torch.stack`, but without a copy where they lie one behind the other in one memory."""
    first, size = tensors[0], tensors[0].nbytes
    are_neighbours = all(
        tensor.is_contiguous()
        and tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and tensor.data_ptr() == first.data_ptr() + number * size
        for number, tensor in enumerate(tensors)
    )
    if not are_neighbours:
        return torch.stack(list(tensors))
    return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))


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
