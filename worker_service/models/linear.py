"""Layers that load their weights: linear ones, packed where the CPU has a faster layout for them, and embeddings."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# oneDNN lays a weight out for a number of rows; small batches are where the layout matters.
PACKED_NUM_ROWS = 16


class Linear(nn.Module):
    """y = x W^T + b, where W may be several projections of the same input, one below the other.

    `out_sizes` are the rows of each. `finish_loading` must be called once the weights are in.
    """

    def __init__(self, in_size: int, out_sizes: Sequence[int], *, bias: bool) -> None:
        super().__init__()
        self.out_sizes = tuple(out_sizes)
        self.weight: Tensor | None = nn.Parameter(torch.empty(sum(out_sizes), in_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(out_sizes)), requires_grad=False) if bias else None
        self._packed: Tensor | None = None

    def rows(self, part: int) -> slice:
        """The rows of weight and bias that belong to the projection of this index."""
        start = sum(self.out_sizes[:part])
        return slice(start, start + self.out_sizes[part])

    def finish_loading(self) -> None:
        """Packs the weight where that is faster at few rows, and lets go of the original."""
        if self.weight is not None and can_pack(self.weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data, PACKED_NUM_ROWS)
            self.weight = None

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_size] -> [T, sum(out_sizes)]"""
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)


def embedding(num_embeddings: int, size: int) -> nn.Embedding:
    """An embedding that draws no random weights: they are loaded, and drawing them costs seconds of imports."""
    return nn.Embedding.from_pretrained(torch.empty(num_embeddings, size))


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN computes this dtype natively on this CPU."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    is_native_bfloat16 = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 or is_native_bfloat16
