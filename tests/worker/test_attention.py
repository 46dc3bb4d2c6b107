"""Both CPU backends compared with the reference kernels, over a cache with NaN in unwritten positions."""

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from pagewire.kernels import reference
from pagewire.network.operations import AttentionHeads, BlockPattern
from tests.thorough import thorough
from tests.worker.attention_rows import E4M3, NUM_LAYERS, Rows, changed, copy_cache, random_lengths
from worker_service.attention import AttentionBatch, AttentionShape, UnavailableError
from worker_service.attention import create_backend as create_backend_with
from worker_service.attention.backends import torch as torch_backend
from worker_service.startup.cpu_kernels import load_cpu_kernels

pytestmark = pytest.mark.one_of_each

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(params=["cpu", "torch", "torch on a GPU"], autouse=True)
def kernels_switch(request, monkeypatch):
    """Run every test with the C kernels, if they can be built, and with plain torch, with and without masks."""
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "auto" if request.param == "cpu" else "off")
    if request.param == "torch on a GPU":
        monkeypatch.setattr(torch_backend, "_supports_masks", lambda device: False)


def create_backend(name, device, shape):
    """Return a backend with the kernels of `kernels_switch`."""
    return create_backend_with(name, device, shape, load_cpu_kernels())


def check(rows, tolerance=2e-6, windows=(0,) * NUM_LAYERS, sinks=(None,) * NUM_LAYERS, patterns=(), **scoring):
    """Attend in every layer, and compare output and cache with the reference.

    `scoring`: see `changed`.
    """
    expected_cache, batch = copy_cache(rows.kv_cache), rows.batch
    has_sinks = any(own is not None for own in sinks)
    shape = changed(rows.shape(windows), has_sinks=has_sinks, **scoring, patterns=patterns)
    attend = create_backend("auto", CPU, shape).prepare(batch, rows.kv_cache)
    for layer, (key_cache, value_cache) in enumerate(expected_cache):
        query, key, value = rows.random_qkv(batch.query_start_loc[-1], layer)
        actual = attend(layer, query, key, value, sinks[layer])
        group = rows.layer_groups[layer]
        reference.reshape_and_cache(key, value, key_cache, value_cache, batch.slot_mapping[group])
        # In float64, so that the tolerance covers only the rounding of the tested code.
        expected = reference.paged_attention(
            query.double(), key_cache, value_cache, batch.block_tables[group], batch.seq_lens, batch.query_start_loc,
            replace(shape.scorings(CPU)[layer], sinks=sinks[layer]),
        )  # fmt: skip
        torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=0, atol=tolerance)
    for actual_layer, expected_layer in zip(rows.kv_cache, expected_cache, strict=True):
        for actual, expected in zip(actual_layer, expected_layer, strict=True):
            same_bits = actual.view(torch.uint8).equal(expected.view(torch.uint8)) if actual.itemsize == 1 else False
            if not same_bits:
                torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("seed", range(40))
def test_equals_reference_on_random_batches(seed):
    rng = random.Random(seed)
    block_size = rng.choice([8, 16, 32])
    num_kv_heads = rng.choice([1, 2, 3])
    shape = {
        "block_size": block_size,
        "num_kv_heads": num_kv_heads,
        "num_heads": num_kv_heads * rng.choice([1, 2, 7]),
        "head_dim": rng.choice([32, 48, 64, 80, 96, 128]),
    }
    lengths = [random_lengths(rng, block_size) for _ in range(rng.randint(1, 8))]
    print(f"seed {seed}: {shape}, (context, queries): {lengths}")
    check(Rows(rng, lengths, **shape))


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("num_queries", [1, 5])
def test_every_length_around_the_block_edges(block_size, num_queries):
    lengths = [(context, num_queries) for context in range(2 * block_size + 2)]
    check(Rows(random.Random(0), lengths, block_size=block_size, num_heads=4, num_kv_heads=2, head_dim=32))


@pytest.mark.parametrize("seed", range(40))
def test_windows_equal_reference_and_read_nothing_before(seed):
    rng = random.Random(1000 + seed)
    block_size = rng.choice([2, 8, 16])
    window = rng.choice([1, 2, block_size - 1, block_size, block_size + 1, 3 * block_size, rng.randint(1, 120)])
    shape = {"block_size": block_size, "num_kv_heads": 2, "num_heads": 4, "head_dim": 32}
    lengths = [random_lengths(rng, block_size) for _ in range(rng.randint(1, 8))]
    print(f"seed {seed}: window {window}, {shape}, (context, queries): {lengths}")
    rows = Rows(rng, lengths, **shape)
    rows.poison_before(window)
    check(rows, windows=(window, max(1, window // 2)))


def test_layers_of_different_windows():
    lengths = [(37, 600), (500, 257), (5, 3), (300, 1), (0, 300), (0, 9), (20, 1)]
    rows = Rows(random.Random(8), lengths, block_size=16, num_heads=4, num_kv_heads=2, head_dim=32)
    check(rows, windows=(0, 100))


@pytest.mark.parametrize("window", [1, 30, 256, 257, 700])
def test_chunks_longer_than_the_window(window):
    lengths = [(0, 600), (37, 600), (0, 256), (400, 300), (0, window), (window, window + 1), (window - 1, 1)]
    rows = Rows(random.Random(9), lengths, block_size=16, num_heads=4, num_kv_heads=2, head_dim=32)
    rows.poison_before(window)
    check(rows, windows=(window, window))


@pytest.mark.parametrize("layer_groups", [(0, 0), (0, 1)])
@pytest.mark.parametrize("cache_dtype", [None, torch.int8], ids=str)
def test_layers_of_different_heads(cache_dtype, layer_groups):
    """The positions of a layer are not multiples of each other's size in memory."""
    layers = (AttentionHeads(4, 1, 40, 0.2), AttentionHeads(6, 2, 28, 0.1))
    lengths = [(37, 60), (50, 7), (5, 3), (90, 1), (0, 30), (0, 9), (20, 1)]
    rows = Rows(
        random.Random(9), lengths, block_size=8, layers=layers, layer_groups=layer_groups, cache_dtype=cache_dtype
    )
    check(rows, windows=(0, 10), softcap=3.0)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("window", [31, *thorough(0, 1)])
def test_whole_prompts_attend_in_both_directions(window, softcap):
    lengths = [(0, num_queries) for num_queries in (300, 1, 2, 33, 32)]
    rows = Rows(random.Random(11), lengths, block_size=16, num_heads=4, num_kv_heads=2, head_dim=32)
    check(rows, windows=(window, 0), is_bidirectional=True, softcap=softcap)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("slopes", [(), (0.5, 0.1, 0.02, 1.0)], ids=str)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_slopes_and_sinks_and_softcaps_of_heads(has_sinks, slopes, softcap):
    lengths = [(37, 600), (500, 257), (5, 3), (300, 1), (0, 300), (0, 9), (20, 1), (290, 1), (0, 1), (7, 1)]
    rows = Rows(random.Random(10), lengths, block_size=16, num_heads=4, num_kv_heads=2, head_dim=32)
    sinks = torch.randn(2, 4, generator=rows.generator) if has_sinks else (None, None)
    scoring = {"softcap": softcap, **({"alibi_slopes": slopes} if slopes else {})}
    check(rows, 4e-6, windows=(0, 100), sinks=sinks, **scoring)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, E4M3, torch.int8], ids=str)
def test_slopes_and_sinks_over_caches_in_16_bits(cache_dtype):
    shape = {"block_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    rows = Rows(random.Random(3), [(40, 1), (33, 20), (0, 50)], dtype=torch.bfloat16, cache_dtype=cache_dtype, **shape)
    sinks = torch.randn(2, 4, generator=rows.generator)
    check(rows, 2e-2, windows=(30, 0), sinks=sinks, alibi_slopes=(0.5, 0.1, 0.02, 1.0))


# Rows whose last positions are at and beside the edges of blocks of 64 positions, alone and after other positions.
PATTERN_LENGTHS = [(context, queries) for context in (0, 63, 64, 300) for queries in (1, 2, 64, 65, 129)]


@pytest.mark.parametrize("block_size", [16, 32, 48])
@pytest.mark.parametrize(
    "pattern", [BlockPattern(64, 1, 3, 1, 1), BlockPattern(64, 2, 8, 5, 2), BlockPattern(128, 1, 2, 1, 0)]
)
def test_patterns_equal_reference(pattern, block_size):
    rows = Rows(random.Random(11), PATTERN_LENGTHS, block_size=block_size, num_heads=6, num_kv_heads=2, head_dim=32)
    check(rows, patterns=(pattern, None))


def test_patterns_with_slopes_and_sinks_and_softcaps():
    rows = Rows(random.Random(12), PATTERN_LENGTHS[::3], block_size=16, num_heads=4, num_kv_heads=2, head_dim=32)
    sinks = torch.randn(2, 4, generator=rows.generator)
    patterns = (BlockPattern(64, 1, 3, 1, 1), BlockPattern(64, 1, 2, 1, 1))
    check(rows, 4e-6, sinks=sinks, patterns=patterns, softcap=2.0, alibi_slopes=(0.05, 0.01, 0.002, 0.1))


def test_chunk_longer_than_what_attends_at_once():
    lengths = [(37, 600), (500, 257), (5, 3), (300, 1), (0, 300)]
    check(Rows(random.Random(1), lengths, block_size=16, num_heads=4, num_kv_heads=2, head_dim=32))


def test_torch_is_given_no_mask_on_a_gpu(monkeypatch):
    """On a GPU, torch's attention needs aligned addresses for masks, and computes windows wrongly."""
    masks = []
    attention = F.scaled_dot_product_attention

    def watched(*arguments, attn_mask=None, **options):
        masks.append(attn_mask)
        return attention(*arguments, attn_mask=attn_mask, **options)

    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "off")
    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(torch_backend, "_supports_masks", lambda device: False)
    lengths = [(37, 600), (500, 257), (5, 3), (301, 1), (300, 1), (0, 30)]
    check(Rows(random.Random(1), lengths, block_size=16, num_heads=4, num_kv_heads=2, head_dim=32), windows=(0, 50))
    assert masks, "it computes a prompt's first chunk"
    assert all(mask is None for mask in masks)


def test_scores_without_a_mask_are_bounded(monkeypatch):
    num_scores = []
    scored = torch_backend._attend_scored

    def watched(queries, keys, *arguments):
        num_scores.append(queries.shape[:-1].numel() * keys.shape[-2])
        return scored(queries, keys, *arguments)

    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "off")
    monkeypatch.setattr(torch_backend, "_supports_masks", lambda device: False)
    monkeypatch.setattr(torch_backend, "MAX_SCORES", 10_000)
    monkeypatch.setattr(torch_backend, "_attend_scored", watched)
    check(Rows(random.Random(1), [(500, 257), (5, 3)], block_size=16, num_heads=4, num_kv_heads=2, head_dim=32))
    assert max(num_scores) <= 10_000
    assert sum(num_scores) > 257 * 500 * 4


def test_decode_rows_of_very_different_lengths():
    lengths = [(1, 1), (900, 1), (70, 1), (1000, 1), (64, 1), (300, 1), (127, 1)]
    check(Rows(random.Random(2), lengths, block_size=16, num_heads=7, num_kv_heads=1, head_dim=80))


def test_bfloat16():
    lengths = [(40, 1), (33, 20), (0, 50), (100, 1)]
    shape = {"block_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    check(Rows(random.Random(3), lengths, dtype=torch.bfloat16, **shape), 2e-2)


@pytest.mark.parametrize("cache_dtype", [E4M3, torch.int8], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_a_cache_of_8_bits(dtype, tolerance, cache_dtype):
    """First chunks also attend to their own keys and values as stored in the cache."""
    lengths = [(40, 1), (33, 20), (0, 50), (100, 1)]
    shape = {"block_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    rows = Rows(random.Random(3), lengths, dtype=dtype, cache_dtype=cache_dtype, **shape)
    rows.poison_before(30)
    check(rows, tolerance, windows=(30, 30))


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_kernels_alone_compute_float32_over_a_cache_of_16_bits(cache_dtype):
    lengths = [(40, 1), (33, 20), (0, 50), (100, 1)]
    shape = {"block_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    rows = Rows(random.Random(3), lengths, cache_dtype=cache_dtype, **shape)
    if load_cpu_kernels() is None:
        with pytest.raises(UnavailableError, match="'torch' reads a KV cache of float32"):
            create_backend("auto", CPU, rows.shape())
    else:
        check(rows)


def test_nothing_computes_in_16_bits_over_a_cache_of_other_16_bits():
    shape = replace(SHAPE, dtype=torch.bfloat16, cache_dtype=torch.float16)
    with pytest.raises(UnavailableError, match=r"cache of bfloat16 or .*, and --kv-cache-dtype asks for float16"):
        create_backend("auto", CPU, shape)


def test_row_reads_blocks_that_another_row_of_the_step_writes():
    """Two rows have one prompt: the second shares the block that the first fills in this step."""
    rows = Rows(random.Random(4), [(0, 16), (16, 4)], block_size=16, num_heads=2, num_kv_heads=2, head_dim=32)
    rows.batch.block_tables[0, 1, 0] = rows.batch.block_tables[0, 0, 0]
    check(rows)


def test_row_does_not_depend_on_its_batch():
    rng = random.Random(5)
    shape = {"block_size": 16, "num_heads": 14, "num_kv_heads": 2, "head_dim": 64}
    lengths = [(200, 1), (0, 30), (190, 1), (50, 20), (15, 1)]
    rows = Rows(rng, lengths, **shape)
    batch = rows.batch
    query, key, value = rows.random_qkv(batch.query_start_loc[-1])
    backend = create_backend("auto", CPU, rows.shape())
    together = backend.prepare(batch, rows.kv_cache)(0, query, key, value)
    for row in range(len(lengths)):
        tokens = slice(batch.query_start_loc[row], batch.query_start_loc[row + 1])
        alone = AttentionBatch(
            query_start_loc=[0, lengths[row][1]],
            seq_lens=[batch.seq_lens[row]],
            block_tables=batch.block_tables[:, row : row + 1],
            slot_mapping=batch.slot_mapping[:, tokens],
        )
        actual = backend.prepare(alone, rows.kv_cache)(0, query[tokens], key[tokens], value[tokens])
        if backend.name == "cpu":
            assert torch.equal(actual, together[tokens])
        torch.testing.assert_close(actual, together[tokens], rtol=0, atol=1e-6)


def test_int32_block_tables_and_strided_query():
    rows = Rows(random.Random(6), [(20, 1), (3, 9)], block_size=8, num_heads=4, num_kv_heads=2, head_dim=32)
    batch = AttentionBatch(
        rows.batch.query_start_loc, rows.batch.seq_lens, rows.batch.block_tables.int(), rows.batch.slot_mapping
    )
    query, key, value = rows.random_qkv(10)
    merged = torch.cat([query, key, value], dim=1)  # as in a merged projection: [T, all heads, head_dim]
    attend = create_backend("auto", CPU, rows.shape()).prepare(batch, rows.kv_cache)
    torch.testing.assert_close(attend(0, *merged.split([4, 2, 2], dim=1)), attend(0, query, key, value))


def test_cache_that_is_not_block_major_is_refused():
    rows = Rows(random.Random(7), [(4, 1)], block_size=8, num_heads=2, num_kv_heads=2, head_dim=32)
    transposed = [(keys.transpose(1, 2), values.transpose(1, 2)) for keys, values in rows.kv_cache]
    with pytest.raises(ValueError, match="not block-major"):
        create_backend("torch", CPU, rows.shape()).prepare(rows.batch, transposed)


SHAPE = AttentionShape((AttentionHeads(8, 2, 64, 0.125),) * 2, 16, torch.bfloat16, torch.bfloat16)


def test_unknown_backend_is_refused():
    with pytest.raises(ValueError, match=r"'flash' is unknown: choose auto or one of cpu, triton, flash_attn, torch"):
        create_backend("flash", CPU, SHAPE)


def test_auto_takes_the_kernels_where_there_are_any(monkeypatch):
    expected = "torch" if load_cpu_kernels() is None else "cpu"
    assert create_backend("auto", CPU, changed(SHAPE, head_dim=256)).name == expected
    assert create_backend("torch", CPU, SHAPE).name == "torch"
    assert create_backend("auto", CPU, changed(SHAPE, head_dim=513)).name == "torch"
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "off")
    assert create_backend("auto", CPU, SHAPE).name == "torch"


def test_kernels_that_are_asked_for_and_not_there_are_told(monkeypatch):
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "off")
    with pytest.raises(ValueError, match="off or could not be built"):
        create_backend("cpu", CPU, SHAPE)


@pytest.mark.parametrize(
    ("backend", "device", "changes", "message"),
    [
        ("cpu", CPU, {"head_dim": 513}, "computes heads of 1 to 512, and the model's are 513: use --attention-b"),
        ("cpu", CUDA, {}, "computes on cpu, and --device is cuda: use --device cpu, or choose another --attention-"),
        ("cpu", CPU, {"dtype": torch.float16}, "computes in float32 or bfloat16, and --dtype is float16: use --dtype"),
        ("cpu", CPU, {"cache_dtype": torch.float16}, "cache of bfloat16 or float8_e4m3fn or int8, and --kv-"),
        ("triton", CUDA, {"cache_dtype": torch.int8}, "cache of bfloat16 or float8_e4m3fn, and --kv-cache-dtype asks"),
        ("torch", CUDA, {"cache_dtype": E4M3}, "cache of bfloat16, and --kv-cache-dtype asks for float8_e4m3fn"),
        ("triton", CPU, {}, "computes on cuda, and --device is cpu: use --device cuda"),
        ("triton", CUDA, {"head_dim": 8}, "computes heads of 16 to 512 in steps of 8, and the model's are 8: use --at"),
        ("triton", CUDA, {"num_heads": 258}, "128 query heads of 64 for each KV head, and the model has 129: use --at"),
        ("triton", CUDA, {"block_size": 4}, "blocks of 8 to 256 in steps of 8 positions, and --block-size is 4: use"),
        ("triton", CUDA, {"cache_dtype": torch.float16}, "cache of bfloat16 or float8_e4m3fn, and --kv-cache-dtype"),
    ],
)  # fmt: skip
def test_what_a_backend_cannot_do_is_refused_with_the_reason(backend, device, changes, message):
    with pytest.raises(ValueError, match=f"attention backend '{backend}' .*{message}"):
        create_backend(backend, device, changed(SHAPE, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_heads": 258},
        {"head_dim": 520},
        {"num_heads": 66, "head_dim": 512},
        {"num_heads": 258, "cache_dtype": E4M3},
    ],
)
def test_heads_that_triton_refuses_are_served_by_what_it_names(changes):
    shape = changed(SHAPE, **changes)
    with pytest.raises(ValueError, match="attention backend 'triton'") as refusal:
        create_backend("triton", CUDA, shape)
    remedy = str(refusal.value).split(": use ")[1]
    name = remedy.removeprefix("--attention-backend ").removesuffix(" with --kv-cache-dtype auto")
    if remedy.endswith("auto"):
        with pytest.raises(ValueError, match="and --kv-cache-dtype asks for float8_e4m3fn: use --kv-cache-dtype auto"):
            create_backend(name, CUDA, shape)
        shape = replace(shape, cache_dtype=shape.dtype)
    assert create_backend(name, CUDA, shape).name == name == "torch"


def test_auto_on_a_gpu_says_why_it_is_torch(caplog):
    assert create_backend("auto", CUDA, replace(SHAPE, block_size=4)).name == "torch"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "plain torch, which is slower: attention backend 'triton' reads blocks of 8 to 256" in record.getMessage()
