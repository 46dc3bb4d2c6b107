"""Random rows of a step over a cache with NaN in unwritten positions, for tests of attention backends."""

import dataclasses
from copy import deepcopy

import torch

from pagewire.kernels import reference
from pagewire.network.operations import AttentionHeads
from worker_service.attention import AttentionBatch, AttentionShape
from worker_service.cache.cache_engine import CacheShape

NUM_LAYERS = 2
CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn
PADDING = (-1, 1)  # one token that is not stored, of a row without positions


def make_kv_cache(num_blocks, block_size, layers, dtype, device, layer_groups):
    """Return each layer's caches. A block holds the layers of one layer group, so groups share all bytes."""
    groups = [
        tuple(layer for layer, own in enumerate(layer_groups) if own == group) for group in range(max(layer_groups) + 1)
    ]
    heads = tuple((of_layer.num_kv_heads, of_layer.head_dim) for of_layer in layers)
    shape = CacheShape(heads, block_size, dtype, layer_groups=tuple(groups))
    storage = torch.empty((num_blocks + 1, shape.block_elements), dtype=dtype, device=device)
    return shape.views(storage.fill_(nan_of(dtype)))


def changed(shape, *, windows=None, patterns=None, **fields):
    """Return an `AttentionShape` with other fields. Fields of `AttentionHeads` change in all layers. `windows` and
    `patterns` have an entry for each layer."""
    shared = {
        field.name: fields.pop(field.name) for field in dataclasses.fields(AttentionHeads) if field.name in fields
    }
    of_layers = [shared | {"window": heads.window, "pattern": heads.pattern} for heads in shape.layers]
    for name, values in (("window", windows), ("pattern", patterns)):
        for own, value in zip(of_layers, values or (), strict=bool(values)):
            own[name] = value
    layers = [dataclasses.replace(heads, **own) for heads, own in zip(shape.layers, of_layers, strict=True)]
    return dataclasses.replace(shape, layers=tuple(layers), **fields)


def copy_cache(kv_cache):
    """Return copies of all layers' caches. Copies of layers that share memory share it, too."""
    return deepcopy(kv_cache)


def nan_of(dtype):
    """Return a fill value for which every read is NaN. For integers, all bits of values and scales are set."""
    return float("nan") if dtype.is_floating_point else -1


class Rows:
    """Rows of a step with scattered blocks, and with their context already in the cache."""

    def __init__(
        self, rng, lengths, *, block_size, num_heads=0, num_kv_heads=0, head_dim=0, layers=(), dtype=torch.float32,
        cache_dtype=None, device=CPU, layer_groups=(0,) * NUM_LAYERS,
    ):  # fmt: skip
        """`lengths`: (context, queries) of each row, or PADDING. All layers have the same heads, unless `layers` has
        the `AttentionHeads` of each layer."""
        self.generator = torch.Generator().manual_seed(rng.randrange(2**31))
        self.device, self.layer_groups = device, layer_groups
        self.dtype, self.block_size = dtype, block_size
        self.layers = layers or (AttentionHeads(num_heads, num_kv_heads, head_dim, head_dim**-0.5),) * NUM_LAYERS
        num_blocks = [-(-sum(row) // block_size) for row in lengths]
        num_groups = max(layer_groups) + 1
        ids = list(range(1, num_groups * sum(num_blocks) + 4))
        rng.shuffle(ids)
        tables = [[[ids.pop() for _ in range(num)] for num in num_blocks] for _ in range(num_groups)]
        self.kv_cache = make_kv_cache(
            num_groups * sum(num_blocks) + 3, block_size, self.layers, cache_dtype or dtype, device, layer_groups
        )
        slots = [
            [[table[p // block_size] * block_size + p % block_size for p in range(sum(row))]
             for table, row in zip(of_group, lengths, strict=True)]
            for of_group in tables
        ]  # fmt: skip
        contexts = [
            torch.tensor([slot for row, own in zip(lengths, of_group, strict=True) for slot in own[: row[0]]]).long()
            for of_group in slots
        ]
        for layer, ((keys, values), group) in enumerate(zip(self.kv_cache, layer_groups, strict=True)):
            _, key, value = self.random_qkv(len(contexts[group]), layer)
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
        num_layers, dtypes = len(windows), (self.dtype, self.kv_cache[0][0].dtype)
        layers = self.layers[:num_layers]
        shape = AttentionShape(layers, self.block_size, *dtypes, layer_groups=self.layer_groups[:num_layers])
        return changed(shape, windows=windows)

    def expected(self, layer, cache, qkv, scoring):
        """Write keys and values to a layer's cache. Return the output of the reference in the query's dtype."""
        (query, key, value), batch, group = qkv, self.batch, self.layer_groups[layer]
        reference.reshape_and_cache(key, value, *cache, batch.slot_mapping[group])
        rows = (batch.block_tables[group], batch.seq_lens, batch.query_start_loc)
        return reference.paged_attention(query, *cache, *rows, scoring)

    def random_qkv(self, num_tokens, layer=0):
        heads = self.layers[layer]
        return [
            torch.randn(num_tokens, num, heads.head_dim, generator=self.generator).to(self.device, self.dtype)
            for num in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
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
