"""Creates random checkpoints of known shapes for benchmarks, with transformers, and keeps them in the user's cache.

If the worker creates random weights itself (`--load-format dummy`), a configuration suffices as a checkpoint.
"""

import json
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
# The proportions of Qwen3-30B-A3B with a twentieth of its parameters: 1.46B, of which 0.16B are active per token.
EXPERT_SHAPES = {
    "1.5B-A0.15B": {
        "num_hidden_layers": 18,
        "hidden_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
        "num_attention_heads": 24,
        "head_dim": 64,
        "num_key_value_heads": 3,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}
# Models with states. Their classes are chosen by the names of the shapes.
STATE_SHAPES = {
    "Qwen3.5-0.8B": {
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_attention_heads": 8,
        "head_dim": 256,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "vocab_size": 248320,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "LFM2-1.2B": {
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "block_auto_adjust_ff_dim": False,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "vocab_size": 65536,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
}
# Measured on GPUs only, except for the tiny shape, which is a rehearsal without a GPU.
GPU_SHAPES = {
    "tiny": {
        **SHAPES["54M"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "head_dim": 16,
        "num_key_value_heads": 2,
        "vocab_size": 500,
    },
    "Qwen3-0.6B": SHAPES["0.6B"],
    "Qwen3-8B": {
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}


def configuration(shape: str, directory: Path, **overrides: object) -> Path:
    """Create a directory with the config.json of a bf16 Qwen3 model of one of GPU_SHAPES, without end tokens. Return
    its path."""
    path = directory / shape
    path.mkdir(exist_ok=True)
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16", **GPU_SHAPES[shape]}
    config |= overrides
    further = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "eos_token_id": None}
    (path / "config.json").write_text(json.dumps({**config, **further}, indent=1))
    return path


def cache_directory() -> Path:
    """Return the folder in which benchmarks keep checkpoints and other files."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pagewire" / "bench"


def tokenized_checkpoint(shape: str, tokenizer: Path, directory: Path) -> Path:
    """Create `directory` with a random checkpoint and a tokenizer; token 0 ends an output. Return its path."""
    directory.mkdir()
    made = random_checkpoint(shape)
    for path in made.iterdir():
        if path.name != "config.json":
            (directory / path.name).symlink_to(path)
    config = json.loads((made / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "eos_token_id": 0}))
    (directory / "tokenizer.json").symlink_to(tokenizer.absolute())
    # Otherwise transformers would add Qwen's own tokenizer pipeline to the vocabulary.
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return directory


def random_checkpoint(shape: str) -> Path:
    """Return the path of a checkpoint with random bf16 weights, without end tokens. It is created on the first call.

    The model is Qwen3-MoE for the shapes with experts, Qwen3.5 or LFM2 for the shapes with states, else Qwen3.
    """
    directory = cache_directory() / shape
    if not (directory / "model.safetensors").exists():
        torch.manual_seed(0)
        tokens = {"bos_token_id": None, "eos_token_id": None}
        if shape in EXPERT_SHAPES:
            config = transformers.Qwen3MoeConfig(**EXPERT_SHAPES[shape], **tokens)
        elif shape in STATE_SHAPES:
            class_of = transformers.Lfm2Config if shape.startswith("LFM2") else transformers.Qwen3_5TextConfig
            config = class_of(**STATE_SHAPES[shape], **tokens)
        else:
            config = transformers.Qwen3Config(**SHAPES[shape], **tokens)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.generation_config = transformers.GenerationConfig()
        model.save_pretrained(directory)
    return directory
