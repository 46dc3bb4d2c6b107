"""Layers that load their weights: linear ones, laid out as the product likes them, and embeddings."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagewire.kernels.weight import HeldFormat, HeldWeight
from pagewire.network.operations import Projection
from worker_service.models.torch_operations import ExpertProduct, Operations, Product

# Makes a product, with its bias, of a weight that was quantised and packed at an earlier start.
KeptProduct = Callable[[Tensor | None], Product]


class Linear(nn.Module):
    """A `Projection` that belongs to no expert, or to one: x W^T + b.

    `finish_loading` must be called once the weights are in.
    """

    def __init__(self, projection: Projection, operations: Operations) -> None:
        super().__init__()
        self.projection = projection
        num_rows = sum(projection.out_sizes)
        self.shape = num_rows, projection.in_size
        self.weight: Tensor | None = nn.Parameter(torch.empty(self.shape), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(num_rows), requires_grad=False) if projection.has_bias else None
        self.product: Product | None = None
        self._dtype = torch.float32
        self.format = HeldFormat(self.weight.dtype)  # what the weight is held in
        self._parts: list[HeldWeight] = []
        self._operations = operations

    def finish_loading(self, dtype: torch.dtype, kept: KeptProduct | None = None) -> None:
        """Hands the weight over to the product, once. `dtype`: what the model computes in; `kept` has the weight
        already."""
        if self.weight is None or self.product is not None:
            return
        self._dtype = dtype = torch.float32 if self.projection.is_float32 else dtype
        bias, weight = self.added_bias(), self.weight
        if kept is None:
            rounds_inputs = self.format.rounds_inputs
            self.product = self._operations.prepare_product(
                self.take_weight(), bias, dtype, rounds_inputs=rounds_inputs
            )
        else:
            self.product = kept(bias)
        self.weight = weight if self.projection.gives_rows and not self.product.gives_rows else None

    def take_weight(self) -> HeldWeight:
        """Give the weight away, in the order of rows that the product has."""
        assert self.weight is not None
        weight = HeldWeight.join(self._parts or [HeldWeight(self.weight.data)])
        self.weight, self._parts = None, []
        order = self.projection.row_order
        return weight[torch.tensor(order)] if order else weight

    def added_bias(self) -> Tensor | None:
        """The bias that the product adds."""
        if self.bias is None or not self.projection.adds_bias:
            return None
        order = self.projection.row_order
        return self.bias.data[torch.tensor(order)] if order else self.bias.data

    def add_part(self, weight: HeldWeight) -> None:
        """Take the next projection, in place of rows of the weight."""
        self._parts.append(weight)

    def take_rows(self, indexes: Tensor) -> Tensor:
        """Rows of the weight by their indexes, in the model's dtype: [T] int64 -> [T, in_size]."""
        if self.weight is not None:
            return _rows(self.weight, self._dtype, indexes)
        assert self.product is not None
        return self.product.take_rows(indexes)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_size] -> [T, sum(out_sizes)]"""
        assert self.product is not None
        return self.product(x)

    def multiply_to_float32(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[T, in_size] -> [T, sum(out_sizes)] float32. See `Product.to_float32`."""
        assert self.product is not None
        return self.product.to_float32(x, out)


class ExpertLinear(nn.ModuleList):
    """A `Linear` of each expert, of one size, by which slots are multiplied: see `ExpertProduct`."""

    def __init__(self, linears: Sequence[Linear], operations: Operations) -> None:
        super().__init__(linears)
        self.linears = list(linears)
        self.product: ExpertProduct | None = None
        self._operations = operations

    def num_bytes(self) -> int:
        """Return what the weights take that are not quantised."""
        linears = [linear for linear in self.linears if not linear.format.group_size]
        return sum(linear.weight.nbytes for linear in linears if linear.weight is not None)

    def allocate(self, device: torch.device) -> dict[int, Tensor]:
        """Return memory for parameters by their ids: that of all experts is one, so that `stack` need not copy."""
        memory: dict[int, Tensor] = {}
        linears = [linear for linear in self.linears if not linear.format.group_size]
        for parameters in ([linear.weight for linear in linears], [linear.bias for linear in self.linears]):
            found = [parameter for parameter in parameters if parameter is not None]
            if found:
                whole = torch.empty(len(found), *found[0].shape, dtype=found[0].dtype, device=device)
                memory |= {id(parameter): part for parameter, part in zip(found, whole, strict=True)}
        return memory

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
        self.weight = nn.Parameter(torch.empty(num_embeddings, size), requires_grad=False)
        self.format = HeldFormat(self.weight.dtype)  # what the weight is held in
        self._dtype = torch.float32

    def finish_loading(self, dtype: torch.dtype) -> None:
        """`dtype`: what rows are given in."""
        self._dtype = dtype

    def take_rows(self, indexes: Tensor) -> Tensor:
        """[T] int64 -> [T, size]"""
        return _rows(self.weight, self._dtype, indexes)


def _rows(weight: Tensor, dtype: torch.dtype, indexes: Tensor) -> Tensor:
    return F.embedding(indexes, weight).to(dtype)
