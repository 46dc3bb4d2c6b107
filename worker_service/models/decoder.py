"""Llama, Mistral, Qwen2 and Qwen3: one decoder, with flags for what differs.

Llama (Touvron et al., 2023, https://arxiv.org/abs/2302.13971) with grouped-query attention (Ainslie et al., 2023,
https://arxiv.org/abs/2305.13245). Mistral (Jiang et al., 2023, https://arxiv.org/abs/2310.06825) differs by its sliding
window, which is the attention's business. Qwen2 adds biases to queries, keys and values; Qwen3 normalizes each head of
queries and keys instead (https://arxiv.org/abs/2505.09388).
"""

import torch
from torch import Tensor, nn

from pagewire.kernels.arguments import HeadPreparation
from worker_service.models.communicator import Communicator
from worker_service.models.config import ModelConfig
from worker_service.models.linear import Embedding, Linear
from worker_service.models.model import Attend
from worker_service.models.operations import Operations
from worker_service.models.rope import RotaryEmbedding
from worker_service.models.shard import Split, vocabulary_share
from worker_service.models.weights import Weight

WEIGHTS = (
    Weight("model.embed_tokens", "embedding"),
    Weight("model.layers.{layer}.input_layernorm", "layers.{layer}.attention_norm"),
    Weight("model.layers.{layer}.self_attn.q_proj", "layers.{layer}.attention.qkv", part=0, split=Split.HEADS),
    Weight("model.layers.{layer}.self_attn.k_proj", "layers.{layer}.attention.qkv", part=1, split=Split.KV_HEADS),
    Weight("model.layers.{layer}.self_attn.v_proj", "layers.{layer}.attention.qkv", part=2, split=Split.KV_HEADS),
    Weight("model.layers.{layer}.self_attn.q_norm", "layers.{layer}.attention.query_norm"),
    Weight("model.layers.{layer}.self_attn.k_norm", "layers.{layer}.attention.key_norm"),
    Weight("model.layers.{layer}.self_attn.o_proj", "layers.{layer}.attention.output", split=Split.HEADS, axis=1),
    Weight("model.layers.{layer}.post_attention_layernorm", "layers.{layer}.mlp_norm"),
    Weight("model.layers.{layer}.mlp.gate_proj", "layers.{layer}.mlp.gate_up", part=0, split=Split.INTERMEDIATE),
    Weight("model.layers.{layer}.mlp.up_proj", "layers.{layer}.mlp.gate_up", part=1, split=Split.INTERMEDIATE),
    Weight("model.layers.{layer}.mlp.down_proj", "layers.{layer}.mlp.down", split=Split.INTERMEDIATE, axis=1),
    Weight("model.norm", "norm"),
    Weight("lm_head", "head", split=Split.VOCABULARY),
)
# Old checkpoints carry the frequencies of the rotary embedding, which follow from config.json.
IGNORED = r"\.rotary_emb\.inv_freq$"


class Decoder(nn.Module):
    """Token ids to final hidden states to logits. `config` has the heads and columns of this rank."""

    def __init__(self, config: ModelConfig, operations: Operations, communicator: Communicator) -> None:
        super().__init__()
        assert config.rope is not None
        self.config = config
        self.operations = operations
        self.communicator = communicator
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.rope = RotaryEmbedding(config.rope, config.head_dim, config.max_position_embeddings)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, operations, communicator) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, operations)
        num_logits = vocabulary_share(config.vocab_size, communicator.size)
        self.head = Linear(config.hidden_size, [num_logits], operations, bias=False)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `Model.forward`."""
        x = self.embedding(token_ids)  # [T, hidden_size]
        cos, sin = self.rope(positions)
        update = None
        for layer in self.layers:
            update = layer(x, update, cos, sin, attend)
        return self.norm(x, update)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `Model.compute_logits`."""
        return self.communicator.all_gather(self.head(hidden))[:, : self.config.vocab_size].float()


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, operations: Operations, communicator: Communicator) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps, operations)
        self.attention = Attention(config, layer, operations, communicator)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, operations)
        self.mlp = MLP(config, operations, communicator)

    def forward(self, x: Tensor, update: Tensor | None, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """`update` is what the layer before adds to `x`, which is changed in place; returns what this one adds."""
        update = self.attention(self.attention_norm(x, update), cos, sin, attend)
        return self.mlp(self.mlp_norm(x, update))


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, operations: Operations, communicator: Communicator) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.num_heads = config.num_heads
        self.norm_eps = config.norm_eps
        self.operations = operations
        self.communicator = communicator
        qkv_sizes = [num * config.head_dim for num in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        self.qkv = Linear(config.hidden_size, qkv_sizes, operations, bias=config.qkv_bias)
        self.query_norm = HeadNorm(config.head_dim if config.qk_norm else None)
        self.key_norm = HeadNorm(config.head_dim if config.qk_norm else None)
        self.output = Linear(
            qkv_sizes[0],
            [config.hidden_size],
            operations,
            bias=config.output_bias,
            adds_bias=communicator.rank == 0,
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        heads = self.qkv(x).unflatten(1, (-1, self.head_dim))  # [T, all heads, head_dim]
        preparation = HeadPreparation(
            self.num_heads, self.query_norm.weight, self.key_norm.weight, self.norm_eps, cos, sin
        )
        attended = self.operations.attend_heads(attend, self.layer, heads, preparation)
        return self.communicator.all_reduce(self.output(attended.flatten(1)))


class HeadNorm(nn.Module):
    """The weight that heads are normalized with; None: they are not."""

    def __init__(self, head_dim: int | None) -> None:
        super().__init__()
        self.weight = None if head_dim is None else nn.Parameter(torch.empty(head_dim), requires_grad=False)


class MLP(nn.Module):
    """SwiGLU (Shazeer, 2020, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: ModelConfig, operations: Operations, communicator: Communicator) -> None:
        super().__init__()
        self.operations = operations
        self.communicator = communicator
        self.gate_up = Linear(config.hidden_size, [config.intermediate_size] * 2, operations, bias=config.mlp_bias)
        self.down = Linear(
            config.intermediate_size,
            [config.hidden_size],
            operations,
            bias=config.mlp_bias,
            adds_bias=communicator.rank == 0,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.communicator.all_reduce(self.down(self.operations.silu_mul(self.gate_up(x))))


class RMSNorm(nn.Module):
    """The weight of a normalization: see `Operations.rms_norm`."""

    def __init__(self, size: int, eps: float, operations: Operations) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps
        self.operations = operations

    def forward(self, x: Tensor, update: Tensor | None) -> Tensor:
        """Return the norm of x, to which an update, if there is one, is added first, in place."""
        if update is None:
            return self.operations.rms_norm(x, self.weight, self.eps)
        return self.operations.add_rms_norm(x, update, self.weight, self.eps)
