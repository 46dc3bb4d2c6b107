"""Small models through the Triton operations and the Triton backend: transformers' tokens, in float32."""

import random

import pytest
import torch

from testing.kernels.device import choose_device

DEVICE = choose_device()

from pagewire.kernels.triton import experts, states  # noqa: E402
from pagewire.network.expert_routing import ExpertRouting  # noqa: E402
from pagewire.network.source import load_config  # noqa: E402
from testing.checkpoints.families import FAMILIES, FIRST_FAMILIES, make_checkpoint  # noqa: E402
from testing.checkpoints.mixed_heads import make_mixed_checkpoint  # noqa: E402
from testing.checkpoints.packed import fp8, gptq, make_quantized  # noqa: E402
from testing.models import load_model  # noqa: E402
from tests.worker.attention_rows import PADDING, Rows  # noqa: E402
from tests.worker.fake_device import FakeDevice  # noqa: E402
from tests.worker.interpreted_launches import record_launches  # noqa: E402
from tests.worker.triton_tokens import SHAPES, check_tokens, make_runner  # noqa: E402
from worker_service.attention.backends.triton import TritonAttention  # noqa: E402
from worker_service.device.cuda import CudaDevice  # noqa: E402
from worker_service.device.kernels import create_device_operations  # noqa: E402
from worker_service.device.triton_operations import RoundedProduct, TritonOperations  # noqa: E402
from worker_service.models.torch_operations import NormRopeParams, Operations  # noqa: E402

pytestmark = pytest.mark.thorough

PACKED = [
    gptq("GPTQ", 4, 16, version="gptq", sym=True, g_idx="in order", lm_head=True),
    fp8("FP8 block", (16, 32)),
    fp8("FP8 tensor", None, "weight_scale"),
]


def attend_heads(operations, attend, layer, heads, preparation):
    turned = operations.turn(attend, layer, heads, preparation)
    return operations.attend_rotated(attend, layer, turned, None)


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        *(("llama", "triton"), ("qwen2", "triton"), ("gpt2", "triton"), ("qwen3", "torch")),
        *((family, "triton") for family in FAMILIES[len(FIRST_FAMILIES) :]),
        ("gemma2", "torch"),
    ],
)
def test_greedy_tokens_equal_those_of_transformers(family, backend, tmp_path):
    path = make_checkpoint(tmp_path, family, seed=7, **SHAPES[family])
    check_tokens(path, make_runner(path, backend, CudaDevice(DEVICE) if DEVICE.type == "cuda" else None))


@pytest.mark.parametrize("homo", [False, True])
def test_block_sparse_layers_at_the_edges_of_their_blocks(homo, tmp_path, monkeypatch):
    """Two heads share a KV head and attend to different blocks, unless they are `homo`."""
    record_launches(monkeypatch)
    changes = {"blocksparse_homo_head_pattern": homo, "blocksparse_vert_stride": 2, "num_hidden_layers": 2}
    path = make_checkpoint(tmp_path, "phi3small", seed=7, **SHAPES["phi3small"], **changes)
    device = CudaDevice(DEVICE) if DEVICE.type == "cuda" else FakeDevice(seed=13)
    check_tokens(path, make_runner(path, device=device), (62, 190), 64)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "qwen3_moe", "gpt_oss", "lfm2", "qwen3_5_text"])
def test_runner_for_gpus_generates_the_same_with_graphs(family, tmp_path, monkeypatch):
    record_launches(monkeypatch)
    path = make_checkpoint(tmp_path, family, seed=7, **SHAPES[family])
    device = CudaDevice(DEVICE) if DEVICE.type == "cuda" else FakeDevice(seed=13)
    check_tokens(path, make_runner(path, device=device))
    if isinstance(device, FakeDevice):
        # Two sizes of mixed steps. For each size of decoding steps the forward pass alone, then with sampling.
        assert [graph.num_replays > 0 for graph in device.graphs] == [True, True, *[False, True] * 2]


def test_states_without_kernels_are_refused(tmp_path, monkeypatch):
    network = load_config(make_checkpoint(tmp_path, "lfm2", seed=7, **SHAPES["lfm2"]))
    assert isinstance(create_device_operations(network.operations, DEVICE), TritonOperations)
    monkeypatch.setattr(states, "KERNEL_SIZES", range(5, 8))
    with pytest.raises(
        ValueError, match=r"needs Triton kernels on a GPU, but .* convolutions of size 5 to 7, .* 3: use"
    ):
        create_device_operations(network.operations, DEVICE)


@pytest.mark.parametrize(("family", "lengths"), [("gemma3_text", (50, 90)), ("gpt_oss", (30, 3, 85))])
def test_layer_groups_use_the_same_blocks_in_turn(family, lengths, tmp_path, monkeypatch):
    """Windows of 20 pass several blocks of 16, in chunks of prompts and in decoding rows."""
    record_launches(monkeypatch)
    path = make_checkpoint(tmp_path, family, seed=7, **SHAPES[family])
    device = CudaDevice(DEVICE) if DEVICE.type == "cuda" else FakeDevice(seed=14)
    runner = make_runner(path, device=device)
    assert len(runner.table.limits.windows) == 2
    check_tokens(path, runner, lengths, 32)


@pytest.mark.parametrize("full", [(1, 64), (2, 512)])
def test_layers_may_have_different_heads(full, tmp_path, monkeypatch):
    """The layers without a window have heads of another size, and their KV heads another number of query heads."""
    shape = {**SHAPES["gemma3_text"], "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    model = make_mixed_checkpoint(tmp_path, monkeypatch, seed=7, full=full, **shape)
    if DEVICE.type == "cpu":
        record_launches(monkeypatch)
    runner = make_runner(tmp_path, device=CudaDevice(DEVICE) if DEVICE.type == "cuda" else FakeDevice(seed=15))
    assert runner._cache.shape.heads == ((2, 32), full)
    check_tokens(tmp_path, runner, (30, 3), 32, model)


@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.name)
def test_a_quantised_head_is_multiplied_from_its_codes(tmp_path, case):
    paths = make_quantized(tmp_path, "llama", case, seed=8, skips=(), num_hidden_layers=1, vocab_size=160)
    models = [
        load_model(path, dtype=torch.float32, device=DEVICE, operations=TritonOperations(DEVICE)) for path in paths
    ]
    assert [model.head.format.group_size > 0 for model in models] == [True, False]
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    # On a GPU with 8-bit products, inputs of FP8 are rounded.
    allowed = 0.05 if isinstance(models[0].head.product, RoundedProduct) else 1e-5
    actual, expected = (model.compute_logits(hidden) for model in models)
    torch.testing.assert_close(actual, expected, rtol=0, atol=allowed * expected.abs().max().item())


def concatenate(layer, query, key, value, sinks):
    return torch.cat([query, key, value], dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_operations_round_where_those_of_torch_do(dtype):
    """Differences are only permitted where the last bit of a float32 root or exponential changes a rounding."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    triton, plain = TritonOperations(DEVICE), Operations()
    x, update, weight, gate_up, heads = normal(5, 96), normal(5, 96), normal(96), normal(5, 192), normal(5, 8, 32)
    query_weight, key_weight, cos, sin = normal(32), normal(32), normal(5, 32).cos(), normal(5, 32).sin()
    preparation = NormRopeParams(4, query_weight, key_weight, 1e-6, cos, sin)
    sums = x.clone(), x.clone()
    pairs = [
        (triton.rms_norm(x, weight, 1e-6), plain.rms_norm(x, weight, 1e-6)),
        (triton.add_rms_norm(sums[0], update, weight, 1e-6), plain.add_rms_norm(sums[1], update, weight, 1e-6)),
        sums,
        (triton.silu_mul(gate_up), plain.silu_mul(gate_up)),
        (
            attend_heads(triton, concatenate, 0, heads.clone(), preparation),
            attend_heads(plain, concatenate, 0, heads.clone(), preparation),
        ),
    ]
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected)
        if dtype != torch.float32:
            assert (actual == expected).float().mean() > 0.99


def test_products_of_the_same_slots_sort_them_once(monkeypatch):
    assigned = []

    def assign(ids, *arguments):
        assigned.append(ids)
        return assign_slots(ids, *arguments)

    assign_slots = experts.assign
    monkeypatch.setattr(experts, "assign", assign)
    operations, plain = TritonOperations(DEVICE), Operations()
    generator = torch.Generator().manual_seed(1)
    x, up, down = (torch.randn(*shape, generator=generator).to(DEVICE) for shape in ((3, 16), (4, 8, 16), (4, 16, 8)))
    logits = torch.randn(2, 3, 4, generator=generator).to(DEVICE)
    products = [operations.prepare_experts(weights, None, x.dtype) for weights in (up, down)]
    for of_layer in logits:
        ids, _ = operations.route_tokens(of_layer, ExpertRouting(2), None)
        slots = products[1](products[0](x, ids), ids)
        expected = plain.prepare_experts(down, None, x.dtype)(plain.prepare_experts(up, None, x.dtype)(x, ids), ids)
        torch.testing.assert_close(slots, expected)
    assert len(assigned) == len(logits)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_one_launch_turns_heads_and_keeps_them_as_two_do(cache_dtype):
    """Attention and cache agree bit for bit, including padding rows."""
    dtype, shape = torch.bfloat16, {"block_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    lengths = [(40, 1), PADDING, (15, 1), (33, 20), (0, 5), PADDING]
    rows = Rows(random.Random(12), lengths, **shape, dtype=dtype, cache_dtype=cache_dtype, device=DEVICE)
    apart = [(keys.clone(), values.clone()) for keys, values in rows.kv_cache]
    backend, operations = TritonAttention(rows.shape(), 8, DEVICE), TritonOperations(DEVICE)
    attend, attend_apart = (backend.prepare(rows.batch, kv_cache) for kv_cache in (rows.kv_cache, apart))
    heads = torch.cat(rows.random_qkv(rows.batch.query_start_loc[-1]), dim=1)
    weight, angles = torch.ones(32, device=DEVICE, dtype=dtype) * 1.5, rows.random_qkv(len(heads))[0][:, 0]
    preparation = NormRopeParams(4, weight, None, 1e-6, angles.cos(), angles.sin())
    actual = attend_heads(operations, attend, 1, heads.clone(), preparation)
    expected = attend_heads(operations, lambda *arguments: attend_apart(*arguments), 1, heads.clone(), preparation)
    assert torch.equal(actual, expected)
    for actual_layer, expected_layer in zip(rows.kv_cache, apart, strict=True):
        for held, kept in zip(actual_layer, expected_layer, strict=True):
            torch.testing.assert_close(held.float(), kept.float(), rtol=0, atol=0, equal_nan=True)
