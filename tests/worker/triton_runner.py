"""A runner with the Triton kernels in the interpreter, on a fake device, for a model with Qwen3-0.6B's layers.

Import this module after the interpreter is chosen: see `testing.kernels.device`.
"""

import json
from pathlib import Path

import torch

from pagewire.network.source import load_config
from testing.models import load_model
from tests.worker.fake_device import FakeDevice
from tests.worker.runners import device_runner
from worker_service.attention.backends.triton import TritonAttention
from worker_service.cache.cache_engine import CacheEngine
from worker_service.device.kernels import create_sampler
from worker_service.device.triton_operations import TritonOperations
from worker_service.epoch_grammars import EpochGrammars
from worker_service.rows.table import TableLimits
from worker_service.runner import ModelRunner
from worker_service.startup.loader import attention_shape, cache_shape

# A small version of Qwen3-0.6B's configuration: two queries per KV head, and the head tied to the embedding.
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 300,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
BLOCK_SIZE, NUM_BLOCKS, NUM_PROCESSORS = 16, 80, 4
CPU = torch.device("cpu")


def make_runner(
    path: Path,
    device: FakeDevice,
    max_graph_batch_size: int,
    *,
    num_layers: int = 28,
    max_num_seqs: int = 4,
    grammars: EpochGrammars | None = None,
    quantization: str | None = None,
) -> ModelRunner:
    """Return a runner with random weights and a cache of 80 blocks of 16 positions."""
    path.joinpath("config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": num_layers}))
    config, dtype = load_config(path), torch.bfloat16
    options = {"operations": TritonOperations(CPU), "is_dummy": True, "quantization": quantization}
    model = load_model(path, dtype=dtype, device=CPU, **options)
    for rope in model.ropes:  # in the model's dtype, as on a GPU
        rope.to(dtype)
    blocks = cache_shape(config, (), BLOCK_SIZE, dtype)
    limits = TableLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        max_model_len=config.max_position_embeddings,
        block_size=BLOCK_SIZE,
        num_device_blocks=NUM_BLOCKS,
        vocab_size=config.vocab_size,
    )
    cache = CacheEngine(blocks, NUM_BLOCKS, CPU, streams=device)
    attention = TritonAttention(attention_shape(config, BLOCK_SIZE, dtype, dtype), NUM_PROCESSORS, CPU)
    sampler = create_sampler(config.vocab_size)
    options = {"max_graph_batch_size": max_graph_batch_size, "grammars": grammars}
    return device_runner(model, cache, attention, sampler, limits, device, **options)
