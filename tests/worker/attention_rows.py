"""Random rows of a step over a cache with NaN in unwritten positions, for tests of attention backends."""

from copy import deepcopy

import torch

from pagewire.kernels import reference
from pagewire.kernels.cache_rows import row_size
from worker_service.attention import AttentionBatch, AttentionShape

NUM_LAYERS = 2
CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn
PADDING = (-1, 1)  # one token that is not stored, of a row without positions


def make_kv_cache(num_blocks, block_size, num_kv_heads, head_dim, dtype, device, layer_groups):
    """Return each layer's caches. A block holds the layers of one layer group, so groups share all bytes."""
    places = [layer_groups[:layer].count(layer_groups[layer]) for layer in range(NUM_LAYERS)]
    shape = (num_blocks + 1, max(places) + 1, 2, block_size, num_kv_heads, row_size(head_dim, dtype))
    storage = torch.empty(shape, dtype=dtype, device=device)
    storage.fill_(nan_of(dtype))
    return [(storage[:, place, 0], storage[:, place, 1]) for place in places]


def copy_cache(kv_cache):
    """Return copies of all layers' caches. Copies of layers that share memory share it, too."""
    return deepcopy(kv_cache)


def nan_of(dtype):
    """Return a fill value for which every read is NaN. For integers, all bits of values and scales are set."""
    return float("nan") if dtype.is_floating_point else -1


class Rows:
    """Rows of a step with scattered blocks, and with their context already in the cache."""

    def __init__(
        self, rng, lengths, *, block_size, num_heads, num_kv_heads, head_dim, dtype=torch.float32, cache_dtype=None,
        device=CPU, layer_groups=(0,) * NUM_LAYERS,
    ):  # fmt: skip
        """`lengths`: (context, queries) of each row, or PADDING."""
        self.generator = torch.Generator().manual_seed(rng.randrange(2**31))
        self.device, self.layer_groups = device, layer_groups
        self.dtype, self.shapes = dtype, ((num_heads, head_dim), (num_kv_heads, head_dim), (num_kv_heads, head_dim))
        num_blocks = [-(-sum(row) // block_size) for row in lengths]
        num_groups = max(layer_groups) + 1
        ids = list(range(1, num_groups * sum(num_blocks) + 4))
        rng.shuffle(ids)
        tables = [[[ids.pop() for _ in range(num)] for num in num_blocks] for _ in range(num_groups)]
        self.kv_cache = make_kv_cache(
            num_groups * sum(num_blocks) + 3, block_size, num_kv_heads, head_dim, cache_dtype or dtype, device,
            layer_groups,
        )  # fmt: skip
        slots = [
            [[table[p // block_size] * block_size + p % block_size for p in range(sum(row))]
             for table, row in zip(of_group, lengths, strict=True)]
            for of_group in tables
        ]  # fmt: skip
        contexts = [
            torch.tensor([slot for row, own in zip(lengths, of_group, strict=True) for slot in own[: row[0]]]).long()
            for of_group in slots
        ]
        for (keys, values), group in zip(self.kv_cache, layer_groups, strict=True):
            _, key, value = self.random_qkv(len(contexts[group]))
            reference.reshape_and_cache(key, value, keys, values, contexts[group])
        starts = [0]
        for _, num_queries in lengths:
            starts.append(starts[-1] + num_queries)
        width = max(1, *num_blocks)
        self.batch = AttentionBatch(
            query_start_loc=starts,
            seq_lens=[sum(row) for row in lengths],
            block_tables=torch.tensor(
                [[table + [0] * (width - len(table)) for table in of_group] for of_group in tables], device=device
            ),
            slot_mapping=torch.tensor(
                [
                    [slot for row, own in zip(lengths, of_group, strict=True) for slot in own[row[0] :] or [-1]]
                    for of_group in slots
                ],
                device=device,
            ),
        )

    def shape(self, windows=(0,) * NUM_LAYERS):
        """Return the shape that a backend has to support for these rows."""
        (num_heads, head_dim), (num_kv_heads, _), _ = self.shapes
        block_size, cache_dtype = self.kv_cache[0][0].shape[1], self.kv_cache[0][0].dtype
        sizes = (num_heads, num_kv_heads, head_dim, block_size)
        layer_groups = self.layer_groups[: len(windows)]
        return AttentionShape(*sizes, self.dtype, cache_dtype, windows, layer_groups=layer_groups)

    def expected(self, layer, cache, qkv, scoring):
        """Write keys and values to a layer's cache. Return the output of the reference in the query's dtype."""
        (query, key, value), batch, group = qkv, self.batch, self.layer_groups[layer]
        reference.reshape_and_cache(key, value, *cache, batch.slot_mapping[group])
        rows = (batch.block_tables[group], batch.seq_lens, batch.query_start_loc)
        return reference.paged_attention(query, *cache, *rows, scoring)

    def random_qkv(self, num_tokens):
        return [
            torch.randn(num_tokens, *shape, generator=self.generator).to(self.device, self.dtype)
            for shape in self.shapes
        ]

    def poison_before(self, window, group=0):
        """Fill the positions that no query reads in the layers of a layer group with NaN.

        Blocks entirely before the window are replaced in the group's block tables, as if they belonged to another row.
        """
        batch, block_size = self.batch, self.kv_cache[0][0].shape[1]
        caches = [cache for cache, own in zip(self.kv_cache, self.layer_groups, strict=True) if own == group]
        for row, table in enumerate(batch.block_tables[group]):
            num_queries = batch.query_start_loc[row + 1] - batch.query_start_loc[row]
            first = max(0, batch.seq_lens[row] - num_queries - window + 1)
            for keys, values in caches:
                for position in range(first):
                    place = table[position // block_size], position % block_size
                    keys[place] = values[place] = nan_of(keys.dtype)
            table[: first // block_size] = len(self.kv_cache[0][0]) - 1  # a block that was never written


def random_lengths(rng, block_size):
    """Return the (context, queries) of a decoding or prefill row; both often end at or beside block edges."""
    edges = [block_size * k + d for k in range(1, 5) for d in (-1, 0, 1)]
    context = rng.choice([0, *edges, rng.randint(1, 150)])
    kind = rng.choice(["decode", "chunk"])
    num_queries = 1 if kind == "decode" else rng.choice([2, 3, rng.choice(edges), rng.randint(2, 90)])
    return context, num_queries
