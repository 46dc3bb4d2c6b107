"""Phi-3-small in plain torch, for comparisons: transformers has no such model.

The attention mask is dense and follows the published formula. The model is registered with transformers under the
published names, so that `AutoConfig` and `AutoModelForCausalLM` find it.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

# Settings of configuration_phi3_small.py in the published repositories, with their defaults.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 100_352,
    "max_position_embeddings": 8192,
    "rope_embedding_base": 1e6,
    "rope_position_scale": 1.0,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "gegelu",
    "gegelu_limit": 20.0,
    "gegelu_pad_to_256": True,
    "ff_dim_multiplier": None,
    "ff_intermediate_size": 14_336,
    "blocksparse_homo_head_pattern": False,
    "blocksparse_block_size": 64,
    "blocksparse_num_local_blocks": 16,
    "blocksparse_vert_stride": 8,
    "blocksparse_triton_kernel_block_size": 64,
    "dense_attention_every_n_layers": 2,
    "embedding_dropout_prob": 0.1,
    "attention_dropout_prob": 0.0,
    "ffn_dropout_prob": 0.1,
    "layer_norm_epsilon": 1e-5,
    "mup_use_scaling": True,
    "mup_width_multiplier": 8.0,
    "mup_embedding_multiplier": 10.0,
    "mup_attn_multiplier": 1.0,
    "reorder_and_upcast_attn": False,
    "pad_sequence_to_multiple_of_64": True,
    "dummy_token_indices": None,
}
SMALL: dict[str, Any] = {
    "vocab_size": 151,
    "hidden_size": 128,
    "ff_intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "blocksparse_num_local_blocks": 1,
    "blocksparse_vert_stride": 3,
    "dummy_token_indices": [3, 77, 150],
    "mup_embedding_multiplier": 3.0,
    "mup_attn_multiplier": 2.0,
    "mup_width_multiplier": 2.0,
    "gegelu_limit": 1.5,  # within the range of gate values, so that clamping has an effect
}


class Phi3SmallConfig(PretrainedConfig):
    model_type = "phi3small"

    def __init__(self, **settings: Any) -> None:
        self.tie_word_embeddings = settings.pop("tie_word_embeddings", True)
        self.rope_parameters = settings.pop("rope_scaling", None) or settings.pop("rope_parameters", None)
        for name, default in DEFAULTS.items():
            setattr(self, name, settings.pop(name, default))
        super().__init__(**settings)

    @property
    def intermediate_size(self) -> int:
        if self.ff_dim_multiplier is None:
            return self.ff_intermediate_size
        assert self.ff_intermediate_size is None
        size = self.ff_dim_multiplier * (self.hidden_size // 3) * 2
        return math.ceil(size / 256) * 256 if self.gegelu_pad_to_256 else size


def attention_mask(config: Any, layer: int, num_tokens: int) -> Tensor:
    """Return which positions each query attends to in a layer: [num_heads, queries, keys]."""
    queries, keys = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)
    is_causal = (keys <= queries).expand(config.num_attention_heads, -1, -1)
    if config.dense_attention_every_n_layers and (layer + 1) % config.dense_attention_every_n_layers == 0:
        return is_causal
    step = max(1, int(config.blocksparse_vert_stride / config.num_attention_heads))
    heads = torch.arange(config.num_attention_heads)[:, None, None]
    offsets = torch.zeros_like(heads) if config.blocksparse_homo_head_pattern else heads * step
    query_blocks, key_blocks = (places // config.blocksparse_block_size for places in (queries, keys))
    is_local = query_blocks - key_blocks < config.blocksparse_num_local_blocks
    is_strided = (key_blocks + offsets + 1) % config.blocksparse_vert_stride == 0
    return is_causal & (is_local | is_strided)


def rotation_tables(config: Any, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of all positions, [num_tokens, head_dim] each."""
    head_dim, scaling = config.hidden_size // config.num_attention_heads, config.rope_parameters or {}
    factors, magnitude = torch.ones(head_dim // 2), 1.0
    if "short_factor" in scaling:
        is_long = config.max_position_embeddings > scaling["original_max_position_embeddings"]
        factors = torch.tensor(scaling["long_factor" if is_long else "short_factor"])
        magnitude = scaling["long_mscale" if is_long else "short_mscale"]
    exponents = torch.arange(0, head_dim, 2) / head_dim
    frequencies = 1.0 / (factors * config.rope_embedding_base**exponents)
    angles = torch.outer(torch.arange(num_tokens) / config.rope_position_scale, frequencies)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * magnitude, angles.sin() * magnitude


class Attention(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.head_dim = config.hidden_size // config.num_attention_heads
        num_heads = config.num_attention_heads + 2 * config.num_key_value_heads
        self.query_key_value = nn.Linear(config.hidden_size, num_heads * self.head_dim)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        heads = self.query_key_value(x).unflatten(-1, (-1, group + 2, self.head_dim))  # [batch, T, KV heads, ...]
        queries = heads[..., :group, :].flatten(2, 3).transpose(1, 2)
        keys, values = (heads[..., group + i, :].repeat_interleave(group, dim=2).transpose(1, 2) for i in range(2))
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        queries, keys = (part * cos + rotate_half(part) * sin for part in (queries, keys))
        scale = self.head_dim**-0.5
        if self.config.mup_use_scaling:
            scale = self.config.mup_attn_multiplier / self.head_dim
        mask = attention_mask(self.config, self.layer, x.shape[1])
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
        return self.dense(attended.transpose(1, 2).flatten(2))


def rotate_half(heads: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


class MLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.limit = config.gegelu_limit
        self.up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        both = self.up_proj(x)
        gate, linear = both[..., ::2], both[..., 1::2]
        if self.limit is not None:
            gate, linear = gate.clamp(max=self.limit), linear.clamp(-self.limit, self.limit)
        return self.down_proj(gate * torch.sigmoid(1.702 * gate) * (linear + 1))


class Layer(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config, layer), MLP(config)
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config, layer) for layer in range(config.num_hidden_layers)])
        self.final_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)


class Phi3SmallForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = Phi3SmallConfig
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012, transformers' attribute

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.hidden_act != "gegelu":
            raise ValueError(f"hidden_act is {config.hidden_act}")
        self.model = Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def prepare_inputs_for_generation(self, input_ids: Tensor, **_: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}  # there is no cache

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutput:
        config, x = self.config, self.model.embed_tokens(input_ids)
        if config.mup_embedding_multiplier is not None and config.mup_embedding_multiplier > 0:
            x = x * config.mup_embedding_multiplier
        cos, sin = rotation_tables(config, input_ids.shape[1])
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        logits = self.lm_head(self.model.final_layernorm(x)).float()
        if config.mup_width_multiplier:
            logits = logits / config.mup_width_multiplier
        logits[..., config.dummy_token_indices or []] = torch.finfo(torch.float32).min
        return CausalLMOutput(logits=logits)


AutoConfig.register("phi3small", Phi3SmallConfig)
AutoModelForCausalLM.register(Phi3SmallConfig, Phi3SmallForCausalLM)
