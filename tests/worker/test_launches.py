"""How much a GPU is given to do in a step: the launches in its graphs, and those around them.

A step of a model with the layers of Qwen3-0.6B goes through the computation for GPUs on a fake device, with the Triton
kernels in the interpreter. Launches are those of `FakeDevice.launches`.
"""

import json
from collections import Counter

import pytest
import torch

from tests.kernels.triton.device import choose_device

DEVICE = choose_device()

from tests.worker.fake_device import FakeDevice  # noqa: E402
from tests.worker.float32_products import float32_products  # noqa: E402
from tests.worker.interpreted_launches import record_launches  # noqa: E402
from tests.worker.plans import Row, plan_steps  # noqa: E402
from tests.worker.runners import device_runner  # noqa: E402
from worker_service.attention.backends.triton import TritonAttention  # noqa: E402
from worker_service.cache.cache_engine import CacheEngine, CacheShape  # noqa: E402
from worker_service.device.sampler import create_sampler  # noqa: E402
from worker_service.device.triton_operations import TritonOperations  # noqa: E402
from worker_service.models.config import ModelConfig  # noqa: E402
from worker_service.models.loading import load_model  # noqa: E402
from worker_service.rows.table import TableLimits  # noqa: E402
from worker_service.startup.loader import attention_shape  # noqa: E402

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="the fake device is the host")

# Qwen3-0.6B's, in small: 28 layers, two queries to a KV head, the head tied to the embedding.
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 28,
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


def make_runner(path, device, max_graph_batch_size):
    path.joinpath("config.json").write_text(json.dumps(CONFIG))
    config, dtype = ModelConfig.load(path), torch.bfloat16
    model = load_model(path, dtype=dtype, device=DEVICE, operations=TritonOperations(), is_dummy=True)
    for rope in model.ropes:  # in the model's dtype, as on a GPU
        rope.to(dtype)
    cache_shape = CacheShape(config.num_layers, BLOCK_SIZE, config.num_kv_heads, config.head_dim, dtype)
    limits = TableLimits(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=config.max_position_embeddings,
        block_size=BLOCK_SIZE,
        num_device_blocks=NUM_BLOCKS,
        vocab_size=config.vocab_size,
    )
    cache = CacheEngine(cache_shape, NUM_BLOCKS, DEVICE, streams=device)
    attention = TritonAttention(attention_shape(config, BLOCK_SIZE, dtype, dtype), NUM_PROCESSORS, DEVICE)
    sampler = create_sampler(config.vocab_size)
    return device_runner(model, cache, attention, sampler, limits, device, max_graph_batch_size=max_graph_batch_size)


@pytest.fixture(autouse=True)
def _products_of_a_gpu(monkeypatch):
    with float32_products(monkeypatch):
        yield


def report(what, launches):
    print(f"{launches.total()} {what}:", *(f"{number} {name}" for name, number in launches.most_common()), sep="\n  ")


def run_last(runner, device, rows):
    """What is launched for the last step of some rows, of which the steps before are done."""
    *others, last = plan_steps(rows, block_size=BLOCK_SIZE, max_num_batched_tokens=5)
    runner.reset(epoch=1)
    for step in others:
        runner.execute(step.plan)
    device.synchronize()
    before = Counter(device.launches)
    runner.execute(last.plan)
    device.synchronize()
    return device.launches - before


def test_a_step_of_decoding_rows(tmp_path, monkeypatch):
    record_launches(monkeypatch)
    device = FakeDevice(seed=5)
    runner = make_runner(tmp_path, device, max_graph_batch_size=1)
    runner.computation.capture_graphs()
    around = run_last(runner, device, [Row([3, 1, 4], 2)])
    forward, step = (graph.launches for graph in device.graphs)
    assert [graph.num_replays for graph in device.graphs] == [0, 1]
    report("in the graph of the model alone", forward)
    report("in the graph of the step", step)
    report("with its replay", around)
    assert forward.total() <= 287
    assert step.total() <= 290
    assert around.total() <= 3


def test_a_step_of_prompts_and_decoding_rows(tmp_path, monkeypatch):
    """One row decodes, and one has the last two tokens of its prompt. There is no graph of such steps."""
    record_launches(monkeypatch)
    device = FakeDevice(seed=6)
    runner = make_runner(tmp_path, device, max_graph_batch_size=0)
    launches = run_last(runner, device, [Row([3, 1, 4], 2), Row([1, 5, 9, 2], 1)])
    report("in all", launches)
    assert launches.total() <= 292
