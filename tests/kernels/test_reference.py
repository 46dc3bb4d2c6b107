"""The specification itself, against torch's own attention on contiguous tensors."""

import pytest
import torch
import torch.nn.functional as F

from kernels import reference


def test_skipped_slots_leave_the_cache_alone():
    key_cache, value_cache = torch.zeros(2, 3, 4, 1, 2)  # 3 blocks of 4 positions, one head of 2
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
    if window == 3:  # the first query is at position 6: what lies before position 4 is someone else's
        key_cache[4], value_cache[4], block_table[0, 0] = float("nan"), float("nan"), 5

    actual = reference.paged_attention(
        query, key_cache, value_cache, block_table, [seq_len], [0, num_queries], 0.25, window
    )

    mask = torch.ones(num_queries, seq_len, dtype=torch.bool).tril(seq_len - num_queries)
    if window:
        mask &= torch.ones_like(mask).triu(seq_len - num_queries - window + 1)
    query, keys, values = (heads.transpose(0, 1) for heads in (query, keys, values))  # heads first
    keys, values = keys.repeat_interleave(3, 0), values.repeat_interleave(3, 0)
    dense = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=0.25)
    torch.testing.assert_close(actual, dense.transpose(0, 1), rtol=0, atol=1e-6)
