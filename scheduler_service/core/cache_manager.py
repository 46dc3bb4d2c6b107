"""Block tables: what a sequence needs of the block pool and the prefix index, for one worker's life."""

from enum import Enum

from scheduler_service.core.block_pool import BlockPool
from scheduler_service.core.prefix_index import Node, PrefixIndex
from scheduler_service.core.sequence import Sequence


class Allocation(Enum):
    OK = "ok"
    LATER = "later"
    NEVER = "never"


class CacheManager:
    """Gives blocks to sequences and takes them back. `watermark` is the share of blocks an admission leaves free."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool, watermark: float) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(block_size, num_blocks)
        self._enable_prefix_caching = enable_prefix_caching
        self._num_watermark_blocks = int(watermark * num_blocks)

    @property
    def num_held_blocks(self) -> int:
        return self.pool.num_blocks - self.pool.num_free

    def num_blocks_for(self, num_positions: int) -> int:
        return -(-num_positions // self.block_size)

    def match(self, sequence: Sequence) -> list[Node]:
        """The cached blocks a waiting sequence would start from. The last token is never among them: computing it is
        what yields the next one."""
        if not self._enable_prefix_caching or sequence.wants_prompt_logprobs:
            return []
        return self.index.match(
            sequence.root_key, sequence.token_ids, max_blocks=(sequence.num_tokens - 1) // self.block_size
        )

    def can_allocate(self, sequence: Sequence, matched: list[Node], *, alone: bool) -> Allocation:
        """Whether a waiting sequence may be opened now. Idle blocks that it matches itself are not free twice. The
        watermark does not bind a sequence that is `alone`."""
        if self.num_blocks_for(sequence.max_num_tokens - 1) > self.pool.num_blocks:
            return Allocation.NEVER
        num_idle = sum(self.pool.ref_count(node.blocks[0]) == 0 for node in matched)
        num_new = self.num_blocks_for(sequence.num_tokens) - len(matched)
        num_reserved = 0 if alone else self._num_watermark_blocks
        return Allocation.OK if num_new + num_idle + num_reserved <= self.pool.num_free else Allocation.LATER

    def open(self, sequence: Sequence, matched: list[Node]) -> None:
        """Give a waiting sequence blocks for all its tokens, the matched ones first."""
        for node in matched:
            self.pool.share(node.blocks[0])
            sequence.block_table.append(node.blocks[0])
        sequence.node = matched[-1] if matched else None
        sequence.num_matched_blocks = sequence.num_published_blocks = len(matched)
        sequence.num_computed_tokens = len(matched) * self.block_size
        for _ in range(self.num_blocks_for(sequence.num_tokens) - len(matched)):
            sequence.block_table.append(self._allocate())

    def num_missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks to append before `num_tokens` more positions can be computed."""
        return self.num_blocks_for(sequence.num_computed_tokens + num_tokens) - len(sequence.block_table)

    def append(self, sequence: Sequence, num_blocks: int) -> list[int]:
        blocks = [self._allocate() for _ in range(num_blocks)]
        sequence.block_table.extend(blocks)
        return blocks

    def publish(self, sequence: Sequence) -> None:
        """Make the full blocks whose tokens are known, and whose K and V are planned, available to others."""
        num_full = min(sequence.num_computed_tokens, sequence.num_tokens) // self.block_size
        if not self._enable_prefix_caching or num_full <= sequence.num_published_blocks:
            return
        for i in range(sequence.num_published_blocks, num_full):
            sequence.node = self.index.publish(
                sequence.root_key, sequence.node, sequence.token_ids, i, sequence.block_table[i]
            )
        sequence.num_published_blocks = num_full

    def release(self, sequence: Sequence) -> None:
        """Take all blocks back, leaves first, so that a prefix outlives what follows it."""
        for block in reversed(sequence.block_table):
            self.pool.free(block, cached=self.index.is_cached(block))
        sequence.forget_cache()

    def unpublish(self, sequence: Sequence) -> None:
        """What the sequence wrote, from its first block that it did not match on, and all content computed on top of
        it, is no longer to be found."""
        node = self.index.find(sequence.root_key, sequence.token_ids, sequence.num_matched_blocks)
        for block in self.index.forget_subtree(node) if node else ():
            self.pool.expose(block)

    def stands_on(self, sequence: Sequence, other: Sequence) -> bool:
        """Whether the sequence matched a block of the content that `other` wrote first."""
        num_tokens = (other.num_matched_blocks + 1) * self.block_size
        return (
            sequence.num_matched_blocks > other.num_matched_blocks
            and sequence.root_key == other.root_key
            and sequence.token_ids[:num_tokens] == other.token_ids[:num_tokens]
        )

    def _allocate(self) -> int:
        block = self.pool.allocate()
        self.index.forget(block)
        return block
