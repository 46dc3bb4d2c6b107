"""The flash_attn backend over a fake package that checks its arguments, compared with the reference kernels."""

import inspect
import random
import sys
from dataclasses import replace

import pytest
import torch

from pagewire.kernels.arguments import Scoring
from pagewire.network.operations import AttentionHeads, BlockPattern
from testing.kernels.device import choose_device

DEVICE = choose_device()  # a Triton kernel writes keys and values

from tests.worker import flash_attn_stand_in as stand_in  # noqa: E402
from tests.worker.attention_rows import NUM_LAYERS, PADDING, Rows, changed, copy_cache, random_lengths  # noqa: E402
from worker_service.attention import AttentionShape, DeviceRows, create_backend  # noqa: E402

CUDA = torch.device("cuda")
SHAPE = AttentionShape((AttentionHeads(4, 2, 32, 32**-0.5),) * 2, 256, torch.bfloat16, torch.bfloat16)


@pytest.fixture
def package(monkeypatch):
    """The state with flash-attn installed and an H200 as the GPU."""
    install(monkeypatch, stand_in)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(stand_in, "calls", [])
    yield stand_in
    install(monkeypatch, None)


def install(monkeypatch, package):
    """Set the result of `import flash_attn`; None makes it fail."""
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.delitem(sys.modules, "worker_service.attention.backends.flash_attn", raising=False)
    monkeypatch.delattr("worker_service.attention.backends.flash_attn", raising=False)


def make_rows(seed, lengths, dtype=torch.bfloat16, **options):
    print(f"seed {seed}: (context, queries): {lengths}")
    shape = {"block_size": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    return Rows(random.Random(seed), lengths, **shape, dtype=dtype, device=DEVICE, **options)


def check(rows, windows=(0,) * NUM_LAYERS, batch=None, slopes=()):
    create_backend("flash_attn", CUDA, rows.shape(windows))
    module = sys.modules["worker_service.attention.backends.flash_attn"]
    backend = module.FlashAttention(changed(rows.shape(windows), alibi_slopes=slopes), DEVICE)
    alibi_slopes = torch.tensor(slopes, device=DEVICE) if slopes else None
    expected_cache = copy_cache(rows.kv_cache)
    attend = backend.prepare(batch or rows.batch, rows.kv_cache)
    for layer, cache in enumerate(expected_cache):
        query, key, value = rows.random_qkv(rows.batch.query_start_loc[-1], layer)
        actual = attend(layer, query, key, value)
        scoring = Scoring(query.shape[-1] ** -0.5, windows[layer], alibi_slopes)
        expected = rows.expected(layer, cache, (query, key, value), scoring)
        assert actual.dtype == query.dtype
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-2)
    for actual_layer, expected_layer in zip(rows.kv_cache, expected_cache, strict=True):
        for held, expected in zip(actual_layer, expected_layer, strict=True):
            torch.testing.assert_close(held, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_equals_reference_on_random_batches(package, seed, dtype):
    rng = random.Random(seed)
    edges = [(rng.choice([255, 256, 257, 511]), rng.choice([1, 1, 2, 5])) for _ in range(2)]
    check(make_rows(seed, edges + [random_lengths(rng, 16) for _ in range(rng.randint(1, 4))], dtype))


@pytest.mark.parametrize("windows", [(1, 300), (0, 30)])
def test_windows_equal_reference_and_read_nothing_before(package, windows):
    rows = make_rows(7, [(300, 1), (255, 1), (290, 20), (0, 40), (600, 1)])
    if 0 not in windows:
        rows.poison_before(max(windows))
    check(rows, windows)


def test_layers_of_each_group_use_their_own_blocks(package):
    rows = make_rows(14, [(300, 1), (255, 1), (290, 20), (0, 40), (600, 1)], layer_groups=(0, 1))
    rows.poison_before(30, group=1)
    check(rows, (0, 30))


def test_a_model_may_have_one_layer(package):
    rows = make_rows(13, [(300, 1), (290, 20)])
    del rows.kv_cache[1:]
    check(rows, (0,))


def test_slopes_of_heads_equal_reference(package):
    check(make_rows(12, [(300, 1), (255, 1), (290, 20), (0, 40)]), (0, 30), slopes=(0.5, 0.1, 0.02, 1.0))


def test_each_kind_of_rows_has_its_own_function(package):
    check(make_rows(8, [(40, 1), (7, 1), (0, 20), (33, 1)]))
    assert package.calls == [("flash_attn_with_kvcache", 2), ("flash_attn_varlen_func", 21)] * NUM_LAYERS
    package.calls.clear()
    check(make_rows(9, [(40, 1), (7, 1)]))
    assert package.calls == [("flash_attn_with_kvcache", 2)] * NUM_LAYERS
    package.calls.clear()
    check(make_rows(10, [(5, 4), (7, 2)]))
    assert package.calls == [("flash_attn_varlen_func", 6)] * NUM_LAYERS


def test_rows_of_padding_get_zeros_and_lengths_of_the_host_are_bounds(package):
    rows = make_rows(11, [(40, 1), (300, 1), PADDING, PADDING])
    batch = rows.batch
    device_rows = DeviceRows.of(batch.query_start_loc, batch.seq_lens, DEVICE)
    check(rows, batch=replace(batch, seq_lens=[1000] * 4, device_rows=device_rows))
    assert package.calls == [("flash_attn_with_kvcache", 4)] * NUM_LAYERS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 16}, "reads blocks of 256 positions, and --block-size is 16: use --block-size 256, or choose"),
        ({"dtype": torch.float32}, "computes in bfloat16 or float16, and --dtype is float32: use --dtype bfloat16 or"),
        ({"cache_dtype": torch.float8_e4m3fn}, "reads a KV cache of bfloat16, and --kv-cache-dtype asks for float8"),
        ({"head_dim": 264}, "computes heads of 16 to 256 in steps of 8, and the model's are 264"),
        (
            {"patterns": (None, BlockPattern(64, 16, 8, 1, 1))},
            "does not support block-sparse attention, which the model uses: choose another --attention-backend",
        ),
        (
            {"has_sinks": True},
            "does not support attention sinks, which the model uses: choose another --attention-backend",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_reason(package, changes, message):
    with pytest.raises(ValueError, match=f"attention backend 'flash_attn' {message}"):
        create_backend("flash_attn", CUDA, changed(SHAPE, **changes))


def test_old_gpu_is_refused(package, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match=r"needs a GPU of compute capability 8\.0, and this one has 7\.5: choose anot"):
        create_backend("flash_attn", CUDA, SHAPE)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    quantized = replace(SHAPE, cache_dtype=torch.float8_e4m3fn)
    message = (
        r"needs for a KV cache of float8_e4m3fn a GPU of compute capability 8\.9, and this one has 8\.0: use --kv-"
    )
    with pytest.raises(ValueError, match=message):
        create_backend("triton", CUDA, quantized)


def test_missing_package_is_told(monkeypatch):
    install(monkeypatch, None)
    with pytest.raises(ValueError, match="backend 'flash_attn' needs flash-attn, and triton, to be installed"):
        create_backend("flash_attn", CUDA, SHAPE)


def test_stand_in_takes_the_arguments_of_the_package():
    """Runs only where flash-attn is installed."""
    package = pytest.importorskip("flash_attn")
    for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache"):
        installed, ours = (inspect.signature(getattr(m, name)) for m in (package, stand_in))
        assert [(p.name, p.default) for p in ours.parameters.values()] == [
            (p.name, p.default) for p in installed.parameters.values()
        ]
