"""The pool of KV cache blocks: reference counts and the free list, over plain integers.

Blocks are 1..num_blocks; block 0 is never allocated and serves as the sentinel of the free list, an intrusive doubly
linked ring over two flat lists, so that a prefix hit takes an idle cached block back in O(1) (the structure of vLLM's
FreeKVCacheBlockQueue). Blocks are taken from the head. Freed blocks whose content is cached go to the tail (LRU),
others to the head.
"""

from collections.abc import Iterator


class BlockPool:
    """The blocks of one tier: how many hold each, and in which order free ones are taken."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_idle_cached = 0  # free blocks whose content can be matched
        self.num_spare = 0  # of these, such whose content can be had elsewhere
        self._ref_counts = [0] * (num_blocks + 1)
        self._is_idle_cached = bytearray(num_blocks + 1)
        self._is_spare = bytearray(num_blocks + 1)
        self._last_spare = 0  # behind it in the free list the others begin; 0: all of it
        self._next = [*range(1, num_blocks + 1), 0]
        self._previous = [num_blocks, *range(num_blocks)]

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def allocate(self) -> int:
        """Take the block at the head of the free list. Its content, if it was cached, is lost."""
        block = self._next[0]
        if block == 0:
            raise RuntimeError("the block pool is empty: allocation was not checked against num_free")
        self._unlink(block)
        self._ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """Count one more holder. An idle cached block comes back into use."""
        if self._ref_counts[block] == 0:
            self._unlink(block)
        self._ref_counts[block] += 1

    def free(self, block: int, *, cached: bool, spare: bool = False) -> None:
        """Count one holder less. A block that nobody holds then is free, behind all others if its content is cached; if
        that can be had elsewhere too, the block is `spare`: behind the other spare ones, before the cached ones."""
        count = self._ref_counts[block] - 1
        if count < 0:
            raise RuntimeError(f"block {block} was freed by somebody who does not hold it")
        self._ref_counts[block] = count
        if count > 0:
            return
        if spare and cached:
            self._link_spare(block)
        else:
            self._link(block, before=0 if cached else self._next[0], cached=cached)

    def spare(self, block: int) -> None:
        """An idle block's content can be had elsewhere too."""
        self._unlink(block)
        self._link_spare(block)

    def expose(self, block: int) -> None:
        """An idle block's content is no longer cached: it goes to the head of the free list."""
        if self._ref_counts[block] == 0:
            self._unlink(block)
            self._link(block, before=self._next[0], cached=False)

    def free_blocks(self) -> Iterator[int]:
        """Go through the free list from head to tail."""
        block = self._next[0]
        while block != 0:
            yield block
            block = self._next[block]

    def blocks_to_spare(self) -> Iterator[int]:
        """Go through the free list from the oldest block on that is not spare."""
        block = self._next[self._last_spare]
        while block != 0:
            yield block
            block = self._next[block]

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self.num_free -= 1
        if self._is_spare[block]:
            self._is_spare[block] = False
            self.num_spare -= 1
        if block == self._last_spare:
            self._last_spare = before
        if self._is_idle_cached[block]:
            self._is_idle_cached[block] = False
            self.num_idle_cached -= 1

    def _link_spare(self, block: int) -> None:
        self._link(block, before=self._next[self._last_spare], cached=True)
        self._last_spare = block
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
