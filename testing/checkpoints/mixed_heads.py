"""A Gemma 3 whose layers without a window have larger and fewer KV heads than its windowed layers, as in Gemma 4."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.gemma3 import modeling_gemma3

from pagewire.network.families.family import TextConfig
from pagewire.network.operations import AttentionHeads
from testing.checkpoints.families import DEFAULTS, NO_SPECIAL_TOKENS, draw_weights

FULL = "full_attention"


def make_mixed_checkpoint(
    directory: Path, monkeypatch: pytest.MonkeyPatch, *, seed: int, full: tuple[int, int], **overrides: Any
) -> transformers.PreTrainedModel:
    """Write a random model to `directory`, and let our reader of Gemma 3 read it. Return the model of transformers.

    `full` are the number of KV heads and the head size of layers without a window; `overrides` are fields of the
    configuration, for the other layers. Both kinds of layers have the same rope.
    """
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    ropes = {"rope_parameters": dict.fromkeys((FULL, "sliding_attention"), rope)}
    config = transformers.Gemma3TextConfig(**{**DEFAULTS["gemma3_text"], **NO_SPECIAL_TOKENS, **ropes, **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    others = copy.deepcopy(config)
    others.num_key_value_heads, others.head_dim = full
    for number, layer in enumerate(model.model.layers):
        if config.layer_types[number] == FULL:
            layer.self_attn = modeling_gemma3.Gemma3Attention(others, number)
    rotary = modeling_gemma3.Gemma3RotaryEmbedding(others)
    model.model.rotary_emb.full_attention_inv_freq = rotary.full_attention_inv_freq
    draw_weights(model, seed)
    model.generation_config = transformers.GenerationConfig()
    model.save_pretrained(directory)
    _read_mixed(monkeypatch, *full)
    return model.eval()


def _read_mixed(monkeypatch: pytest.MonkeyPatch, num_kv_heads: int, head_dim: int) -> None:
    heads_of = TextConfig.heads

    def heads(config: TextConfig, layer: int, *scoring: Any) -> AttentionHeads:
        found = heads_of(config, layer, *scoring)
        if found.window:
            return found
        return AttentionHeads(found.num_heads, num_kv_heads, head_dim, found.scale, 0, found.softcap)

    monkeypatch.setattr(TextConfig, "heads", heads)
