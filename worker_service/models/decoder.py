"""One decoder for all families: they differ by the flags of `ModelConfig`."""

import hashlib
import struct
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagewire.common.network.config import ModelConfig
from pagewire.kernels.arguments import HeadPreparation
from worker_service.models.communicator import Communicator
from worker_service.models.linear import Embedding, Linear
from worker_service.models.mlp import MLP, ExpertMLP
from worker_service.models.model import Attend
from worker_service.models.operations import Operations
from worker_service.models.rope import RotaryEmbedding, head_order, query_scales
from worker_service.models.shard import vocabulary_share

# Cosines and sines of a step's positions, [T, head_dim] each.
Angles = tuple[Tensor, Tensor]


class Decoder(nn.Module):
    """Token ids to final hidden states to logits. `config` has the heads and columns of this rank."""

    def __init__(self, config: ModelConfig, operations: Operations, communicator: Communicator) -> None:
        super().__init__()
        self.config = config
        self.operations = operations
        self.communicator = communicator
        positions = config.max_position_embeddings
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = Embedding(positions, config.hidden_size) if config.has_position_embedding else None
        self.embedding_norm = Norm(config, operations) if config.embedding_norm else None
        ropes = list(dict.fromkeys(rope for rope in config.ropes if rope is not None))
        self.ropes = nn.ModuleList(RotaryEmbedding(rope, config.head_dim, positions) for rope in ropes)
        # Of each layer, the place of its angles among those of the step; None: it has no positions.
        self.rope_numbers = [None if rope is None else ropes.index(rope) for rope in config.ropes]
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, operations, communicator) for layer in range(config.num_layers)
        )
        self.norm = Norm(config, operations)
        num_logits = vocabulary_share(config.vocab_size, communicator.size)
        self.head = Linear(config.hidden_size, [num_logits], operations, bias=False, gives_float32=True)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `Model.forward`."""
        config = self.config
        x = self.embedding(token_ids)  # [T, hidden_size]
        if config.embedding_multiplier != 1:
            x = x * config.embedding_multiplier
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x, None)
        angles = [rope(positions) for rope in self.ropes]
        growth = None if config.query_growth is None else query_scales(config.query_growth, positions)
        update = None
        for layer, number in zip(self.layers, self.rope_numbers, strict=True):
            update = layer(x, update, None if number is None else angles[number], growth, attend)
        return self.norm(x, update)

    def tables_digest(self, slopes: Sequence[float]) -> str:
        """See `Model.tables_digest`."""
        digests = [rope.digest for rope in self.ropes if isinstance(rope, RotaryEmbedding)]
        return hashlib.sha256(b"".join([*digests, *(struct.pack("<d", slope) for slope in slopes)])).hexdigest()

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Model.compute_logits`."""
        config = self.config
        if self.communicator.size == 1:
            logits = self.head.multiply_to_float32(hidden, out)
        else:
            logits = self.communicator.all_gather(self.head.multiply_to_float32(hidden))[:, : config.vocab_size]
            logits = logits if out is None else out.copy_(logits)
        if config.logits_multiplier != 1:
            logits.mul_(config.logits_multiplier)
        if config.logits_softcap:
            logits.div_(config.logits_softcap).tanh_().mul_(config.logits_softcap)
        return logits


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, operations: Operations, communicator: Communicator) -> None:
        super().__init__()
        self.config = config
        self.attention_norm = Norm(config, operations) if config.pre_norm else None
        self.attention = Attention(config, layer, operations, communicator)
        self.attention_post_norm = Norm(config, operations) if config.post_norm else None
        self.mlp_norm = Norm(config, operations) if config.pre_norm else None
        self.mlp: MLP | ExpertMLP
        if config.has_experts(layer):
            self.mlp = ExpertMLP(config, operations, communicator)
        else:
            self.mlp = MLP(config, config.intermediate_size, operations, communicator)
        self.mlp_post_norm = Norm(config, operations) if config.post_norm else None

    def forward(
        self, x: Tensor, update: Tensor | None, angles: Angles | None, growth: Tensor | None, attend: Attend
    ) -> Tensor:
        """`update` is what the layer before adds to `x`, which is changed in place; returns what this one adds."""
        attended = self.attention(_add(x, update, self.attention_norm), angles, growth, attend)
        attended = self._finish(attended, self.attention_post_norm)
        if not self.config.is_parallel:
            return self._finish(self.mlp(_add(x, attended, self.mlp_norm)), self.mlp_post_norm)
        update = self._finish(self.mlp(_add(x, None, self.mlp_norm)), self.mlp_post_norm)
        x.add_(attended)
        return update

    def _finish(self, update: Tensor, norm: "Norm | None") -> Tensor:
        """What becomes of an update before it is added."""
        if norm is not None:
            update = norm(update, None)
        return update if self.config.residual_multiplier == 1 else update * self.config.residual_multiplier


def _add(x: Tensor, update: Tensor | None, norm: "Norm | None") -> Tensor:
    """x += update, where there is one; returns the norm of x, where there is one, else x."""
    if norm is not None:
        return norm(x, update)
    return x if update is None else x.add_(update)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, operations: Operations, communicator: Communicator) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.operations = operations
        self.communicator = communicator
        qkv_sizes = [num * config.head_dim for num in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        self.qkv = Linear(config.hidden_size, qkv_sizes, operations, bias=config.qkv_bias)
        self.qkv.row_order = _row_order(config, layer)
        self.query_norm = HeadNorm(config, layer, config.num_heads)
        self.key_norm = HeadNorm(config, layer, config.num_kv_heads)
        self.sinks = nn.Parameter(torch.empty(config.num_heads), requires_grad=False) if config.has_sinks else None
        self.output = Linear(
            qkv_sizes[0],
            [config.hidden_size],
            operations,
            bias=config.output_bias,
            adds_bias=communicator.rank == 0,
        )

    def forward(self, x: Tensor, angles: Angles | None, growth: Tensor | None, attend: Attend) -> Tensor:
        config = self.config
        qkv = self.qkv(x)
        if config.qk_norm == "projection":
            qkv = self._normalize_projections(qkv)
        if config.qkv_limit:
            qkv = qkv.clamp(-config.qkv_limit, config.qkv_limit)
        heads = qkv.unflatten(1, (-1, config.head_dim))  # [T, all heads, head_dim]
        if growth is not None:
            heads[:, : config.num_heads] *= growth[:, None, None].to(heads.dtype)
        attended = self._attend(heads, angles, attend)
        return self.communicator.all_reduce(self.output(attended.flatten(1)))

    def _attend(self, heads: Tensor, angles: Angles | None, attend: Attend) -> Tensor:
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        query_weight, key_weight = self.query_norm.weight, self.key_norm.weight
        if self.config.qk_norm == "projection":
            query_weight = key_weight = None
        if angles is None and query_weight is None and key_weight is None:
            query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
            return attend(self.layer, query, key, value, self.sinks)
        if angles is None:
            ones = heads.new_ones(len(heads), self.config.head_dim)
            angles = ones, torch.zeros_like(ones)
        preparation = HeadPreparation(num_heads, query_weight, key_weight, self.config.norm_eps, *angles)
        return self.operations.attend_heads(attend, self.layer, heads, preparation, self.sinks)

    def _normalize_projections(self, qkv: Tensor) -> Tensor:
        """RMS norm over all heads of queries, and over all of keys, of all ranks."""
        queries, keys, values = qkv.split(self.qkv.out_sizes, dim=1)
        assert self.query_norm.weight is not None
        assert self.key_norm.weight is not None
        parts = [(queries.contiguous(), self.query_norm.weight), (keys.contiguous(), self.key_norm.weight)]
        if self.communicator.size == 1:
            return torch.cat(
                [*(self.operations.rms_norm(x, weight, self.config.norm_eps) for x, weight in parts), values], dim=1
            )
        sums = torch.cat([x.float().square().sum(1, keepdim=True) for x, _ in parts], dim=1)
        # Where several ranks hold a key head, all are held equally often.
        means = [
            total / (self.communicator.size * x.shape[1])
            for total, (x, _) in zip(self.communicator.all_reduce(sums).split(1, dim=1), parts, strict=True)
        ]
        normed = [
            (x.float() / (mean + self.config.norm_eps).sqrt()).to(weight.dtype) * weight
            for mean, (x, weight) in zip(means, parts, strict=True)
        ]
        return torch.cat([*(x.to(qkv.dtype) for x in normed), values], dim=1)


class HeadNorm(nn.Module):
    """The weight that heads are normalized with, of one or of all; None: they are not."""

    def __init__(self, config: ModelConfig, layer: int, num_heads: int) -> None:
        super().__init__()
        num_normed = {"none": 0, "head": 1, "projection": num_heads}[config.qk_norm]
        size = num_normed * config.head_dim
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False) if size else None
        self._adds_one = config.norm_adds_one
        order = _head_order(config, layer)
        self._order = None if order is None else _repeated(order, num_normed)

    def finish_loading(self) -> None:
        if self.weight is None:
            return
        if self._adds_one:
            self.weight.data.add_(1)
        if self._order is not None:
            self.weight.data.copy_(self.weight.data[torch.tensor(self._order)])


def _head_order(config: ModelConfig, layer: int) -> list[int] | None:
    rope = config.ropes[layer]
    return None if rope is None else head_order(rope, config.head_dim)


def _row_order(config: ModelConfig, layer: int) -> list[int] | None:
    """Which row of the checkpoint's queries, keys and values each of ours is; None: they are in that order."""
    order = _head_order(config, layer)
    num_heads, num_kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
    if order is None and not config.qkv_by_head:
        return None
    heads = _repeated(order or list(range(size)), num_heads + num_kv_heads)
    rows = [*heads, *range(len(heads), len(heads) + num_kv_heads * size)]
    if not config.qkv_by_head:
        return rows
    # The checkpoint has each head's query, key and value together.
    return [(row // size % num_heads * 3 + row // size // num_heads) * size + row % size for row in rows]


def _repeated(order: list[int], num_heads: int) -> list[int]:
    """The order of the values of several heads."""
    return [head * len(order) + value for head in range(num_heads) for value in order]


class Norm(nn.Module):
    """The weight of a normalization: see `Operations.rms_norm`; or that and the bias of a layer normalization (Ba et
    al., 2016, https://arxiv.org/abs/1607.06450)."""

    def __init__(self, config: ModelConfig, operations: Operations) -> None:
        super().__init__()
        size = config.hidden_size
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if config.norm_bias else None
        self.config = config
        self.operations = operations

    def finish_loading(self) -> None:
        if self.config.norm_adds_one:
            self.weight.data.add_(1)

    def forward(self, x: Tensor, update: Tensor | None) -> Tensor:
        """Return the norm of x, to which an update, if there is one, is added first, in place."""
        eps = self.config.norm_eps
        if self.config.norm == "layer":
            x = x if update is None else x.add_(update)
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, eps)
        if update is None:
            return self.operations.rms_norm(x, self.weight, eps)
        return self.operations.add_rms_norm(x, update, self.weight, eps)
