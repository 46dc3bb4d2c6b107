"""Both backends of a CPU against the reference kernels, over a cache that holds NaN wherever nothing was written."""

import random

import pytest
import torch

from kernels import reference
from kernels.cpu import load_kernels
from worker_service.attention import AttentionBatch, create_backend

NUM_LAYERS = 2


@pytest.fixture(params=["cpu", "torch"], autouse=True)
def kernels_switch(request, monkeypatch):
    """Every test with the C kernels, where they can be built, and with plain torch."""
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "auto" if request.param == "cpu" else "off")


def make_kv_cache(num_blocks, block_size, num_kv_heads, head_dim, dtype=torch.float32):
    shape = (num_blocks + 1, NUM_LAYERS, 2, block_size, num_kv_heads, head_dim)
    storage = torch.full(shape, float("nan"), dtype=dtype)
    return [(storage[:, layer, 0], storage[:, layer, 1]) for layer in range(NUM_LAYERS)]


class Rows:
    """Rows of a step with scattered blocks, their context already in the cache."""

    def __init__(self, rng, lengths, *, block_size, num_heads, num_kv_heads, head_dim, dtype=torch.float32):
        """`lengths`: (context, queries) of each row."""
        self.generator = torch.Generator().manual_seed(rng.randrange(2**31))
        self.dtype, self.shapes = dtype, ((num_heads, head_dim), (num_kv_heads, head_dim), (num_kv_heads, head_dim))
        num_blocks = [-(-sum(row) // block_size) for row in lengths]
        ids = list(range(1, sum(num_blocks) + 4))
        rng.shuffle(ids)
        tables = [[ids.pop() for _ in range(num)] for num in num_blocks]
        self.kv_cache = make_kv_cache(sum(num_blocks) + 3, block_size, num_kv_heads, head_dim, dtype)
        slots = [[table[p // block_size] * block_size + p % block_size for p in range(sum(row))]
                 for table, row in zip(tables, lengths, strict=True)]  # fmt: skip
        context = torch.tensor([slot for row, own in zip(lengths, slots, strict=True) for slot in own[: row[0]]]).long()
        for keys, values in self.kv_cache:
            _, key, value = self.random_qkv(len(context))
            reference.reshape_and_cache(key, value, keys, values, context)
        starts = [0]
        for _, num_queries in lengths:
            starts.append(starts[-1] + num_queries)
        width = max(num_blocks)
        self.batch = AttentionBatch(
            query_start_loc=starts,
            seq_lens=[sum(row) for row in lengths],
            block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables]),
            slot_mapping=torch.tensor(
                [slot for row, own in zip(lengths, slots, strict=True) for slot in own[row[0] :]]
            ),
        )

    def random_qkv(self, num_tokens):
        return [torch.randn(num_tokens, *shape, generator=self.generator).to(self.dtype) for shape in self.shapes]

    def poison_before(self, window):
        """What no query of any row reads: NaN, and blocks that lie wholly before the window are another's by now."""
        batch, block_size = self.batch, self.kv_cache[0][0].shape[1]
        for row, table in enumerate(batch.block_tables):
            num_queries = batch.query_start_loc[row + 1] - batch.query_start_loc[row]
            first = max(0, batch.seq_lens[row] - num_queries - window + 1)
            for keys, values in self.kv_cache:
                for position in range(first):
                    place = table[position // block_size], position % block_size
                    keys[place] = values[place] = float("nan")
            table[: first // block_size] = len(self.kv_cache[0][0]) - 1  # a block that was never written


def check(rows, tolerance=2e-6, windows=(0,) * NUM_LAYERS):
    """Attends in every layer and compares output and cache with the reference."""
    expected_cache = [(keys.clone(), values.clone()) for keys, values in rows.kv_cache]
    batch = rows.batch
    attend = create_backend("auto", torch.device("cpu"), windows).prepare(batch, rows.kv_cache)
    for layer, (key_cache, value_cache) in enumerate(expected_cache):
        query, key, value = rows.random_qkv(batch.query_start_loc[-1])
        actual = attend(layer, query, key, value)
        reference.reshape_and_cache(key, value, key_cache, value_cache, batch.slot_mapping)
        expected = reference.paged_attention(
            query, key_cache, value_cache, batch.block_tables, batch.seq_lens, batch.query_start_loc,
            query.shape[-1] ** -0.5, windows[layer],
        )  # fmt: skip
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)
    for actual_layer, expected_layer in zip(rows.kv_cache, expected_cache, strict=True):
        for actual, expected in zip(actual_layer, expected_layer, strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def random_lengths(rng, block_size):
    """A row of any kind; contexts and ends lie on or beside block edges more often than not."""
    edges = [block_size * k + d for k in range(1, 5) for d in (-1, 0, 1)]
    context = rng.choice([0, *edges, rng.randint(1, 150)])
    kind = rng.choice(["decode", "chunk"])
    num_queries = 1 if kind == "decode" else rng.choice([2, 3, rng.choice(edges), rng.randint(2, 90)])
    return context, num_queries


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


def test_chunk_longer_than_what_attends_at_once():
    lengths = [(37, 600), (500, 257), (5, 3), (300, 1), (0, 300)]
    check(Rows(random.Random(1), lengths, block_size=16, num_heads=4, num_kv_heads=2, head_dim=32))


def test_decode_rows_of_very_different_lengths():
    lengths = [(1, 1), (900, 1), (70, 1), (1000, 1), (64, 1), (300, 1), (127, 1)]
    check(Rows(random.Random(2), lengths, block_size=16, num_heads=7, num_kv_heads=1, head_dim=80))


def test_bfloat16_and_float16():
    lengths = [(40, 1), (33, 20), (0, 50), (100, 1)]
    for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float16, 3e-3)):
        shape = {"block_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
        check(Rows(random.Random(3), lengths, dtype=dtype, **shape), tolerance)


def test_row_reads_blocks_that_another_row_of_the_step_writes():
    """Two rows of one prompt: the second shares the block the first fills in this very step."""
    rows = Rows(random.Random(4), [(0, 16), (16, 4)], block_size=16, num_heads=2, num_kv_heads=2, head_dim=32)
    rows.batch.block_tables[1, 0] = rows.batch.block_tables[0, 0]
    check(rows)


def test_row_does_not_depend_on_its_batch():
    rng = random.Random(5)
    shape = {"block_size": 16, "num_heads": 14, "num_kv_heads": 2, "head_dim": 64}
    lengths = [(200, 1), (0, 30), (190, 1), (50, 20), (15, 1)]
    rows = Rows(rng, lengths, **shape)
    batch = rows.batch
    query, key, value = rows.random_qkv(batch.query_start_loc[-1])
    backend = create_backend("auto", torch.device("cpu"))
    together = backend.prepare(batch, rows.kv_cache)(0, query, key, value)
    for row in range(len(lengths)):
        tokens = slice(batch.query_start_loc[row], batch.query_start_loc[row + 1])
        alone = AttentionBatch(
            query_start_loc=[0, lengths[row][1]],
            seq_lens=[batch.seq_lens[row]],
            block_tables=batch.block_tables[row : row + 1],
            slot_mapping=batch.slot_mapping[tokens],
        )
        actual = backend.prepare(alone, rows.kv_cache)(0, query[tokens], key[tokens], value[tokens])
        torch.testing.assert_close(actual, together[tokens], rtol=0, atol=1e-6)


def test_int32_block_tables_and_strided_query():
    rows = Rows(random.Random(6), [(20, 1), (3, 9)], block_size=8, num_heads=4, num_kv_heads=2, head_dim=32)
    batch = AttentionBatch(
        rows.batch.query_start_loc, rows.batch.seq_lens, rows.batch.block_tables.int(), rows.batch.slot_mapping
    )
    query, key, value = rows.random_qkv(10)
    merged = torch.cat([query, key, value], dim=1)  # as a merged projection leaves them: [T, all heads, head_dim]
    attend = create_backend("auto", torch.device("cpu")).prepare(batch, rows.kv_cache)
    torch.testing.assert_close(attend(0, *merged.split([4, 2, 2], dim=1)), attend(0, query, key, value))


def test_cache_that_is_not_block_major_is_refused():
    rows = Rows(random.Random(7), [(4, 1)], block_size=8, num_heads=2, num_kv_heads=2, head_dim=32)
    transposed = [(keys.transpose(1, 2), values.transpose(1, 2)) for keys, values in rows.kv_cache]
    with pytest.raises(ValueError, match="not block-major"):
        create_backend("torch", torch.device("cpu")).prepare(rows.batch, transposed)


def test_unknown_backend_is_refused():
    with pytest.raises(ValueError, match=r"'flash' is unknown.*auto, cpu, torch"):
        create_backend("flash", torch.device("cpu"))


CPU = torch.device("cpu")


def test_auto_takes_the_kernels_where_there_are_any(monkeypatch):
    expected = "torch" if load_kernels() is None else "cpu"
    assert create_backend("auto", CPU, head_dim=256).name == expected
    assert create_backend("torch", CPU).name == "torch"
    assert create_backend("auto", CPU, head_dim=257).name == "torch"
    assert create_backend("auto", torch.device("cuda")).name == "torch"
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "off")
    assert create_backend("auto", CPU).name == "torch"


def test_kernels_that_are_asked_for_and_not_there_are_told(monkeypatch):
    with pytest.raises(ValueError, match="heads of at most 256 on a CPU, not heads of 257"):
        create_backend("cpu", CPU, head_dim=257)
    with pytest.raises(ValueError, match="not heads of 64 on cuda"):
        create_backend("cpu", torch.device("cuda"), head_dim=64)
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "off")
    with pytest.raises(ValueError, match="off or could not be built"):
        create_backend("cpu", CPU, head_dim=64)
