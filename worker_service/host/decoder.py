"""A decoder that is computed in one call of the C kernels: no Python, and no threads sent home, in between."""

import torch
from torch import Tensor

from pagewire.kernels.cpu import CpuKernels, DecoderKernel, DecoderWeights, LayerWeights, PackedLinear
from worker_service.attention import AttentionBackend, CpuAttend, CpuAttention
from worker_service.host.model import HostModel, LayeredModel, Outputs
from worker_service.host.operations import CpuOperations, CpuProduct
from worker_service.models.decoder import Decoder, DecoderLayer
from worker_service.models.linear import Linear
from worker_service.models.model import Attend, Model


def host_model(model: Model, dtype: torch.dtype, backend: AttentionBackend) -> HostModel:
    """A `CpuDecoder` where the kernels compute all of the model, else its layers: several ranks meet in between."""
    if dtype == torch.float32 and isinstance(model, Decoder) and isinstance(backend, CpuAttention):
        operations = model.operations
        if isinstance(operations, CpuOperations) and model.communicator.size == 1:
            return CpuDecoder(model, operations.kernels)
    return LayeredModel(model)


class CpuDecoder:
    """Computes what the `Decoder` does that it is made of, in float32."""

    def __init__(self, decoder: Decoder, kernels: CpuKernels) -> None:
        self.compute_logits = decoder.compute_logits
        weights = DecoderWeights(
            embedding=decoder.embedding.weight,
            cos=decoder.rope.cos,
            sin=decoder.rope.sin,
            layers=[_layer_weights(layer) for layer in decoder.layers if isinstance(layer, DecoderLayer)],
            norm=decoder.norm.weight.data,
            head=_packed(decoder.head),
        )
        self._kernel = DecoderKernel(kernels, weights, decoder.config.norm_eps, decoder.config.num_heads)

    def forward_logits(self, token_ids: Tensor, positions: Tensor, attend: Attend, logit_rows: Tensor) -> Outputs:
        """See `HostModel.forward_logits`. `attend` is one that `CpuAttention` prepared."""
        assert isinstance(attend, CpuAttend)
        step = (attend.rows, attend.scorings, attend.kv_cache)
        outputs = self._kernel.forward(token_ids, positions, logit_rows, *step)
        return Outputs(*outputs, self._kernel.times())


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
