"""Random checkpoints of known shapes, written by transformers for benchmarks. Kept in the user's cache."""

import os
from pathlib import Path

import torch
import transformers

SHAPES = {
    "54M": {
        "num_hidden_layers": 12,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "head_dim": 64,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    # Qwen3-0.6B.
    "0.6B": {
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
}


def random_checkpoint(shape: str) -> Path:
    """A Qwen3 checkpoint of random bf16 weights without end tokens; made once."""
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    directory = root / "pagewire" / "bench" / shape
    if not (directory / "model.safetensors").exists():
        torch.manual_seed(0)
        config = transformers.Qwen3Config(**SHAPES[shape], bos_token_id=None, eos_token_id=None)
        model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
        model.generation_config = transformers.GenerationConfig()
        model.save_pretrained(directory)
    return directory
