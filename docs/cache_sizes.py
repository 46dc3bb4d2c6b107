"""The table of docs/sizing.md: the layer groups and the KV cache of well-known models, computed by the product's code.

The models are published config.json files. The sizes are for blocks of 16 tokens in 16 bits.
"""

from collections.abc import Mapping
from typing import Any

import torch

from pagewire.network.families import parse_config
from pagewire.network.layer_groups import LayersOfGroup, layer_groups
from testing.checkpoints.published import published
from worker_service.startup.loader import cache_shape
from worker_service.startup.pool_size import blocks_of_sequence

BLOCK_SIZE = 16
LENGTHS = (4096, 32_768, 131_072)
MODELS = {
    "Gemma 3 1B": "google/gemma-3-1b-it",
    "Gemma 3 4B": "google/gemma-3-4b-it",
    "Gemma 3 27B": "google/gemma-3-4b-it",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "EXAONE 4 32B": "LGAI-EXAONE/EXAONE-4.0-32B",
    "OLMo 3 7B": "allenai/Olmo-3-7B-Instruct",
    "Qwen3.5 27B": "Qwen/Qwen3.5-27B",
    "Qwen3.5 35B-A3B": "Qwen/Qwen3.5-35B-A3B",
    "Qwen3-Coder-Next": "Qwen/Qwen3-Coder-Next",
    "LFM2 1.2B": "LiquidAI/LFM2-1.2B",
    "LFM2 8B-A1B": "LiquidAI/LFM2-8B-A1B",
}
# Gemma 3 27B has the config.json of 4B with these sizes.
CHANGES = {
    "Gemma 3 27B": {
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
    }
}


def sizes_table() -> str:
    """Return a table with a row for each model: its layer groups, the bytes of a block, the bytes of the blocks of a
    sequence at several lengths, and the bytes of a state of a sequence."""
    lengths = " | ".join(f"{length:,} tokens" for length in LENGTHS)
    rows = [
        f"| model | layers of the groups | block | {lengths} | state |",
        f"|---|---|---|{'---|' * len(LENGTHS)}---|",
    ]
    rows += [_row(name, _config(name)) for name in MODELS]
    return "\n".join(rows)


def _config(name: str) -> Mapping[str, Any]:
    config = published()[MODELS[name]].config
    if name in CHANGES:
        return {**config, "text_config": {**config["text_config"], **CHANGES[name]}}
    return config


def _row(name: str, config: Mapping[str, Any]) -> str:
    network = parse_config(config)
    max_model_len = network.max_position_embeddings
    groups = layer_groups(network.layers, max_model_len)
    shape = cache_shape(network, groups, BLOCK_SIZE, torch.bfloat16)
    one_group = cache_shape(network, (), BLOCK_SIZE, torch.bfloat16)
    windows = [group.window for group in groups]
    cells = []
    for length in LENGTHS:
        num_bytes = blocks_of_sequence(windows, length, BLOCK_SIZE, 1) * shape.block_bytes
        whole = -(-length // BLOCK_SIZE) * one_group.block_bytes
        cells.append(f"{_mebibytes(num_bytes)} ({_mebibytes(whole)})" if length <= max_model_len else "–")
    cells.append(f"{network.state_size * 4 >> 10:,} KiB" if network.state_size else "–")
    return f"| {name} | {_describe(groups)} | {shape.block_bytes >> 10:,} KiB | {' | '.join(cells)} |"


def _describe(groups: tuple[LayersOfGroup, ...]) -> str:
    """Return the numbers of layers of all groups with the same window, such as "4 without a window; 4, 2 of 512"."""
    layers: dict[int, list[str]] = {}
    for group in groups:
        layers.setdefault(group.window, []).append(str(len(group.layers)))
    found = [
        f"{', '.join(numbers)} {f'with a window of {window:,}' if window else 'without a window'}"
        for window, numbers in layers.items()
    ]
    return "; ".join(found)


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f}"
