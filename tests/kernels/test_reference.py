"""The specification itself, compared with torch's attention on contiguous tensors."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from pagewire.kernels import reference
from pagewire.kernels.arguments import Scoring
from pagewire.network.operations import BlockPattern


def test_skipped_slots_leave_the_cache_alone():
    key_cache, value_cache = torch.zeros(2, 3, 4, 1, 2)  # 3 blocks of 4 positions, one head of size 2
    key, value = torch.ones(3, 1, 2), 2 * torch.ones(3, 1, 2)
    reference.reshape_and_cache(key, value, key_cache, value_cache, torch.tensor([5, -1, 11]))
    assert key_cache.flatten(0, 1).sum(dim=(1, 2)).nonzero().flatten().tolist() == [5, 11]
    assert value_cache.sum() == 8


@pytest.mark.parametrize("window", [0, 1, 3, 6, 7, 11, 50])
def test_paged_attention_equals_dense_attention(window):
    torch.manual_seed(0)
    num_heads, num_kv_heads, head_dim, block_size, seq_len, num_queries = 6, 2, 16, 4, 11, 5
    keys, values = torch.randn(2, seq_len, num_kv_heads, head_dim)
    query = torch.randn(num_queries, num_heads, head_dim)
    block_table = torch.tensor([[4, 1, 3, 0]])
    key_cache, value_cache = torch.full((2, 6, block_size, num_kv_heads, head_dim), float("nan"))
    slots = torch.tensor([block_table[0, p // block_size] * block_size + p % block_size for p in range(seq_len)])
    reference.reshape_and_cache(keys, values, key_cache, value_cache, slots)
    if window == 3:  # the first query is at position 6: positions before 4 belong to another row
        key_cache[4], value_cache[4], block_table[0, 0] = float("nan"), float("nan"), 5

    actual = reference.paged_attention(
        query, key_cache, value_cache, block_table, [seq_len], [0, num_queries], Scoring(0.25, window)
    )

    mask = torch.ones(num_queries, seq_len, dtype=torch.bool).tril(seq_len - num_queries)
    if window:
        mask &= torch.ones_like(mask).triu(seq_len - num_queries - window + 1)
    query, keys, values = (heads.transpose(0, 1) for heads in (query, keys, values))  # heads first
    keys, values = keys.repeat_interleave(3, 0), values.repeat_interleave(3, 0)
    dense = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=0.25)
    torch.testing.assert_close(actual, dense.transpose(0, 1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("head_step", [0, 1, 2])
@pytest.mark.parametrize("seq_len", [1, 7, 8, 9, 31, 32, 33, 70])
def test_paged_attention_of_a_pattern_equals_dense_attention_under_its_mask(seq_len, head_step):
    """Blocks of the pattern have 8 positions, and blocks of the cache have 3."""
    torch.manual_seed(0)
    num_heads, num_kv_heads, head_dim, num_queries = 4, 2, 16, min(seq_len, 20)
    keys, values = torch.randn(2, seq_len, num_kv_heads, head_dim)
    query, slopes = torch.randn(num_queries, num_heads, head_dim), torch.rand(num_heads)
    block_table = torch.randperm(24)[None]
    key_cache, value_cache = torch.full((2, 24, 3, num_kv_heads, head_dim), float("nan"))
    slots = torch.tensor([block_table[0, position // 3] * 3 + position % 3 for position in range(seq_len)])
    reference.reshape_and_cache(keys, values, key_cache, value_cache, slots)

    pattern = BlockPattern(8, 2, 3, 1, head_step)
    scoring = Scoring(0.25, alibi_slopes=slopes, softcap=1.5, pattern=pattern)
    arguments = (query, key_cache, value_cache, block_table, [seq_len], [0, num_queries])
    actual = reference.paged_attention(*arguments, scoring)

    is_seen = torch.zeros(num_heads, num_queries, seq_len, dtype=torch.bool)
    for head, row, key in itertools.product(range(num_heads), range(num_queries), range(seq_len)):
        block, own = key // 8, (seq_len - num_queries + row) // 8
        is_local, is_strided = own - block < 2, (block + head * head_step + 1) % 3 == 0
        is_seen[head, row, key] = key <= seq_len - num_queries + row and (is_local or is_strided)
    distances = torch.arange(seq_len)[-num_queries:, None] - torch.arange(seq_len)
    scores = torch.einsum("qhd,nhd->hqn", query, keys.repeat_interleave(2, dim=1)) * 0.25
    scores = 1.5 * (scores / 1.5).tanh() - slopes[:, None, None] * distances
    weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
    dense = torch.einsum("hqn,nhd->qhd", weights, values.repeat_interleave(2, dim=1))
    torch.testing.assert_close(actual, dense, rtol=0, atol=1e-6)


@pytest.mark.parametrize("window", [0, 3])
def test_a_sink_is_a_position_that_every_query_sees_and_whose_value_is_0(window):
    torch.manual_seed(0)
    keys, values = torch.randn(2, 7, 1, 8)
    query, sinks = torch.randn(2, 2, 8), torch.tensor([0.5, -torch.inf])
    scoring = Scoring(0.3, window, softcap=2.0, sinks=sinks)
    rows = query, keys[None], values[None], torch.tensor([[0]]), [7], [0, 2]
    actual = reference.paged_attention(*rows, scoring)

    scores = 2.0 * (torch.einsum("qhd,nd->hqn", query, keys[:, 0]) * 0.3 / 2.0).tanh()
    mask = torch.ones(2, 7, dtype=torch.bool).tril(5)
    if window:
        mask &= torch.ones_like(mask).triu(6 - window)
    shares = scores.exp() * mask
    shares = shares / (shares.sum(-1, keepdim=True) + sinks.exp()[:, None, None])
    torch.testing.assert_close(actual, torch.einsum("hqn,nd->qhd", shares, values[:, 0]), rtol=0, atol=1e-6)
    without = reference.paged_attention(*rows, Scoring(0.3, window, softcap=2.0))
    torch.testing.assert_close(actual[:, 1], without[:, 1], rtol=0, atol=1e-6)
    assert (actual[:, 0] - without[:, 0]).abs().max() > 0.01


def test_padding_rows_give_zeros():
    query, cache = torch.ones(1, 2, 16), torch.full((3, 4, 1, 16), float("nan"))
    rows = query, cache, cache, torch.tensor([[-1]]), [0], [0, 1], Scoring(1.0)
    assert reference.paged_attention(*rows).abs().max() == 0


def test_what_torch_draws_does_not_depend_on_tests_before() -> None:
    assert torch.initial_seed() == 0
