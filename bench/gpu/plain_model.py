"""A plain Qwen3 in torch with a static KV cache, as a compiled peer for the runner's decode steps.

It follows gpt-fast (github.com/meta-pytorch/gpt-fast): contiguous keys and values of a fixed length, one token for each
row, and `torch.compile`. A `shape` contains fields of config.json.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

Shape = Mapping[str, int]
ROPE_THETA, EPS = 1e6, 1e-6


class Attention(nn.Module):
    """Grouped-query attention with normalized heads and rotary positions over a cache [rows, heads, length, dim]."""

    def __init__(self, shape: Shape, num_rows: int, length: int) -> None:
        super().__init__()
        self.counts = (shape["num_attention_heads"], shape["num_key_value_heads"], shape["num_key_value_heads"])
        self.head_dim = shape["head_dim"]
        self.qkv_proj = nn.Linear(shape["hidden_size"], sum(self.counts) * shape["head_dim"], bias=False)
        self.o_proj = nn.Linear(shape["num_attention_heads"] * shape["head_dim"], shape["hidden_size"], bias=False)
        self.q_norm, self.k_norm = (nn.RMSNorm(shape["head_dim"], EPS) for _ in range(2))
        for name in ("keys", "values"):
            cache = torch.zeros(num_rows, shape["num_key_value_heads"], length, shape["head_dim"])
            self.register_buffer(name, cache, persistent=False)

    def forward(self, x: Tensor, position: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        heads = self.qkv_proj(x).view(len(x), -1, 1, self.head_dim)
        query, key, value = heads.split(self.counts, dim=1)
        self.keys.index_copy_(2, position, _rotated(self.k_norm(key), cos, sin))
        self.values.index_copy_(2, position, value)
        query = _rotated(self.q_norm(query), cos, sin)
        attended = functional.scaled_dot_product_attention(query, self.keys, self.values, mask, enable_gqa=True)
        return self.o_proj(attended.reshape(len(x), -1))


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return (heads * cos + torch.cat((-second, first), dim=-1) * sin).to(heads.dtype)


class Layer(nn.Module):
    def __init__(self, shape: Shape, num_rows: int, length: int) -> None:
        super().__init__()
        self.self_attn = Attention(shape, num_rows, length)
        self.gate_up_proj = nn.Linear(shape["hidden_size"], 2 * shape["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(shape["intermediate_size"], shape["hidden_size"], bias=False)
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(shape["hidden_size"], EPS) for _ in range(2))

    def forward(self, x: Tensor, *places: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *places)
        gate, up = self.gate_up_proj(self.post_attention_layernorm(x)).chunk(2, dim=-1)
        return x + self.down_proj(functional.silu(gate) * up)


class PlainModel(nn.Module):
    """A greedy decoder: `forward(tokens [rows], position [1])` returns the next tokens. All rows have the same
    position."""

    def __init__(self, shape: Shape, num_rows: int, length: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape["vocab_size"], shape["hidden_size"])
        self.layers = nn.ModuleList(Layer(shape, num_rows, length) for _ in range(shape["num_hidden_layers"]))
        self.norm = nn.RMSNorm(shape["hidden_size"], EPS)
        self.lm_head = nn.Linear(shape["hidden_size"], shape["vocab_size"], bias=False)
        if shape["tie_word_embeddings"]:
            self.lm_head.weight = self.embed_tokens.weight
        frequencies = ROPE_THETA ** (-torch.arange(0, shape["head_dim"], 2).float() / shape["head_dim"])
        angles = torch.outer(torch.arange(length).float(), frequencies).repeat(1, 2)
        for name, buffer in (("cos", angles.cos()), ("sin", angles.sin()), ("places", torch.arange(length))):
            self.register_buffer(name, buffer, persistent=False)

    def logits(self, tokens: Tensor, position: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        cos, sin, mask = self.cos[position], self.sin[position], self.places <= position
        for layer in self.layers:
            x = layer(x, position, cos, sin, mask.view(1, 1, 1, -1))
        return self.lm_head(self.norm(x))

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        return self.logits(tokens, position).argmax(-1)

    def products(self, inputs: dict[int, Tensor]) -> None:
        """Compute only the matmuls of a decode step. `inputs` contains an input for each number of columns."""
        for layer in self.layers:
            for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.gate_up_proj, layer.down_proj):
                linear(inputs[linear.in_features])
        self.lm_head(inputs[self.lm_head.in_features])


def make(shape: Shape, num_rows: int, length: int, device: torch.device, dtype: torch.dtype) -> PlainModel:
    """Return a model with random weights, created on the device, with a cache of `length` positions per row."""
    with torch.device(device):
        model = PlainModel(shape, num_rows, length)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model.to(dtype).eval().requires_grad_(False)
