"""Llama, Mistral, Qwen2 and Qwen3: one decoder, with flags for what differs.

Llama (Touvron et al., 2023, https://arxiv.org/abs/2302.13971) with grouped-query attention (Ainslie et al., 2023,
https://arxiv.org/abs/2305.13245). Mistral (Jiang et al., 2023, https://arxiv.org/abs/2310.06825) differs by its sliding
window, which is the attention's business. Qwen2 adds biases to queries, keys and values; Qwen3 normalizes each head of
queries and keys instead (https://arxiv.org/abs/2505.09388).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker_service.models.config import ModelConfig
from worker_service.models.linear import Linear, embedding
from worker_service.models.model import Attend
from worker_service.models.rope import RotaryEmbedding, rotate
from worker_service.models.weights import Weight

WEIGHTS = (
    Weight("model.embed_tokens", "embedding"),
    Weight("model.layers.{layer}.input_layernorm", "layers.{layer}.attention_norm"),
    Weight("model.layers.{layer}.self_attn.q_proj", "layers.{layer}.attention.qkv", part=0),
    Weight("model.layers.{layer}.self_attn.k_proj", "layers.{layer}.attention.qkv", part=1),
    Weight("model.layers.{layer}.self_attn.v_proj", "layers.{layer}.attention.qkv", part=2),
    Weight("model.layers.{layer}.self_attn.q_norm", "layers.{layer}.attention.query_norm"),
    Weight("model.layers.{layer}.self_attn.k_norm", "layers.{layer}.attention.key_norm"),
    Weight("model.layers.{layer}.self_attn.o_proj", "layers.{layer}.attention.output"),
    Weight("model.layers.{layer}.post_attention_layernorm", "layers.{layer}.mlp_norm"),
    Weight("model.layers.{layer}.mlp.gate_proj", "layers.{layer}.mlp.gate_up", part=0),
    Weight("model.layers.{layer}.mlp.up_proj", "layers.{layer}.mlp.gate_up", part=1),
    Weight("model.layers.{layer}.mlp.down_proj", "layers.{layer}.mlp.down"),
    Weight("model.norm", "norm"),
    Weight("lm_head", "head"),
)
# Old checkpoints carry the frequencies of the rotary embedding, which follow from config.json.
IGNORED = r"\.rotary_emb\.inv_freq$"


class Decoder(nn.Module):
    """Token ids to final hidden states to logits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.rope is not None
        self.config = config
        self.embedding = embedding(config.vocab_size, config.hidden_size)
        self.rope = RotaryEmbedding(config.rope, config.head_dim, config.max_position_embeddings)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = Linear(config.hidden_size, [config.vocab_size], bias=False)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `Model.forward`."""
        x = self.embedding(token_ids)  # [T, hidden_size]
        cos, sin = self.rope(positions)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.norm(x)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `Model.compute_logits`."""
        return self.head(hidden).float()


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config, layer)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, attend)
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.num_heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]  # of queries, keys, values
        qkv_sizes = [num_heads * config.head_dim for num_heads in self.num_heads]
        self.qkv = Linear(config.hidden_size, qkv_sizes, bias=config.qkv_bias)
        self.query_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.key_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.output = Linear(qkv_sizes[0], [config.hidden_size], bias=config.output_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        heads = self.qkv(x).unflatten(1, (-1, self.head_dim))  # [T, all heads, head_dim]
        query, key, value = heads.split(self.num_heads, dim=1)
        query = rotate(self.query_norm(query), cos, sin)
        key = rotate(self.key_norm(key), cos, sin)
        return self.output(attend(self.layer, query, key, value).flatten(1))


class MLP(nn.Module):
    """SwiGLU (Shazeer, 2020, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.hidden_size, [config.intermediate_size] * 2, bias=config.mlp_bias)
        self.down = Linear(config.intermediate_size, [config.hidden_size], bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class RMSNorm(nn.Module):
    """Root mean square normalization (Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467), in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # Rounded to the model's dtype before the weight, as transformers does.
        return F.rms_norm(x.float(), x.shape[-1:], None, self.eps).to(x.dtype) * self.weight
