"""A query's output is bit-identical whatever other rows are in its step.

The comparison covers every variant of the kernels that this machine supports. The caches contain NaN in all positions
that a query may not read.
"""

import math
import random
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from pagewire.kernels.arguments import Scoring
from pagewire.kernels.cache_rows import write_rows
from pagewire.kernels.cpu import VARIANTS, CpuKernels
from pagewire.network.operations import BlockPattern
from testing.kernels.variants import load_variant
from tests.kernels.paged import paged_attention

pytestmark = pytest.mark.thorough

# Dtypes of queries, and of the cache.
DTYPES = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float8_e4m3fn),
    (torch.float32, torch.int8),
    (torch.bfloat16, torch.int8),
]
NAN = float("nan")


@pytest.fixture(params=VARIANTS, scope="module")
def kernels(request) -> CpuKernels:
    return load_variant(request.param)


@dataclass
class Prompt:
    """One sequence, and its attention parameters."""

    query: Tensor  # [N, num_heads, head_dim]
    key: Tensor  # [N, num_kv_heads, row_size], as stored in the cache
    value: Tensor
    scoring: Scoring

    def __len__(self):
        return len(self.query)


@dataclass
class Company:
    """The setting in which a chunk of a prompt is computed, with the other rows of the step."""

    block_size: int = 16
    num_threads: int = 1
    others: tuple[tuple[int, int], ...] = ()  # (context, queries) of the other rows of the step
    index: int = 0  # of the prompt's row among them


ALONE = Company()


def make_prompt(
    rng,
    length,
    dtypes,
    *,
    head_dim,
    num_kv_heads=1,
    group=2,
    window=0,
    softcap=0.0,
    is_biased=False,
    has_sinks=False,
    pattern=None,
):
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    num_heads = num_kv_heads * group
    query = 3 * torch.randn(length, num_heads, head_dim, generator=generator)
    key, value = write_rows(torch.randn(2, length, num_kv_heads, head_dim, generator=generator), dtypes[1])
    slopes = torch.rand(num_heads, generator=generator) if is_biased else None
    sinks = 3 * torch.randn(num_heads, generator=generator) if has_sinks else None
    return Prompt(
        query.to(dtypes[0]), key, value, Scoring(head_dim**-0.5, window, slopes, softcap, sinks, pattern=pattern)
    )


@cache
def _noise():
    return torch.randn(1 << 22, generator=torch.Generator().manual_seed(11))


def noise(rng, *shape):
    """Return normal numbers that no output may depend on: a random slice of numbers that are generated once."""
    size = math.prod(shape)
    start = rng.randrange(len(_noise()) - size)
    return _noise()[start : start + size].view(shape).clone()


def attend(rng, kernels, prompt, start, end, company=ALONE):
    """Return the outputs of the prompt's queries from `start` to `end`.

    Positions that no query of the row may read are NaN.
    """
    lengths = list(company.others)
    lengths.insert(company.index, (start, end - start))
    block_size = company.block_size
    num_blocks = [-(-sum(length) // block_size) for length in lengths]
    ids = list(range(sum(num_blocks) + 2))
    rng.shuffle(ids)
    rows_of_bytes = prompt.key.view(torch.uint8).shape[1:]
    cache = torch.full((2, len(ids), block_size, *rows_of_bytes), 0xFF, dtype=torch.uint8)  # NaN in every dtype
    tables = torch.full((len(lengths), max(num_blocks)), ids.pop())
    queries = []
    for row, (context, num_queries) in enumerate(lengths):
        table = torch.tensor([ids.pop() for _ in range(num_blocks[row])])
        positions = torch.arange(context + num_queries)
        if row == company.index:
            first = max(0, start - prompt.scoring.window + 1) if prompt.scoring.window else 0
            positions = positions[first:]
            fresh = torch.stack([prompt.key[first:end], prompt.value[first:end]])
            queries.append(prompt.query[start:end])
        else:
            fresh = noise(rng, 2, len(positions), prompt.key.shape[1], prompt.query.shape[2])
            fresh[0, rng.randrange(len(positions))] = rng.choice([NAN, float("inf"), 1.0])
            fresh[1, rng.randrange(len(positions))] = rng.choice([NAN, float("inf"), 1.0])
            fresh = write_rows(fresh, prompt.key.dtype)
            queries.append(noise(rng, num_queries, *prompt.query.shape[1:]).to(prompt.query.dtype))
        cache[:, table[positions // block_size], positions % block_size] = fresh.view(torch.uint8)
        tables[row, : len(table)] = table
    starts = [0]
    for _, num_queries in lengths:
        starts.append(starts[-1] + num_queries)
    seq_lens = [sum(length) for length in lengths]
    output = paged_attention(
        kernels, torch.cat(queries), *cache.view(prompt.key.dtype), tables, seq_lens, starts, prompt.scoring,
        num_threads=company.num_threads,
    )  # fmt: skip
    return output[starts[company.index] : starts[company.index + 1]]


def random_company(rng):
    others = tuple((rng.randint(0, 700), rng.choice([1, 1, 1, 4, 40])) for _ in range(rng.choice([0, 0, 1, 3, 8])))
    return Company(rng.choice([1, 8, 16, 32, 100]), rng.choice([1, 2]), others, rng.randint(0, len(others)))


def random_chunks(rng, length):
    """Yield chunks of many sizes, so that a query is computed alone and beside other queries of its prompt."""
    sizes = rng.choice([(1, 2, 3), (5, 8, 9), (40, 200), (1, 64, 500)])
    start = max(0, length - 60) if sizes == (1, 2, 3) else 0
    while start < length:
        end = min(length, start + rng.choice(sizes))
        yield start, end
        start = end


def assert_same_bits(actual, expected):
    assert actual.dtype == expected.dtype
    assert expected.isfinite().all()
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_chunks_neighbours_blocks_and_threads_change_no_bit(kernels, dtypes, seed):
    rng = random.Random(seed)
    shape = {
        "head_dim": rng.choice([1, 7, 16, 33, 64, 80, 128, 256, 320, 512]),
        "num_kv_heads": rng.choice([1, 2, 4]),
        "group": rng.choice([1, 2, 3, 4, 7]),
        "window": rng.choice([0, 0, 0, 1, 5, 40, 300, 600]),
        "softcap": rng.choice([0.0, 0.0, 5.0]),
        "is_biased": rng.random() < 0.3,
        "has_sinks": seed % 2 == 0,
        "pattern": rng.choice([None, BlockPattern(64, 1, 3, 1, 1), BlockPattern(128, 2, 5, 2, 0)]),
    }
    length = rng.choice([5, 70, 300, 530, 1100])
    print(f"seed {seed}: {length} positions, {shape}")
    prompt = make_prompt(rng, length, dtypes, **shape)
    expected = attend(rng, kernels, prompt, 0, length)
    for _ in range(2):
        for start, end in random_chunks(rng, length):
            company = random_company(rng)
            print(f"queries {start} to {end}, {company}")
            assert_same_bits(attend(rng, kernels, prompt, start, end, company), expected[start:end])


@pytest.mark.parametrize("dtypes", DTYPES[1:4:2], ids=str)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 511, 512, 513, 1023, 1024, 1025, 2047, 2049, 3100])
def test_a_last_query_alone_beside_many_and_in_its_prompt(kernels, length, dtypes):
    """Lengths near the edges of tiles and spans, and long contexts that threads divide differently."""
    rng = random.Random(length)
    prompt = make_prompt(rng, length, dtypes, head_dim=64, num_kv_heads=4)
    expected = attend(rng, kernels, prompt, length - 1, length)
    for company in (
        Company(num_threads=2),
        Company(num_threads=3, block_size=128),
        Company(num_threads=2, others=((3000, 1),), index=1),
        Company(num_threads=2, others=((length, 1),) * 31, index=13),
    ):
        assert_same_bits(attend(rng, kernels, prompt, length - 1, length, company), expected)
    start = max(0, length - 70)
    for num_threads in (1, 2):
        company = Company(num_threads=num_threads)
        assert_same_bits(attend(rng, kernels, prompt, start, length, company)[-1:], expected)


@pytest.mark.parametrize("dtypes", [DTYPES[1], DTYPES[3], DTYPES[6]], ids=str)
@pytest.mark.parametrize("group", [1, 4, 9])
def test_blocks_that_a_head_does_not_see_do_not_reach_it(kernels, group, dtypes):
    rng, pattern = random.Random(6), BlockPattern(64, 2, 4, 1, 1)
    prompt = make_prompt(rng, 700, dtypes, head_dim=40, group=group, pattern=pattern)
    expected = attend(rng, kernels, prompt, 0, 700)
    heads, blocks = torch.arange(group), torch.arange(700) // 64
    for position in (0, 63, 64, 191, 450):
        poisoned = Prompt(prompt.query, prompt.key.clone(), prompt.value.clone(), prompt.scoring)
        row = write_rows(torch.full((1, prompt.query.shape[2]), NAN), prompt.key.dtype)
        poisoned.key[position] = poisoned.value[position] = row
        output = attend(rng, kernels, poisoned, 0, 700)
        is_near, is_strided = blocks - position // 64 < 2, (position // 64 + heads + 1) % 4 == 0
        is_reached = (is_near[:, None] | is_strided) & (torch.arange(700) >= position)[:, None]
        assert_same_bits(output[~is_reached], expected[~is_reached])
        assert not output[is_reached].isfinite().any()


@pytest.mark.parametrize("value", [NAN, float("inf")])
@pytest.mark.parametrize("dtypes", [DTYPES[1], DTYPES[3], DTYPES[6]], ids=str)
@pytest.mark.parametrize("group", [2, 9])
@pytest.mark.parametrize("window", [0, 1, 70])
def test_what_a_query_does_not_see_does_not_reach_it(kernels, window, group, dtypes, value):
    """A query must not read a later position of its tile or one before its window, though its neighbours do."""
    rng = random.Random(5)
    prompt = make_prompt(rng, 150, dtypes, head_dim=40, group=group, window=window)
    expected = attend(rng, kernels, prompt, 0, 150)
    for position in (1, 63, 64, 65, 127, 140):
        poisoned = Prompt(prompt.query, prompt.key.clone(), prompt.value.clone(), prompt.scoring)
        row = write_rows(torch.full((1, prompt.query.shape[2]), value), prompt.key.dtype)
        poisoned.key[position] = poisoned.value[position] = row
        output = attend(rng, kernels, poisoned, 0, 150)
        is_reached = torch.zeros(150, dtype=torch.bool)
        is_reached[position : position + window if window else None] = True
        assert_same_bits(output[~is_reached], expected[~is_reached])
        assert not output[is_reached].isfinite().flatten(1).any(1).any()
