"""Tokens of a model with the Triton kernels, compared with the reference."""

import random

import torch
import transformers

from testing.kernels.device import choose_device

DEVICE = choose_device()

from pagewire.network.layer_groups import layer_groups  # noqa: E402
from pagewire.network.source import load_config  # noqa: E402
from testing.checkpoints.families import FAMILIES  # noqa: E402
from testing.models import load_model  # noqa: E402
from testing.plans import Row, plan_steps  # noqa: E402
from tests.worker.runners import device_runner, host_runner  # noqa: E402
from worker_service.attention import create_backend  # noqa: E402
from worker_service.attention.backends.triton import TritonAttention  # noqa: E402
from worker_service.cache.cache_engine import CacheEngine  # noqa: E402
from worker_service.device.kernels import create_sampler  # noqa: E402
from worker_service.device.triton_operations import TritonOperations  # noqa: E402
from worker_service.rows.table import TableLimits  # noqa: E402
from worker_service.startup.loader import attention_shape, cache_shape  # noqa: E402

BLOCK_SIZE, NUM_BLOCKS, VOCAB_SIZE, NUM_OUTPUT_TOKENS = 16, 40, 151, 4
NUM_HOST_BLOCKS, NUM_STATES = 8, 12
HEADS_OF_32 = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
ONE_LAYER = {**HEADS_OF_32, "num_hidden_layers": 1}
SHAPES = dict.fromkeys(FAMILIES, HEADS_OF_32) | {
    "gpt2": {"n_embd": 64, "n_head": 2},
    "gpt_neox": {"num_attention_heads": 2},
    "falcon": {"num_attention_heads": 2},
    "bloom": {"n_head": 2},
    "mpt": {"n_heads": 2},
    "gemma3_text": {**HEADS_OF_32, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "smollm3": {**HEADS_OF_32, "num_hidden_layers": 2, "no_rope_layer_interval": 2},
    "olmo3": {**HEADS_OF_32, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": {**HEADS_OF_32, "num_hidden_layers": 2, "mlp_only_layers": [0]},
    "afmoe": {**HEADS_OF_32, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "llama4_text": {**HEADS_OF_32, "num_hidden_layers": 2, "moe_layers": [1], "no_rope_layers": [1, 0]},
    **dict.fromkeys(("mixtral", "olmoe", "qwen2_moe", "phimoe"), ONE_LAYER),
}


def make_runner(path, backend="triton", device=None):
    """Return a host runner, or with `device` a GPU runner.

    The GPU runner also samples in Triton. It has graphs for 1 and 2 decoding rows, and for 16 and 32 tokens of any
    rows.
    """
    config = load_config(path)
    assert TritonOperations.refusal(config.operations) is None
    groups = layer_groups(config.layers, config.max_position_embeddings)
    shape = attention_shape(config, BLOCK_SIZE, torch.float32, torch.float32, groups)
    model = load_model(path, dtype=torch.float32, device=DEVICE, operations=TritonOperations(DEVICE))
    blocks = cache_shape(config, groups, BLOCK_SIZE, torch.float32)
    limits = TableLimits(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=config.max_position_embeddings,
        block_size=BLOCK_SIZE,
        num_device_blocks=NUM_BLOCKS,
        vocab_size=config.vocab_size,
        windows=tuple(group.window for group in groups),
        num_device_states=NUM_STATES if config.state_size else 0,
    )
    states = {"state_size": config.state_size, "num_device_states": limits.num_device_states}
    cache = CacheEngine(blocks, NUM_BLOCKS, DEVICE, **states)
    cache.storage[1:], cache.states[1:] = float("nan"), float("nan")
    attention = create_backend("torch", DEVICE, shape) if backend == "torch" else TritonAttention(shape, 8, DEVICE)
    if device is None:
        return host_runner(model, cache, attention, limits)
    cache = CacheEngine(blocks, NUM_BLOCKS, DEVICE, NUM_HOST_BLOCKS, device, **states, num_host_states=NUM_STATES)
    cache.storage[1:], cache.states[1:] = float("nan"), float("nan")
    sampler = create_sampler(config.vocab_size)
    runner = device_runner(
        model, cache, attention, sampler, limits, device, max_graph_batch_size=2, max_graph_tokens=32
    )
    runner.computation.capture_graphs()
    return runner


def reference_tokens(model, prompt):
    output = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_OUTPUT_TOKENS, min_new_tokens=NUM_OUTPUT_TOKENS
    )
    return output[0, len(prompt) :].tolist()


def check_tokens(path, runner, lengths=(1, 33), budget=20, model=None):
    """Compare greedy tokens after random prompts of these lengths. A step has at most `budget` tokens.

    The expected tokens are those of transformers' `model`, which is read from `path` by default. Blocks before a layer
    group's window are filled with NaN and used again.
    """
    rng = random.Random(11)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]
    outputs = [[] for _ in prompts]
    rows = [Row(prompt, NUM_OUTPUT_TOKENS) for prompt in prompts]
    runner.reset(epoch=1)
    limits = runner.table.limits
    options = {"windows": limits.windows, "max_num_seqs": limits.max_num_seqs, "rng": random.Random(11)}
    options["has_states"] = limits.num_device_states > 0
    for step in plan_steps(rows, block_size=BLOCK_SIZE, max_num_batched_tokens=budget, **options):
        result = runner.execute(step.plan)
        assert result.statuses == ()
        for slot, token_id in zip(step.sampling_slots, result.token_ids, strict=True):
            outputs[slot].append(token_id)
        runner._cache.storage[step.free_blocks] = torch.nan
        runner.computation.synchronize()
    model = model or transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert outputs == [reference_tokens(model, prompt) for prompt in prompts]
