"""Layers that load their weights: linear layers in the layout that their matrix multiplication needs, and
embeddings."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagewire.kernels.weight import StoredFormat, StoredWeight
from pagewire.network.operations import Projection
from worker_service.models.torch_operations import ExpertProduct, Operations, Product

# Creates a `Product` with the given bias from a weight that was quantised and packed at an earlier start.
KeptProduct = Callable[[Tensor | None], Product]


class Linear(nn.Module):
    """A linear layer, x W^T + b: an ordinary layer, or the weight of one expert in an `ExpertLinear`.

    After the weights are loaded, call `finish_loading`, which prepares the weight for matrix multiplication.
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
        self.format = StoredFormat(self.weight.dtype)  # the format in which the weight is kept
        self._parts: list[StoredWeight] = []
        self._operations = operations

    def finish_loading(self, dtype: torch.dtype, kept: KeptProduct | None = None) -> None:
        """Prepare the loaded weight for matrix multiplication in `dtype`, the dtype in which the model computes. If
        `kept` is given, it supplies the weight as an earlier start of the worker already packed it. Calls after the
        first do nothing."""
        if self.weight is None or self.product is not None:
            return
        self._dtype = dtype = torch.float32 if self.projection.is_float32 else dtype
        bias, weight = self.added_bias(), self.weight
        if kept is None:
            rounds_inputs = self.format.rounds_inputs
            self.product = self._operations.prepare_product(
                self.release_weight(), bias, dtype, rounds_inputs=rounds_inputs
            )
        else:
            self.product = kept(bias)
        self.weight = weight if self.projection.has_row_lookup and not self.product.has_row_lookup else None

    def release_weight(self) -> StoredWeight:
        """Return the weight of this layer, with its rows in the order of the outputs, and remove it from the layer. So
        the caller can free the memory."""
        assert self.weight is not None
        weight = StoredWeight.join(self._parts or [StoredWeight(self.weight.data)])
        self.weight, self._parts = None, []
        order = self.projection.row_order
        return weight[torch.tensor(order)] if order else weight

    def added_bias(self) -> Tensor | None:
        """Return the bias that this rank adds to the layer's outputs, in the order of the outputs. Return None if the
        layer has no bias or another rank adds it."""
        if self.bias is None or not self.projection.adds_bias:
            return None
        order = self.projection.row_order
        return self.bias.data[torch.tensor(order)] if order else self.bias.data

    def add_part(self, weight: StoredWeight) -> None:
        """Append the quantised weight of one part of a merged projection, such as Q, K or V, in the order of the parts.
        Quantised parts are used instead of the corresponding rows of the float parameter `weight`."""
        self._parts.append(weight)

    def lookup_rows(self, indexes: Tensor) -> Tensor:
        """Return rows of the weight matrix by index, in the model's dtype, so that the LM head can also serve as the
        embedding: [T] int64 -> [T, in_size]."""
        if self.weight is not None:
            return _rows(self.weight, self._dtype, indexes)
        assert self.product is not None
        return self.product.lookup_rows(indexes)

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b for activations x: [T, in_size] -> [T, sum(out_sizes)]."""
        assert self.product is not None
        return self.product(x)

    def multiply_to_float32(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return x W^T + b in float32, used for logits: [T, in_size] -> [T, sum(out_sizes)]. The result is written to
        the dense tensor `out`, or to new memory if `out` is None."""
        assert self.product is not None
        return self.product.to_float32(x, out)


class ExpertLinear(nn.ModuleList):
    """One projection of a mixture-of-experts layer, with the weights of all experts. It contains one `Linear` for each
    expert, all of equal size. Each token is multiplied only by the weights of its chosen experts."""

    def __init__(self, linears: Sequence[Linear], operations: Operations) -> None:
        super().__init__(linears)
        self.linears = list(linears)
        self.product: ExpertProduct | None = None
        self._operations = operations

    def num_bytes(self) -> int:
        """Return the size in bytes of all experts' weights that are not quantised."""
        linears = [linear for linear in self.linears if not linear.format.group_size]
        return sum(linear.weight.nbytes for linear in linears if linear.weight is not None)

    def allocate(self, device: torch.device) -> dict[int, Tensor]:
        """Allocate memory for the parameters of all experts. Return a dictionary with the memory of each parameter,
        keyed by the `id` of the parameter. All weights are in one allocation, and all biases in another, so that
        `stack` needs no copy. Quantised weights get no memory here."""
        memory: dict[int, Tensor] = {}
        linears = [linear for linear in self.linears if not linear.format.group_size]
        for parameters in ([linear.weight for linear in linears], [linear.bias for linear in self.linears]):
            found = [parameter for parameter in parameters if parameter is not None]
            if found:
                whole = torch.empty(len(found), *found[0].shape, dtype=found[0].dtype, device=device)
                memory |= {id(parameter): part for parameter, part in zip(found, whole, strict=True)}
        return memory

    def finish_loading(self, dtype: torch.dtype) -> None:
        """Prepare the loaded weights of all experts for matrix multiplication, as one object. Quantised weights were
        already prepared expert by expert while loading; here they are joined."""
        products = [linear.product for linear in self.linears if linear.product is not None]
        if products:
            assert len(products) == len(self)
            self.product = self._operations.join_experts(products)
            for linear in self.linears:
                linear.product = None  # otherwise the joined weights would be in memory twice
            return
        biases = [linear.added_bias() for linear in self.linears]
        added = [bias for bias in biases if bias is not None]
        weights = stack([linear.release_weight().values for linear in self.linears])
        self.product = self._operations.prepare_experts(weights, stack(added) if added else None, dtype)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """Multiply each token by the weights of its chosen experts. A pair of a token and one of its chosen experts is
        called a slot. `x` has one row per token, [T, in_size], or one row per slot, [T * num_chosen, in_size]. `ids`
        [T, num_chosen] contains the chosen experts of each token. The result has one row per slot, [T * num_chosen,
        sum(out_sizes)]."""
        assert self.product is not None
        return self.product(x, ids)


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors of equal shape along a new first dimension, as `torch.stack` does. If the tensors are adjacent in
    one allocation, return a view and do not copy."""
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
    """An embedding table: a weight with one row for each token id or position. Its memory is uninitialized until the
    weights are loaded."""

    def __init__(self, num_embeddings: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_embeddings, size), requires_grad=False)
        self.format = StoredFormat(self.weight.dtype)  # the format in which the weight is kept
        self._dtype = torch.float32

    def finish_loading(self, dtype: torch.dtype) -> None:
        """Store the dtype in which the model computes. `lookup_rows` returns rows in this dtype."""
        self._dtype = dtype

    def lookup_rows(self, indexes: Tensor) -> Tensor:
        """Return rows of the embedding table by index, in the model's dtype: [T] int64 -> [T, size]."""
        return _rows(self.weight, self._dtype, indexes)


def _rows(weight: Tensor, dtype: torch.dtype, indexes: Tensor) -> Tensor:
    return F.embedding(indexes, weight).to(dtype)
