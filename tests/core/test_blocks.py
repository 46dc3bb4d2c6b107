"""The block pool and the prefix index by themselves."""

import random

import pytest

from scheduler_service.core.cache import BlockPool, PrefixIndex, RootKey

KEY = RootKey("tenant", "salt", b"model")


def test_a_pool_hands_out_every_block_but_block_0():
    pool = BlockPool(5)
    assert sorted(pool.allocate() for _ in range(5)) == [1, 2, 3, 4, 5]
    with pytest.raises(RuntimeError, match="empty"):
        pool.allocate()


def test_freed_blocks_are_taken_next_and_cached_ones_last():
    pool = BlockPool(4)
    first, second, third, _ = (pool.allocate() for _ in range(4))
    pool.free(first, cached=True)
    pool.free(second, cached=False)
    pool.free(third, cached=True)
    assert [pool.allocate() for _ in range(3)] == [second, first, third]


def test_an_idle_cached_block_comes_back_from_the_middle():
    pool = BlockPool(4)
    for block in [pool.allocate() for _ in range(4)]:
        pool.free(block, cached=True)
    middle = list(pool.free_blocks())[1]
    pool.share(middle)
    assert middle not in list(pool.free_blocks())
    assert pool.num_free == 3
    assert pool.ref_count(middle) == 1


def test_a_double_free_is_fatal_at_once():
    pool = BlockPool(2)
    block = pool.allocate()
    pool.share(block)
    pool.free(block, cached=False)
    pool.free(block, cached=False)
    with pytest.raises(RuntimeError, match="does not hold"):
        pool.free(block, cached=False)


def test_a_block_whose_content_is_forgotten_is_taken_first():
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    for block in blocks:
        pool.free(block, cached=True)
    pool.expose(blocks[2])
    assert next(pool.free_blocks()) == blocks[2]


def test_spare_blocks_stand_before_the_cached_ones_in_the_order_they_came():
    pool = BlockPool(6)
    blocks = [pool.allocate() for _ in range(6)]
    for block in blocks[:2]:
        pool.free(block, cached=True)
    for block in blocks[2:5]:
        pool.free(block, cached=True, spare=True)
    pool.free(blocks[5], cached=False)
    assert list(pool.free_blocks()) == [blocks[i] for i in (5, 2, 3, 4, 0, 1)]
    assert [block for _, block in pool.shelved_blocks()] == blocks[:2]
    pool.share(blocks[4])
    assert [block for _, block in pool.shelved_blocks()] == blocks[:2]
    assert [pool.allocate() for _ in range(3)] == [blocks[5], blocks[2], blocks[3]]
    assert (pool.num_spare, pool.num_idle_cached, pool.num_free) == (0, 2, 2)
    assert [block for _, block in pool.shelved_blocks()] == blocks[:2]


@pytest.mark.parametrize("seed", range(5))
def test_a_pool_against_a_list(seed):
    """Random calls; the model is a plain list."""
    rng = random.Random(seed)
    pool, free, held = BlockPool(12), list(range(1, 13)), []
    for _ in range(2000):
        if free and rng.random() < 0.5:
            if rng.random() < 0.3:
                block = rng.choice(free)
                pool.share(block)
            else:
                block = pool.allocate()
                assert block == free[0]
            free.remove(block)
            held.append(block)
        elif held:
            block = held.pop(rng.randrange(len(held)))
            cached = rng.random() < 0.5
            pool.free(block, cached=cached)
            free.insert(len(free) if cached else 0, block)
        assert list(pool.free_blocks()) == free
        assert pool.num_free == len(free)


def test_an_index_finds_the_longest_cached_prefix_of_the_same_key():
    index = PrefixIndex(2, 10)
    tokens = [1, 2, 3, 4, 5, 6]
    node = None
    for i, block in enumerate([7, 8, 9]):
        node = index.publish(KEY, node, tokens, i, block)
    assert [n.blocks for n in index.match(KEY, tokens, 3)] == [(7,), (8,), (9,)]
    assert [n.blocks for n in index.match(KEY, tokens, 2)] == [(7,), (8,)]
    assert [n.blocks for n in index.match(KEY, [1, 2, 9, 9], 2)] == [(7,)]
    assert index.match(KEY, [2, 1], 1) == []
    assert index.match(KEY._replace(cache_salt="other"), tokens, 3) == []


def test_equal_tokens_after_other_prefixes_are_other_content():
    index = PrefixIndex(1, 10)
    first = index.publish(KEY, None, [1, 3], 0, 1)
    index.publish(KEY, first, [1, 3], 1, 2)
    second = index.publish(KEY, None, [2, 3], 0, 3)
    assert index.match(KEY, [2, 3], 2) == [second]


def test_content_lives_while_a_copy_or_a_descendant_does():
    index = PrefixIndex(1, 10)
    parent = index.publish(KEY, None, [1, 2], 0, 1)
    index.publish(KEY, None, [1], 0, 5)
    child = index.publish(KEY, parent, [1, 2], 1, 2)
    index.forget(1)
    assert index.match(KEY, [1, 2], 2) == [parent, child]  # block 5 holds it too
    index.forget(5)
    assert index.match(KEY, [1, 2], 2) == []
    assert index.find(KEY, [1, 2], 1) is child
    again = index.publish(KEY, None, [1], 0, 3)
    assert again is parent
    assert index.match(KEY, [1, 2], 2) == [parent, child]
    index.forget(3)
    index.forget(2)
    assert index.nodes() == []
    assert index.num_cached_blocks == 0


def test_forgetting_content_forgets_what_follows_it():
    index = PrefixIndex(1, 10)
    first = index.publish(KEY, None, [1, 2, 3], 0, 1)
    second = index.publish(KEY, first, [1, 2, 3], 1, 2)
    index.publish(KEY, second, [1, 2, 3], 2, 3)
    index.publish(KEY, first, [1, 9], 1, 4)
    blocks, host_blocks = index.forget_subtree(second)
    assert (sorted(blocks), host_blocks) == ([2, 3], [])
    assert index.match(KEY, [1, 2, 3], 3) == [first]
    assert len(index.match(KEY, [1, 9], 2)) == 2


def test_block_hashes_are_chained_and_fixed():
    """The public name of a block; routing and events depend on it across processes."""
    index = PrefixIndex(2, 10)
    first = index.publish(KEY, None, [1, 2, 3, 4], 0, 1)
    second = index.publish(KEY, first, [1, 2, 3, 4], 1, 2)
    assert (first.block_hash, second.block_hash) == (550880116721875475, 11016175629586639079)
