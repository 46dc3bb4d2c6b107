"""A decoder that one call of the C kernels computes."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.cpu import CpuKernels, DecoderKernel, PackedLinear
from pagewire.kernels.states import StateRows
from pagewire.network.operations import NormalizeProjections, Projection, Table, Vector, replaced
from pagewire.network.rewrites import gate_projections
from pagewire.network.rope import QueryScaling
from worker_service.attention import AttentionBackend, CpuAttend, CpuAttention
from worker_service.host.cpu_operations import CpuProduct
from worker_service.models.decoder import Decoder, Outputs
from worker_service.models.rope import RotaryEmbedding
from worker_service.models.torch_operations import Attend


def host_model(model: Decoder, backend: AttentionBackend) -> "CpuDecoder | Decoder":
    """Return a `CpuDecoder` for a model on a CPU if the C kernels support the whole model, else the model itself.

    The model itself computes one operation at a time. It is also returned if it normalizes projections that are split
    across tensor-parallel ranks, because only the model adds up the ranks' sums.
    """
    product = model.head.product
    norms = [operation for operation in model.network.operations if type(operation) is NormalizeProjections]
    is_summed = model.communicator.size > 1 and any(not norm.head_dim for norm in norms)
    if is_summed or not isinstance(backend, CpuAttention) or not isinstance(product, CpuProduct):
        return model
    return CpuDecoder(model, product.kernels)


class CpuDecoder:
    """A model on a CPU whose whole forward pass is one call of the C kernels. `Decoder` gives the same results.

    No Python runs between the operations, and the kernels' threads do not stop between them.
    """

    def __init__(self, model: Decoder, kernels: CpuKernels) -> None:
        self.compute_logits, self._mask_unused = model.compute_logits, model.mask_unused
        self._communicator = model.communicator
        self._vocab_size, self._has_unused = model.network.vocab_size, bool(model.network.unused_tokens)
        all_reduce = self._communicator.all_reduce if self._communicator.size > 1 else None
        self._kernel = DecoderKernel(kernels, list(_Binding(model, kernels).operations()), all_reduce)

    def forward_logits(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        logit_rows: Tensor,
        states: StateRows | None = None,
    ) -> Outputs:
        """Run the forward pass of a step and return the logits of the tokens in `logit_rows`.

        See `Decoder.forward_logits`. The backend `CpuAttention` must have prepared `attend`.
        """
        assert isinstance(attend, CpuAttend)
        step = (attend.rows, attend.scorings, attend.kv_cache, attend.layer_groups, states)
        outputs = Outputs(*self._kernel.forward(token_ids, positions, logit_rows, *step), self._kernel.times())
        if self._communicator.size == 1 and not self._has_unused:
            return outputs
        logits = outputs.logits
        if self._communicator.size > 1 and len(logit_rows):
            logits = self._communicator.all_gather(logits)
        return outputs._replace(logits=self._mask_unused(logits[:, : self._vocab_size]), highest=None)


class _Binding:
    """A translation of a model's operations into the form that the C kernels read.

    It replaces each reference to a weight by the object that the kernels use, such as a packed weight.
    """

    def __init__(self, model: Decoder, kernels: CpuKernels) -> None:
        self._model = model
        self._kernels = kernels
        positions = torch.arange(model.network.max_position_embeddings)
        grown = {growth: table(positions) for growth, table in model.tables.items() if type(growth) is QueryScaling}
        self._bind: dict[type, Callable[[Any], Any]] = {
            Vector: lambda vector: model.holders[vector].float(),
            Table: lambda table: model.holders[table].weight.data,
            Projection: self._projection,
            RotaryEmbedding: lambda table: (table.cos.float(), table.sin.float()),
            QueryScaling: lambda growth: grown[growth],
        }

    def operations(self) -> Iterator[Any]:
        for operation in gate_projections(self._model.network.operations, self._can_gate):
            yield replaced(self._model.with_rope_table(operation), self._bind)

    def _projection(self, projection: Projection) -> PackedLinear | Sequence[PackedLinear]:
        linears = self._linears(projection)
        return linears if projection.num_experts else linears[0]

    def _linears(self, projection: Projection) -> Sequence[PackedLinear]:
        """Return the packed weights of a projection: one, or one for each expert."""
        packed = self._model.holders[projection].product.packed
        return getattr(packed, "linears", None) or (packed,)

    def _can_gate(self, projection: Projection) -> bool:
        return all(map(self._kernels.can_gate, self._linears(projection)))
