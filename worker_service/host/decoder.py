"""A decoder that is computed in one call of the C kernels: no Python, and no threads sent home, in between."""

import torch
from torch import Tensor

from pagewire.kernels.cpu import CpuKernels, DecoderKernel, DecoderWeights, LayerWeights, PackedLinear
from worker_service.attention import AttentionBackend, CpuAttend, CpuAttention
from worker_service.host.operations import CpuOperations, CpuProduct
from worker_service.models.decoder import Decoder, DecoderLayer
from worker_service.models.linear import Linear
from worker_service.models.model import Attend, Model


def fused(model: Model, dtype: torch.dtype, backend: AttentionBackend) -> Model:
    """The model as a `CpuDecoder` where the kernels compute all of it, else as it is: several ranks meet in between."""
    if dtype != torch.float32 or not isinstance(model, Decoder) or not isinstance(backend, CpuAttention):
        return model
    operations, is_alone = model.operations, model.communicator.size == 1
    return CpuDecoder(model, operations.kernels) if is_alone and isinstance(operations, CpuOperations) else model


class CpuDecoder:
    """Computes what the `Decoder` does that it is made of, in float32."""

    def __init__(self, decoder: Decoder, kernels: CpuKernels) -> None:
        self.config = decoder.config
        self._decoder = decoder
        weights = DecoderWeights(
            embedding=decoder.embedding.weight,
            cos=decoder.rope.cos,
            sin=decoder.rope.sin,
            layers=[_layer_weights(layer) for layer in decoder.layers if isinstance(layer, DecoderLayer)],
            norm=decoder.norm.weight.data,
            head=_packed(decoder.head),
        )
        self._kernel = DecoderKernel(kernels, weights, self.config.norm_eps, self.config.num_heads)
        self._no_rows = torch.empty(0, dtype=torch.int64)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `Model.forward`. `attend` is one that `CpuAttention` prepared."""
        return self.forward_logits(token_ids, positions, attend, self._no_rows)[0]

    def forward_logits(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, logit_rows: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`forward`; `compute_logits` of `logit_rows`, [R] int64; and the highest of each, as `sample` takes it."""
        assert isinstance(attend, CpuAttend)
        step = (attend.rows, attend.scorings, attend.kv_cache)
        return self._kernel.forward(token_ids, positions, logit_rows, *step)

    def times(self) -> dict[str, int]:
        """Nanoseconds of the last step by part, as `StepParts` names them, as far as they are told apart."""
        return self._kernel.times()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `Model.compute_logits`."""
        return self._decoder.compute_logits(hidden)


def _layer_weights(layer: DecoderLayer) -> LayerWeights:
    attention, mlp = layer.attention, layer.mlp
    return LayerWeights(
        attention_norm=layer.attention_norm.weight.data,
        query_norm=attention.query_norm.weight,
        key_norm=attention.key_norm.weight,
        qkv=_packed(attention.qkv),
        output=_packed(attention.output),
        mlp_norm=layer.mlp_norm.weight.data,
        gate_up=_packed(mlp.gate_up),
        down=_packed(mlp.down),
    )


def _packed(linear: Linear) -> PackedLinear:
    assert isinstance(linear.product, CpuProduct)
    return linear.product.packed
