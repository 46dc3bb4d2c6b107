"""The pool of KV cache blocks: reference counts and the free lists, over plain integers.

Blocks are 1..num_blocks; block 0 is never allocated and serves as the sentinel of the first free list. The lists are
intrusive doubly linked rings over two flat arrays, so that a prefix hit takes an idle cached block back in O(1) (the
structure of vLLM's FreeKVCacheBlockQueue). Blocks whose content nothing is lost with are in the first list. The others
stand in further free lists, in the order in which they were freed; an eviction order says from which one is taken.
"""

from array import array
from collections.abc import Iterator

from scheduler_service.core.cache.eviction import EvictionOrder


class BlockPool:
    """The blocks of one tier: how many hold each, and in which order free ones are taken."""

    def __init__(self, num_blocks: int, order: EvictionOrder | None = None) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_idle_cached = 0  # free blocks whose content can be matched
        self.num_spare = 0  # of these, such whose content can be had elsewhere
        self._order = order or EvictionOrder()
        # Arrays rather than lists: a garbage collection would stop for every one of their numbers.
        self._ref_counts = array("q", bytes(8 * (num_blocks + 1)))
        self._is_idle_cached = bytearray(num_blocks + 1)
        self._is_spare = bytearray(num_blocks + 1)
        self._free_list_of = array("q", bytes(8 * (num_blocks + 1)))  # where each stood last
        # The entries behind those of the blocks are the sentinels of free lists.
        self._next = array("q", [*range(1, num_blocks + 1), 0])
        self._previous = array("q", [num_blocks, *range(num_blocks)])

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def allocate(self) -> int:
        """Take the next free block. Its content, if it was cached, is lost."""
        block = self._next[0] or self.next_of(self._order.first()) if self.num_free else 0
        if block == 0:
            raise RuntimeError("the block pool is empty: allocation was not checked against num_free")
        self._unlink(block)
        self._ref_counts[block] = 1
        self._free_list_of[block] = 0
        return block

    def share(self, block: int) -> None:
        """Count one more holder. An idle cached block comes back into use."""
        if self._ref_counts[block] == 0:
            self._unlink(block)
        self._ref_counts[block] += 1

    def free(self, block: int, *, cached: bool, spare: bool = False, free_list: int = 0) -> None:
        """Count one holder less. A block without a holder then is free. If its content is cached, it stands behind all
        others of its free list; if that can be had elsewhere too, the block is `spare`: behind those that hold nothing
        and the other spare ones."""
        count = self._ref_counts[block] - 1
        if count < 0:
            raise RuntimeError(f"block {block} was freed by a caller that does not hold it")
        self._ref_counts[block] = count
        if count > 0:
            return
        if not cached:
            self._link(block, before=self._next[0], cached=False)
        elif spare:
            self._free_list_of[block] = free_list
            self._link_spare(block)
        else:
            self._link(block, before=self._sentinel(free_list), cached=True)
            self._free_list_of[block] = free_list
            self._order.added(free_list)

    def spare(self, block: int) -> None:
        """An idle block's content can be had elsewhere too."""
        self._unlink(block)
        self._link_spare(block)

    def expose(self, block: int) -> None:
        """An idle block's content is no longer cached: it goes to the head of the first list."""
        if self._ref_counts[block] == 0:
            self._unlink(block)
            self._link(block, before=self._next[0], cached=False)

    def free_list_of(self, block: int) -> int:
        """The further list in which a block stands, or stood last since it has its content; 0 if in none."""
        return self._free_list_of[block]

    def has_blocks(self, free_list: int) -> bool:
        """Whether any block stands in a free list."""
        sentinel = self._sentinel(free_list)
        return self._next[sentinel] != sentinel

    def next_without_loss(self) -> int:
        """The free block that is taken next, if it holds nothing, or what can be had elsewhere; else 0."""
        return self._next[0]

    def next_of(self, free_list: int) -> int:
        """The block that is taken next from a free list; 0 if it has none."""
        block = self._next[self._sentinel(free_list)]
        return block if block <= self.num_blocks else 0

    def free_blocks(self) -> Iterator[int]:
        """Go through all free blocks in the order in which they are taken, if nothing changes that."""
        yield from self._ring(0)
        for _, block in self.idle_blocks():
            yield block

    def idle_blocks(self) -> Iterator[tuple[int, int]]:
        """Go through the idle blocks that are not spare, in the same order, each with its free list."""
        return self._order.blocks(lambda free_list: self._ring(self._sentinel(free_list)))

    def _ring(self, sentinel: int) -> Iterator[int]:
        block = self._next[sentinel]
        while block != sentinel:
            yield block
            block = self._next[block]

    def _sentinel(self, free_list: int) -> int:
        """The entry of a free list, which is made where there is none."""
        sentinel = self.num_blocks + 1 + free_list
        if sentinel >= len(self._next):
            entries = range(len(self._next), sentinel + 1)
            self._next.extend(entries)
            self._previous.extend(entries)
        return sentinel

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self.num_free -= 1
        if not self._is_idle_cached[block]:
            return
        self._is_idle_cached[block] = False
        self.num_idle_cached -= 1
        if self._is_spare[block]:
            self._is_spare[block] = False
            self.num_spare -= 1
        else:
            self._order.taken(self._free_list_of[block], is_last=before == after)

    def _link_spare(self, block: int) -> None:
        self._link(block, before=0, cached=True)
        self._is_spare[block] = True
        self.num_spare += 1

    def _link(self, block: int, *, before: int, cached: bool) -> None:
        previous = self._previous[before]
        self._next[previous] = self._previous[before] = block
        self._previous[block], self._next[block] = previous, before
        self.num_free += 1
        if cached:
            self._is_idle_cached[block] = True
            self.num_idle_cached += 1
