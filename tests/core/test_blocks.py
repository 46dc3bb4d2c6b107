"""Unit tests of the block pool and the prefix index."""

import gc
import random
from collections import Counter
from collections.abc import Sized

import pytest

from scheduler_service.core.cache import BlockPool, Cursor, EvictionOrder, Node, PrefixIndex, content_root
from testing.seeds import seeded
from tests.thorough import thorough

KEY = content_root("tenant", "salt", b"model")


def test_a_pool_hands_out_every_block_but_block_0():
    pool = BlockPool(5)
    assert sorted(pool.allocate() for _ in range(5)) == [1, 2, 3, 4, 5]
    with pytest.raises(RuntimeError, match="empty"):
        pool.allocate()


def test_garbage_collections_pass_over_the_blocks():
    """Each collection would stop the scheduler for milliseconds if it traversed a list of half a million numbers."""
    sized = {name: value for name, value in vars(BlockPool(1000)).items() if isinstance(value, Sized)}
    tables = {name for name, value in sized.items() if len(value) >= 1000}
    assert len(tables) >= 4
    assert not {name for name in tables if len(gc.get_referents(sized[name])) >= 1000}


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
    pool.uncache(blocks[2])
    assert next(pool.free_blocks()) == blocks[2]


def test_backed_up_blocks_precede_cached_ones_in_order_of_arrival():
    pool = BlockPool(6)
    blocks = [pool.allocate() for _ in range(6)]
    for block in blocks[:2]:
        pool.free(block, cached=True)
    for block in blocks[2:5]:
        pool.free(block, cached=True, spare=True)
    pool.free(blocks[5], cached=False)
    assert list(pool.free_blocks()) == [blocks[i] for i in (5, 2, 3, 4, 0, 1)]
    assert [block for _, block in pool.idle_blocks()] == blocks[:2]
    pool.share(blocks[4])
    assert [block for _, block in pool.idle_blocks()] == blocks[:2]
    assert [pool.allocate() for _ in range(3)] == [blocks[5], blocks[2], blocks[3]]
    assert (pool.num_backed_up, pool.num_idle_cached, pool.num_free) == (0, 2, 2)
    assert [block for _, block in pool.idle_blocks()] == blocks[:2]


@pytest.mark.parametrize("seed", [*range(2), *thorough(*range(2, 5))])
def test_a_pool_against_a_list(seed):
    """Random calls on the pool are compared with a plain list."""
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


def publish(index: PrefixIndex, parent: Node | None, token_ids: list[int], block_index: int, block: int) -> Node:
    """Record that a device block contains block number `block_index` of `token_ids`."""
    node = index.extend(KEY, parent, token_ids, block_index)
    index.add_copy(node.contents[0], block)
    return node


def test_an_index_finds_the_longest_cached_prefix_of_the_same_key():
    index = PrefixIndex(2, 10)
    tokens = [1, 2, 3, 4, 5, 6]
    node = None
    for i, block in enumerate([7, 8, 9]):
        node = publish(index, node, tokens, i, block)
    assert [n.blocks for n in index.match(KEY, tokens, 3)] == [(7,), (8,), (9,)]
    assert [n.blocks for n in index.match(KEY, tokens, 2)] == [(7,), (8,)]
    assert [n.blocks for n in index.match(KEY, [1, 2, 9, 9], 2)] == [(7,)]
    assert index.match(KEY, [2, 1], 1) == []
    assert index.match(content_root("tenant", "other", b"model"), tokens, 3) == []


def test_equal_tokens_after_other_prefixes_are_other_content():
    index = PrefixIndex(1, 10)
    first = publish(index, None, [1, 3], 0, 1)
    publish(index, first, [1, 3], 1, 2)
    second = publish(index, None, [2, 3], 0, 3)
    assert index.match(KEY, [2, 3], 2) == [second]


def test_content_lives_while_a_copy_or_a_descendant_does():
    index = PrefixIndex(1, 10)
    parent = publish(index, None, [1, 2], 0, 1)
    publish(index, None, [1], 0, 5)
    child = publish(index, parent, [1, 2], 1, 2)
    index.forget(1)
    assert index.match(KEY, [1, 2], 2) == [parent, child]  # block 5 has the same content
    index.forget(5)
    assert index.match(KEY, [1, 2], 2) == []
    assert index.find(KEY, [1, 2], 1) is child
    again = publish(index, None, [1], 0, 3)
    assert again is parent
    assert index.match(KEY, [1, 2], 2) == [parent, child]
    index.forget(3)
    index.forget(2)
    assert index.nodes() == []
    assert index.num_cached_blocks == 0


def test_forgetting_content_forgets_what_follows_it():
    index = PrefixIndex(1, 10)
    first = publish(index, None, [1, 2, 3], 0, 1)
    second = publish(index, first, [1, 2, 3], 1, 2)
    publish(index, second, [1, 2, 3], 2, 3)
    publish(index, first, [1, 9], 1, 4)
    blocks, host_blocks = index.forget_subtree(second)
    assert (sorted(blocks), host_blocks) == ([2, 3], [])
    assert index.match(KEY, [1, 2, 3], 3) == [first]
    assert len(index.match(KEY, [1, 9], 2)) == 2


def test_block_hashes_are_chained_and_fixed():
    """The hash is a block's public name. Routing and KV events depend on it across processes."""
    index = PrefixIndex(2, 10)
    first = publish(index, None, [1, 2, 3, 4], 0, 1)
    second = publish(index, first, [1, 2, 3, 4], 1, 2)
    assert (first.block_hash, second.block_hash) == (550880116721875475, 11016175629586639079)


# Free lists


def test_the_free_list_of_the_lowest_priority_is_emptied_first():
    priorities = {0: (0.0,), 1: (2.0, 0.0), 2: (1.0, 5.0)}
    order = EvictionOrder(priorities.__getitem__)
    pool = BlockPool(6, order)
    blocks = [pool.allocate() for _ in range(6)]
    for block, free_list in zip(blocks, [1, 1, 2, 2, 0, 0], strict=True):
        pool.free(block, cached=True, free_list=free_list)
    assert list(pool.free_blocks()) == [blocks[i] for i in (4, 5, 2, 3, 0, 1)]
    priorities[2] = (3.0, 0.0)
    order.changed(2)
    assert list(pool.idle_blocks()) == [
        (0, blocks[4]),
        (0, blocks[5]),
        (1, blocks[0]),
        (1, blocks[1]),
        (2, blocks[2]),
        (2, blocks[3]),
    ]
    assert [pool.allocate() for _ in range(3)] == [blocks[4], blocks[5], blocks[0]]
    assert not pool.has_blocks(0)
    assert pool.has_blocks(1)
    assert (pool.free_list_of(blocks[1]), pool.free_list_of(blocks[0])) == (1, 0)


class ListModel:
    """A model of a pool's free blocks and their eviction order, built from plain lists."""

    def __init__(self, num_blocks: int, owners: dict[int, str]) -> None:
        self.owners = owners
        self.priorities: dict[int, tuple[float, ...]] = dict.fromkeys(owners, (0.0,))
        self.horizon: tuple[float, ...] = ()
        self.empty = list(range(1, num_blocks + 1))
        self.free_lists: dict[int, list[int]] = {free_list: [] for free_list in owners}

    def remove(self, block: int) -> None:
        for blocks in (self.empty, *self.free_lists.values()):
            if block in blocks:
                blocks.remove(block)

    def next_blocks(self) -> set[int]:
        """Return the blocks of which any may be allocated next: several if owners have equally many blocks."""
        if self.empty:
            return {self.empty[0]}
        filled = sorted(
            (self.priorities[free_list], free_list) for free_list, blocks in self.free_lists.items() if blocks
        )
        if not filled:
            return set()
        if filled[0][0] < self.horizon:
            return {self.free_lists[filled[0][1]][0]}
        counts = Counter(self.owners[free_list] for free_list, blocks in self.free_lists.items() for _ in blocks)
        most = {owner for owner, count in counts.items() if count == max(counts.values())}
        firsts = {
            owner: next(free_list for _, free_list in filled if self.owners[free_list] == owner) for owner in most
        }
        return {self.free_lists[free_list][0] for free_list in firsts.values()}


def assert_order(pool: BlockPool, model: ListModel) -> None:
    """Check that the pool lists all its free blocks in an order in which the model would allocate them."""
    taken: list[tuple[list[int], int]] = []
    for block in pool.free_blocks():
        assert block in model.next_blocks()
        [blocks] = [blocks for blocks in (model.empty, *model.free_lists.values()) if block in blocks]
        taken.append((blocks, blocks.pop(0)))
    assert not model.next_blocks()
    for blocks, block in reversed(taken):
        blocks.insert(0, block)


@pytest.mark.one_of_each
@pytest.mark.parametrize("num_owners", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_free_lists_against_plain_lists(seed, num_owners):
    """Random calls are compared with a plain list per free list, and with the lists' priorities and owners."""
    rng = seeded(seed)
    model = ListModel(30, {free_list: f"owner {rng.randrange(num_owners)}" for free_list in range(6)})
    order = EvictionOrder(model.priorities.__getitem__, model.owners.__getitem__)
    pool = BlockPool(30, order)
    held: list[int] = []
    for _ in range(1500):
        draw = rng.random()
        if draw < 0.2:
            free_list = rng.randrange(6)
            model.priorities[free_list] = (float(rng.randrange(3)), rng.random())
            order.changed(free_list)
        elif draw < 0.25:
            order.horizon = model.horizon = rng.choice([(), (1.0, rng.random()), (5.0,)])
        elif draw < 0.6 and pool.num_free:
            block = rng.choice(list(pool.free_blocks()))
            if rng.random() < 0.3:
                pool.share(block)
            else:
                block = next(pool.free_blocks())
                assert pool.allocate() == block
            model.remove(block)
            held.append(block)
        elif held:
            block = held.pop(rng.randrange(len(held)))
            if rng.random() < 0.3:
                pool.free(block, cached=False)
                model.empty.insert(0, block)
            else:
                free_list = rng.randrange(6)
                pool.free(block, cached=True, free_list=free_list)
                model.free_lists[free_list].append(block)
        assert_order(pool, model)


def test_eviction_above_the_horizon_takes_from_the_largest_owner():
    """The owner with the most blocks gives blocks up until it has as many as the next owner.

    Free lists below the horizon are emptied first, regardless of their owners.
    """
    priorities = {1: (1.0, 90.0), 2: (1.0, 80.0), 3: (1.0, 50.0), 4: (1.0, 10.0)}
    order = EvictionOrder(priorities.__getitem__, {1: "hoarder", 2: "hoarder", 3: "other", 4: "other"}.__getitem__)
    order.horizon = (1.0, 20.0)
    pool = BlockPool(9, order)
    blocks = [pool.allocate() for _ in range(9)]
    for block, free_list in zip(blocks, [1, 1, 1, 2, 2, 3, 3, 4, 4], strict=True):
        pool.free(block, cached=True, free_list=free_list)
    taken = [pool.free_list_of(block) for block in pool.free_blocks()]
    assert taken == [4, 4, 2, 2, 1, 3, 1, 3, 1]
    assert [pool.allocate() for _ in range(5)] == [blocks[i] for i in (7, 8, 3, 4, 0)]
    assert order.may_evict(2, 1)
    assert not order.may_evict(1, 2)
    assert not order.may_evict(3, 1), "another owner's"
    assert order.may_evict(4, 1)


# Cursors


def test_a_cursor_goes_with_what_is_published_and_forgotten():
    index = PrefixIndex(2, 10)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    cursor = index.follow(KEY, tokens, 3)
    assert (cursor.num_blocks, cursor.num_missing_blocks, cursor.chain()) == (0, 3, [])
    first = publish(index, None, tokens, 0, 7)
    publish(index, first, [1, 2, 9, 9], 1, 3)  # another prompt's block
    assert cursor.chain() == [first]
    second = publish(index, first, tokens, 1, 8)
    assert index.cursors.take_moved() == [cursor]
    assert cursor.chain() == [first, second]
    index.forget(8)
    assert cursor.chain() == [first]
    index.forget(7)
    assert cursor.chain() == []
    assert index.cursors.take_moved() == [cursor]
    assert index.cursors.take_moved() == []
    index.forget(3)
    assert index.nodes() != []  # the cursor is at the root
    index.unfollow(cursor)
    assert index.nodes() == []


def test_a_cursor_stays_where_one_tier_still_has_a_copy():
    index = PrefixIndex(2, 10, 10)
    tokens = [1, 2, 3, 4]
    cursor = index.follow(KEY, tokens, 2)
    node = publish(index, None, tokens, 0, 7)
    index.add_host_copy(node.contents[0], 4)
    index.cursors.take_moved()
    index.forget(7)
    assert (cursor.chain(), index.cursors.take_moved()) == ([node], [])
    index.forget_host(4)
    assert (cursor.chain(), index.cursors.take_moved()) == ([], [cursor])


def test_a_prompt_awaits_the_load_of_any_layer_group():
    tokens = list(range(12))
    index = PrefixIndex(4, 10, 10, (0, 4))
    first = publish(index, None, tokens, 0, 1)
    index.add_host_copy(first.contents[1], 1)
    cursor = index.follow(KEY, tokens, 3)
    assert (cursor.num_usable_blocks, cursor.awaits_load) == (1, True)
    index.add_copy(first.contents[1], 2)
    assert (cursor.num_usable_blocks, cursor.awaits_load) == (1, False)
    second = publish(index, first, tokens, 1, 3)
    assert (cursor.num_blocks, cursor.num_usable_blocks, cursor.awaits_load) == (2, 1, False)
    index.add_host_copy(second.contents[1], 2)
    assert (cursor.num_usable_blocks, cursor.awaits_load) == (2, True)


def longest_usable(chain: list[Node], windows: tuple[int, ...], block_size: int) -> int:
    """Return the largest number of nodes of `chain` after which a sequence finds all that its windows read."""

    def reads(num_blocks: int, window: int) -> set[int]:
        first = num_blocks * block_size - window + 1 if window else 0  # of the next position's window
        return {position // block_size for position in range(max(0, first), num_blocks * block_size)}

    return max(
        num_blocks
        for num_blocks in range(len(chain) + 1)
        if all(
            chain[i].contents[group].is_cached
            for group, window in enumerate(windows[1:], 1)
            for i in reads(num_blocks, window) | {max(0, num_blocks - 1)}.intersection(range(num_blocks))
        )
    )


@pytest.mark.parametrize("windows", [(0,), (0, 5), (7, 3), (0, 0, 4)])
@pytest.mark.parametrize("seed", [0, *thorough(*range(1, 10))])
def test_cursors_are_where_a_match_ends(seed, windows):
    """Contents of random prompts over few distinct tokens are cached, lost and followed in both tiers."""
    rng = seeded(seed)
    index = PrefixIndex(2, 60, 30, windows)
    cursors: dict[Cursor, list[int]] = {}
    usable: dict[Cursor, int] = {}
    for _ in range(400):
        tokens = [rng.randrange(2) for _ in range(12)]
        draw = rng.random()
        if draw < 0.2:
            cursor = index.follow(KEY, tokens, 6)
            cursors[cursor], usable[cursor] = tokens, cursor.num_usable_blocks
        elif draw < 0.3 and cursors:
            cursor = rng.choice(list(cursors))
            del cursors[cursor], usable[cursor]
            index.unfollow(cursor)
        elif draw < 0.75:
            cache_some(index, tokens, rng)
        elif draw < 0.98:
            index.forget(rng.randint(1, 60))
            index.forget_host(rng.randint(1, 30))
        else:
            for root in list(index.roots.values()):
                index.forget_subtree(root)
        moved = index.cursors.take_moved()
        for cursor, prompt in cursors.items():
            chain = index.match(KEY, prompt, 6)
            assert cursor.chain() == chain
            assert cursor.num_blocks == len(chain)
            assert cursor.num_usable_blocks == longest_usable(chain, windows, 2)
            assert cursor in moved or cursor.num_usable_blocks == usable[cursor], "the queue's order is out of date"
            usable[cursor] = cursor.num_usable_blocks
        for node in index.nodes():
            assert node.num_cursors == sum(node in cursor.chain() for cursor in cursors)
    for cursor in cursors:
        index.unfollow(cursor)
    for root in list(index.roots.values()):
        index.forget_subtree(root)
    assert index.nodes() == []


def cache_some(index: PrefixIndex, tokens: list[int], rng: random.Random) -> None:
    """Cache most contents of the first blocks of a prompt on the device, on the host or on both."""
    node = None
    for i in range(rng.randint(1, 6)):
        free = [block for block in range(1, 61) if index.contents[block] is None]
        free_host = [block for block in range(1, 31) if index.host_contents[block] is None]
        if len(free) < len(index.windows.of_groups) or len(free_host) < len(index.windows.of_groups):
            break
        node = index.extend(KEY, node, tokens, i)
        for number, content in enumerate(node.contents):
            draw = rng.random()
            if not content.blocks and (draw < 0.7 or (number == 0 and not content.is_cached)):
                index.add_copy(content, free.pop())
            if not content.host_block and 0.5 < draw < 0.85:
                index.add_host_copy(content, free_host.pop())
