"""How a CPU gets from a step's tokens to logits: by one call of the C kernels for a whole model, with no Python, and no
threads sent home, in between; or layer by layer."""

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pagewire.kernels.cpu import (
    Activate,
    Add,
    AllReduce,
    AttendTo,
    Clip,
    CpuKernels,
    DecoderKernel,
    Embed,
    Gate,
    Multiply,
    MultiplyRouted,
    Normalize,
    NormalizeParts,
    Operation,
    PackedLinear,
    Predict,
    Route,
    SumSlots,
    Turn,
)
from worker_service.attention import AttentionBackend, CpuAttend, CpuAttention
from worker_service.host.operations import CpuExpertProduct, CpuProduct
from worker_service.models.decoder import Attention, Decoder, DecoderLayer, Norm
from worker_service.models.linear import ExpertLinear, Linear
from worker_service.models.mlp import MLP, ExpertMLP
from worker_service.models.model import Attend, Model
from worker_service.models.rope import RotaryEmbedding, query_scales


class Outputs(NamedTuple):
    """The outputs of a model for a step of T tokens, R of which have logits."""

    hidden: Tensor  # [T, hidden_size], final hidden states
    logits: Tensor  # [R, vocab_size] float32
    highest: Tensor | None  # [R] int64, as `highest_logits` gives it; None: not looked for
    times: dict[str, int]  # nanoseconds by part, as `StepParts` names them, as far as they are told apart


class LayeredModel:
    """A model whose parts are called one by one. Callers hold `torch.inference_mode`."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.compute_logits = model.compute_logits

    def forward_logits(self, token_ids: Tensor, positions: Tensor, attend: Attend, logit_rows: Tensor) -> Outputs:
        """Compute a step: token_ids and positions are [T] int64, logit_rows the tokens that have logits, [R] int64."""
        hidden = self._model.forward(token_ids, positions, attend)
        began_ns = time.perf_counter_ns()
        if len(logit_rows):
            chosen = hidden if len(logit_rows) == len(hidden) else hidden.index_select(0, logit_rows)
            logits = self._model.compute_logits(chosen)
        else:
            logits = torch.empty(0, self._model.config.vocab_size)
        return Outputs(hidden, logits, None, {"head": time.perf_counter_ns() - began_ns})


def host_model(model: Model, backend: AttentionBackend) -> "CpuDecoder | LayeredModel":
    """A `CpuDecoder` where the kernels compute all of the model, else its layers. Norms over projections that ranks
    share out are summed up by the layers alone."""
    if not isinstance(backend, CpuAttention) or not isinstance(model, Decoder):
        return LayeredModel(model)
    if model.communicator.size > 1 and model.config.qk_norm == "projection":
        return LayeredModel(model)
    product = model.head.product
    return CpuDecoder(model, product.kernels) if isinstance(product, CpuProduct) else LayeredModel(model)


class CpuDecoder:
    """Computes what a `LayeredModel` does, as a list of operations."""

    def __init__(self, model: Decoder, kernels: CpuKernels) -> None:
        self.compute_logits = model.compute_logits
        self._communicator = model.communicator
        self._vocab_size = model.config.vocab_size
        all_reduce = self._communicator.all_reduce if self._communicator.size > 1 else None
        listed = list(_Listing(model, kernels).decoder())
        self._kernel = DecoderKernel(kernels, listed, model.config.num_heads, all_reduce)

    def forward_logits(self, token_ids: Tensor, positions: Tensor, attend: Attend, logit_rows: Tensor) -> Outputs:
        """See `LayeredModel.forward_logits`. `attend` is one that `CpuAttention` prepared."""
        assert isinstance(attend, CpuAttend)
        step = (attend.rows, attend.scorings, attend.kv_cache)
        outputs = Outputs(*self._kernel.forward(token_ids, positions, logit_rows, *step), self._kernel.times())
        if self._communicator.size == 1:
            return outputs
        logits = self._communicator.all_gather(outputs.logits) if len(logit_rows) else outputs.logits
        return outputs._replace(logits=logits[:, : self._vocab_size], highest=None)


class _Listing:
    """The operations of a model, in the order in which they are carried out."""

    def __init__(self, model: Decoder, kernels: CpuKernels) -> None:
        config = model.config
        self._model = model
        self._kernels = kernels
        self._config = config
        self._gates_silu = config.is_gated and config.activation == "silu"
        self._factor = config.residual_multiplier
        self._updates: list[str] = []  # buffers that are still to be added to x
        self._angles = [
            (rope.cos.float(), rope.sin.float()) for rope in model.ropes if isinstance(rope, RotaryEmbedding)
        ]
        positions = torch.arange(config.max_position_embeddings)
        self._query_scales = None if config.query_growth is None else query_scales(config.query_growth, positions)

    def decoder(self) -> Iterator[Operation]:
        model, config = self._model, self._config
        embedded = model.position_embedding
        positions = None if embedded is None or embedded.weight is None else embedded.weight.data
        output = "x" if model.embedding_norm is None else "embedded"
        weight = model.embedding.weight
        table = _packed(model.embedding.rows or model.head) if weight is None else weight.data
        yield Embed(output, table, positions, config.embedding_multiplier)
        if model.embedding_norm is not None:
            yield self._normalize(model.embedding_norm, output, "x", None)
        for number, layer in enumerate(model.layers):
            assert isinstance(layer, DecoderLayer)
            yield from self._layer(number, layer)
        yield from self._read(model.norm, "normed")
        yield Predict("normed", _packed(model.head), config.logits_multiplier, config.logits_softcap)

    def _layer(self, number: int, layer: DecoderLayer) -> Iterator[Operation]:
        yield from self._read(layer.attention_norm, "normed")
        source = "normed" if layer.attention_norm is not None else "x"
        yield from self._attention(number, layer.attention, source)
        if not self._config.is_parallel:
            yield from self._finish("update", layer.attention_post_norm)
            yield from self._read(layer.mlp_norm, "normed")
        else:
            yield from self._read(layer.mlp_norm, "normed")
            yield from self._finish("update", layer.attention_post_norm)
        target = "mlp_update" if self._config.is_parallel else "update"
        yield from self._mlp(layer.mlp, source, target)
        yield from self._finish(target, layer.mlp_post_norm)

    def _attention(self, number: int, attention: Attention, source: str) -> Iterator[Operation]:
        eps = self._config.norm_eps
        yield Multiply(source, "heads", _packed(attention.qkv))
        heads = "heads"
        query_norm, key_norm = (
            None if norm.weight is None else norm.weight.data.float()
            for norm in (attention.query_norm, attention.key_norm)
        )
        if self._config.qk_norm == "projection" and query_norm is not None and key_norm is not None:
            yield NormalizeParts(heads, "normed_heads", (query_norm, key_norm), eps)
            heads, query_norm, key_norm = "normed_heads", None, None
        if self._config.qkv_limit:
            yield Clip(heads, "clipped_heads", self._config.qkv_limit)
            heads = "clipped_heads"
        place = self._model.rope_numbers[number]
        cos, sin = (None, None) if place is None else self._angles[place]
        yield Turn(
            heads, "queries", number, self._config.head_dim, query_norm, key_norm, eps, cos, sin, self._query_scales
        )
        yield AttendTo("queries", "attended", number, attention.sinks)
        yield Multiply("attended", "update", _packed(attention.output))
        if self._model.communicator.size > 1:  # each has a part of the inputs
            yield AllReduce("update", "update")

    def _mlp(self, mlp: nn.Module, source: str, target: str) -> Iterator[Operation]:
        if isinstance(mlp, ExpertMLP):
            yield from self._experts(mlp, source, target)
        else:
            assert isinstance(mlp, MLP)
            yield from self._partial(mlp, source, target, "")
        if self._model.communicator.size > 1:
            yield AllReduce(target, target)

    def _partial(self, mlp: MLP, source: str, target: str, prefix: str) -> Iterator[Operation]:
        """`prefix`: of the buffers in between, whose widths are those of this MLP."""
        up, activated = _packed(mlp.up), f"{prefix}activated"
        if self._gates_silu and self._kernels.can_gate(up):
            yield Multiply(source, activated, up, is_gated=True)
        else:
            yield Multiply(source, f"{prefix}up", up)
            yield self._activate(f"{prefix}up", activated)
        yield Multiply(activated, target, _packed(mlp.down))

    def _experts(self, mlp: ExpertMLP, source: str, target: str) -> Iterator[Operation]:
        yield Multiply(source, "logits", _packed(mlp.router))
        yield Route("logits", "routes", mlp.routing, mlp.router.correction)
        ups = _packed_experts(mlp.up)
        if self._gates_silu and all(map(self._kernels.can_gate, ups)):
            yield MultiplyRouted(source, "activated_slots", "routes", ups, is_gated=True)
        else:
            yield MultiplyRouted(source, "up_slots", "routes", ups)
            yield self._activate("up_slots", "activated_slots", mlp.routing.num_chosen)
        yield MultiplyRouted("activated_slots", "down_slots", "routes", _packed_experts(mlp.down))
        yield SumSlots("down_slots", target, "routes")
        if mlp.shared is None:
            return
        yield from self._partial(mlp.shared, source, "shared", "shared_")
        if mlp.shared_gate is not None:
            yield Multiply(source, "shared_gate", _packed(mlp.shared_gate))
            yield Gate("shared", "shared_gate", "shared")
        yield Add(target, "shared")

    def _read(self, norm: Norm | None, output: str) -> Iterator[Operation]:
        """Adds to x what is still to be added, and normalizes it where there is a norm."""
        while self._updates and (norm is None or len(self._updates) > 1):
            yield Add("x", self._updates.pop(0), self._factor)
        if norm is not None:
            yield self._normalize(norm, "x", output, self._updates.pop() if self._updates else None)

    def _finish(self, update: str, norm: Norm | None) -> Iterator[Operation]:
        """What becomes of an update before it is added."""
        if norm is not None:
            yield self._normalize(norm, update, f"normed_{update}", None)
        self._updates.append(update if norm is None else f"normed_{update}")

    def _normalize(self, norm: Norm, source: str, output: str, update: str | None) -> Normalize:
        bias = None if norm.bias is None else norm.bias.data.float()
        weight = norm.weight.data.float()
        is_centered = self._config.norm == "layer"
        return Normalize(source, output, weight, self._config.norm_eps, update, bias, is_centered, self._factor)

    def _activate(self, source: str, output: str, num_parts: int = 1) -> Activate:
        config = self._config
        return Activate(
            source, output, config.activation, config.is_gated, num_parts, config.swiglu_alpha, config.swiglu_limit
        )


def _packed(linear: Linear) -> PackedLinear:
    assert isinstance(linear.product, CpuProduct)
    return linear.product.packed


def _packed_experts(linear: ExpertLinear) -> tuple[PackedLinear, ...]:
    assert isinstance(linear.product, CpuExpertProduct)
    return linear.product.packed.linears
