"""Models that are computed in one call of the C kernels: no Python, and no threads sent home, in between."""

from collections.abc import Iterator
from typing import TypeVar

from torch import Tensor, nn

from pagewire.kernels.cpu import (
    Activate,
    AttendTo,
    CpuKernels,
    DecoderKernel,
    Embed,
    Multiply,
    Normalize,
    Operation,
    PackedLinear,
    Predict,
    Turn,
)
from worker_service.attention import AttentionBackend, CpuAttend, CpuAttention
from worker_service.host.model import HostModel, LayeredModel, Outputs
from worker_service.host.operations import CpuProduct
from worker_service.models.decoder import Decoder, DecoderLayer
from worker_service.models.gpt2 import GPT2, GPT2Layer
from worker_service.models.linear import Embedding, Linear
from worker_service.models.model import Attend, Model

_M = TypeVar("_M", bound=nn.Module)


def host_model(model: Model, backend: AttentionBackend) -> HostModel:
    """A `CpuDecoder` where the kernels compute all of the model, else its layers: several ranks meet in between."""
    if not isinstance(backend, CpuAttention) or not isinstance(model, Decoder | GPT2) or model.communicator.size > 1:
        return LayeredModel(model)
    product = model.head.product
    return CpuDecoder(model, product.kernels) if isinstance(product, CpuProduct) else LayeredModel(model)


class CpuDecoder:
    """Computes what a model does, as a list of operations."""

    def __init__(self, model: Decoder | GPT2, kernels: CpuKernels) -> None:
        self.compute_logits = model.compute_logits
        listed = _list_decoder(model, kernels) if isinstance(model, Decoder) else _list_gpt2(model)
        self._kernel = DecoderKernel(kernels, list(listed), model.config.num_heads)

    def forward_logits(self, token_ids: Tensor, positions: Tensor, attend: Attend, logit_rows: Tensor) -> Outputs:
        """See `HostModel.forward_logits`. `attend` is one that `CpuAttention` prepared."""
        assert isinstance(attend, CpuAttend)
        step = (attend.rows, attend.scorings, attend.kv_cache)
        outputs = self._kernel.forward(token_ids, positions, logit_rows, *step)
        return Outputs(*outputs, self._kernel.times())


def _list_decoder(model: Decoder, kernels: CpuKernels) -> Iterator[Operation]:
    """Llama, Mistral, Qwen2 and Qwen3."""
    eps = model.config.norm_eps
    cos, sin = model.rope.cos.float(), model.rope.sin.float()
    yield Embed("x", _table(model.embedding, model.head))
    update = None
    for number, layer in enumerate(_layers(model, DecoderLayer)):
        attention, mlp = layer.attention, layer.mlp
        yield Normalize("x", "normed", layer.attention_norm.weight.data.float(), eps, update)
        yield Multiply("normed", "heads", _packed(attention.qkv))
        norms = [_head_norm(norm.weight) for norm in (attention.query_norm, attention.key_norm)]
        yield Turn("heads", "queries", number, attention.head_dim, norms[0], norms[1], eps, cos, sin)
        yield AttendTo("queries", "attended", number)
        yield Multiply("attended", "update", _packed(attention.output))
        yield Normalize("x", "normed", layer.mlp_norm.weight.data.float(), eps, "update")
        gate_up = _packed(mlp.gate_up)
        if kernels.can_gate(gate_up):
            yield Multiply("normed", "activated", gate_up, is_gated=True)
        else:
            yield Multiply("normed", "gate_up", gate_up)
            yield Activate("gate_up", "activated", "silu_gate")
        yield Multiply("activated", "update", _packed(mlp.down))
        update = "update"
    yield Normalize("x", "normed", model.norm.weight.data.float(), eps, update)
    yield Predict("normed", _packed(model.head))


def _list_gpt2(model: GPT2) -> Iterator[Operation]:
    positions = model.position_embedding.weight
    assert positions is not None
    yield Embed("x", _table(model.embedding, model.head), positions.data)
    update = None
    for number, layer in enumerate(_layers(model, GPT2Layer)):
        yield _layer_norm(layer.attention_norm, update)
        yield Multiply("normed", "heads", _packed(layer.attention.qkv))
        yield Turn("heads", "queries", number, layer.attention.head_dim)
        yield AttendTo("queries", "attended", number)
        yield Multiply("attended", "update", _packed(layer.attention.output))
        yield _layer_norm(layer.mlp_norm, "update")
        yield Multiply("normed", "up", _packed(layer.mlp.up))
        yield Activate("up", "activated", "gelu" if layer.mlp.gelu_form == "none" else "gelu_tanh")
        yield Multiply("activated", "update", _packed(layer.mlp.down))
        update = "update"
    yield _layer_norm(model.norm, update)
    yield Predict("normed", _packed(model.head))


def _layers(model: Decoder | GPT2, kind: type[_M]) -> Iterator[_M]:
    for layer in model.layers:
        assert isinstance(layer, kind)
        yield layer


def _layer_norm(norm: nn.LayerNorm, update: str | None) -> Normalize:
    weight, bias = norm.weight.data.float(), norm.bias.data.float()
    return Normalize("x", "normed", weight, norm.eps, update, bias, is_centered=True)


def _head_norm(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.data.float()


def _table(embedding: Embedding, head: Linear) -> Tensor | PackedLinear:
    return _packed(embedding.rows or head) if embedding.weight is None else embedding.weight.data


def _packed(linear: Linear) -> PackedLinear:
    assert isinstance(linear.product, CpuProduct)
    return linear.product.packed
