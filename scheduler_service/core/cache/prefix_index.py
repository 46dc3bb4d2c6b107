"""The prefix index: finds cached full blocks by their tokens, with an exact comparison.

A node represents the content of one block. It is identified by its parent and its token bytes. A node has any number of
copies on the device and at most one copy on the host. It exists while it or a descendant has a copy. A child is looked
up in its parent by all its token bytes. So a hash collision can never return a wrong block. The chained xxh3_64 hash is
only the block's public name, for events and routing.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple

import xxhash

from scheduler_service.core.request import BlockRemoved, BlockStored, KvEvent, KvEventCounts, Tier


class Root(NamedTuple):
    """The part of a cached content's identity that is not its tokens: the tenant, the cache salt and the model.

    Equal tokens under different roots are different contents of the KV cache.
    """

    digest: bytes
    block_hash: int  # the public hash of the empty prefix: the hashes of first blocks are chained to it


def content_root(tenant: str, cache_salt: str, model_digest: bytes) -> Root:
    """Return the root of the prefix index tree for a tenant, a cache salt and a model.

    The root identifies everything that makes the K and V of equal tokens differ, and the tenant that owns the content.
    It does not include how the worker computes, because a prefix index never outlives its worker.
    """
    named = repr((tenant, cache_salt, model_digest)).encode()
    return Root(sha256(named).digest(), xxhash.xxh3_64_intdigest(named))


def _token_bytes(token_ids: Sequence[int], block_index: int, block_size: int) -> bytes:
    start = block_index * block_size
    return array("I", token_ids[start : start + block_size]).tobytes()


@dataclass(slots=True, eq=False, repr=False)
class Cursor:
    """The position of a waiting prompt in the prefix index: the end of the cached blocks with which the prompt starts.

    The prefix index moves the cursor when blocks are published or forgotten. So the scheduler always knows the number
    of uncached blocks, without matching the prompt again.
    """

    node: Node  # of the last cached block; the root if none is cached
    token_ids: Sequence[int]
    block_size: int
    max_blocks: int
    num_blocks: int = 0  # cached blocks, in either tier

    @property
    def num_missing_blocks(self) -> int:
        """Return the number of full blocks of the waiting prompt that are not in the prefix cache."""
        return self.max_blocks - self.num_blocks

    @property
    def next_bytes(self) -> bytes:
        """Return the token ids, as bytes, of the prompt's first block that is not cached. Return empty bytes if all
        full blocks are cached."""
        is_whole = self.num_blocks == self.max_blocks
        return b"" if is_whole else _token_bytes(self.token_ids, self.num_blocks, self.block_size)

    def chain(self) -> list[Node]:
        """Return the index nodes of the prompt's cached blocks, in the order of the prompt."""
        nodes = []
        node = self.node
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def advance(self) -> None:
        """Move the cursor forward in the prefix index, from its node to the last cached block of its prompt, and attach
        it to the node of that block.

        The cursor must not be attached to a node when this method is called.
        """
        node, next_bytes = self.node, self.next_bytes
        while next_bytes:
            child = node.children.get(next_bytes)
            if child is None or not child.is_cached:
                break
            node = child
            node.num_cursors += 1
            self.num_blocks += 1
            next_bytes = self.next_bytes
        self.node = node
        if node.cursors is None:
            node.cursors = {}
        node.cursors.setdefault(next_bytes, {})[self] = None

    def detach(self) -> None:
        """Detach the cursor (the position of a waiting prompt in the prefix index) from its node."""
        standing = self.node.cursors
        assert standing is not None
        next_bytes = self.next_bytes
        del standing[next_bytes][self]
        if not standing[next_bytes]:
            del standing[next_bytes]


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """A node of the prefix index: the content of one full KV cache block after a given prefix.

    The node lists the device blocks and the host block that contain copies of this content.
    """

    root: Root
    parent: Node | None
    token_bytes: bytes
    block_hash: int
    blocks: tuple[int, ...] = ()  # a tuple of integers, which the garbage collector does not track
    host_block: int = 0  # 0: no copy on the host
    is_moving: bool = False  # a demotion or promotion of this content is in progress
    children: dict[bytes, Node] = field(default_factory=dict)
    # The cursors attached to this node, by the token bytes of their next block. None: no cursor was ever attached.
    cursors: dict[bytes, dict[Cursor, None]] | None = None
    num_cursors: int = 0  # on this node and its descendants; not counted for a root

    @property
    def is_cached(self) -> bool:
        """Return whether a block on the device or on the host contains a copy of this node's content."""
        return bool(self.blocks or self.host_block)

    def stored(self, tier: Tier) -> BlockStored:
        """Return the cache event for subscribers that says that this content can now be matched in a tier (device or
        host)."""
        assert self.parent is not None
        return BlockStored(
            self.block_hash,
            self.parent.block_hash,
            tuple(array("I", self.token_bytes)),
            tier,
            is_first=self.parent.parent is None,
            root=self.root.digest,
        )


class Cursors:
    """The cursors of a prefix index. A cursor is the position of a waiting prompt: the end of its cached blocks.

    Cursors move when the content of a node gets its first copy or loses its last copy.
    """

    def __init__(self) -> None:
        self.number = 0
        self._moved: dict[Cursor, None] = {}

    def add(self, cursor: Cursor) -> None:
        """Add a new cursor, which starts at the root of its prompt's tree, and move it to the prompt's last cached
        block."""
        self.number += 1
        cursor.advance()

    def remove(self, cursor: Cursor) -> None:
        """Stop tracking the cursor of a prompt that no longer waits, and detach the cursor from its node."""
        self.number -= 1
        self._moved.pop(cursor, None)
        cursor.detach()
        for node in cursor.chain():
            node.num_cursors -= 1

    def take_moved(self) -> list[Cursor]:
        """Return the cursors (positions of waiting prompts in the prefix index) that may have moved since the last
        call."""
        moved, self._moved = self._moved, {}
        return list(moved)

    def advance_waiting(self, node: Node) -> None:
        """Advance the cursors of the waiting prompts that continue with the content of `node`. This content has just
        been cached."""
        waiting = node.parent.cursors if node.parent is not None else None
        for cursor in list((waiting or {}).get(node.token_bytes, ())):
            cursor.detach()
            cursor.advance()
            self._moved[cursor] = None

    def move_back(self, node: Node) -> None:
        """Move the cursors on `node` and its descendants back to the node's parent, because the content of `node` is no
        longer cached."""
        assert node.parent is not None
        nodes = [node]
        for visited in nodes:
            nodes.extend(child for child in visited.children.values() if child.num_cursors)
            for cursor in [cursor for standing in (visited.cursors or {}).values() for cursor in standing]:
                cursor.detach()
                while cursor.node is not node.parent:
                    assert cursor.node.parent is not None
                    cursor.node.num_cursors -= 1
                    cursor.node = cursor.node.parent
                    cursor.num_blocks -= 1
                cursor.advance()
                self._moved[cursor] = None


class PrefixIndex:
    """The prefix cache index of one worker: finds the KV cache blocks on the device and on the host that contain a
    given prefix.

    The index is a set of trees. Each tree has one root, and each other node is the content of one full block.
    """

    def __init__(self, block_size: int, num_blocks: int, num_host_blocks: int = 0) -> None:
        self._block_size = block_size
        self.roots: dict[Root, Node] = {}
        self.contents: list[Node | None] = [None] * (num_blocks + 1)  # by device block
        self.host_contents: list[Node | None] = [None] * (num_host_blocks + 1)
        self.num_cached_blocks = 0
        self.num_cached_host_blocks = 0
        self._changes: list[tuple[Node, Tier, bool]] = []  # content that was stored (True) or removed since take_events
        self.cursors = Cursors()

    def match(self, root: Root, token_ids: Sequence[int], max_blocks: int) -> list[Node]:
        """Return the longest chain of cached index nodes that is a prefix of `token_ids`.

        Each node may be cached on the device, on the host, or in both places. The chain has at most `max_blocks` nodes.
        """
        node = self.roots.get(root)
        chain: list[Node] = []
        while node is not None and len(chain) < max_blocks:
            node = node.children.get(_token_bytes(token_ids, len(chain), self._block_size))
            if node is None or not node.is_cached:
                break
            chain.append(node)
        return chain

    # Cursors

    def follow(self, root: Root, token_ids: Sequence[int], max_blocks: int) -> Cursor:
        """Create a cursor for a waiting prompt, and return the cursor.

        The index keeps the cursor at the end of the longest chain of cached nodes that is a prefix of `token_ids`. The
        nodes may be cached on the device or on the host. The chain has at most `max_blocks` nodes.
        """
        cursor = Cursor(self._root_node(root), token_ids, self._block_size, max_blocks)
        self.cursors.add(cursor)
        return cursor

    def unfollow(self, cursor: Cursor) -> None:
        """Remove the cursor of a prompt that no longer waits."""
        self.cursors.remove(cursor)
        self._prune(cursor.node)

    # Copies

    def find(self, root: Root, token_ids: Sequence[int], block_index: int) -> Node | None:
        """Return the index node for block `block_index` of `token_ids`, or None if the index has no such node. The node
        may be without cached copies."""
        node = self.roots.get(root)
        for i in range(block_index + 1):
            node = node.children.get(_token_bytes(token_ids, i, self._block_size)) if node else None
        return node

    def publish(self, root: Root, parent: Node | None, token_ids: Sequence[int], block_index: int, block: int) -> Node:
        """Record that the device block `block` contains block `block_index` of `token_ids`, so that other sequences can
        match it. Return the index node of this content.

        `parent` is the node of the preceding block, or None for the first block. Raises RuntimeError if `block` is
        published already.
        """
        if parent is None:
            parent = self._root_node(root)
        token_bytes = _token_bytes(token_ids, block_index, self._block_size)
        node = parent.children.get(token_bytes)
        if node is None:
            block_hash = xxhash.xxh3_64_intdigest(parent.block_hash.to_bytes(8, "little") + token_bytes)
            node = parent.children[token_bytes] = Node(root, parent, token_bytes, block_hash)
        self.add_copy(node, block)
        return node

    def add_copy(self, node: Node, block: int) -> None:
        """Record that device block `block` contains a copy of the content of a prefix index node.

        Raises RuntimeError if the block is published already.
        """
        if self.contents[block] is not None:
            raise RuntimeError(f"block {block} is published already")
        is_first = not node.blocks
        node.blocks += (block,)
        self.contents[block] = node
        self.num_cached_blocks += 1
        if is_first:
            self._changes.append((node, Tier.DEVICE, True))
            if self.cursors.number and not node.host_block:
                self.cursors.advance_waiting(node)

    def add_host_copy(self, node: Node, host_block: int) -> None:
        """Record that host block `host_block` contains a copy of the content of a prefix index node.

        The node must have no host copy yet.
        """
        assert not node.host_block
        assert self.host_contents[host_block] is None
        node.host_block = host_block
        self.host_contents[host_block] = node
        self.num_cached_host_blocks += 1
        self._changes.append((node, Tier.HOST, True))
        if not node.blocks:
            self.cursors.advance_waiting(node)

    def forget(self, block: int) -> None:
        """Remove the record of a device block's content, for example because the block is reused. Does nothing if the
        block is not published."""
        node = self.contents[block]
        if node is None:
            return
        self.contents[block] = None
        self.num_cached_blocks -= 1
        node.blocks = tuple(copy for copy in node.blocks if copy != block)
        if not node.blocks:
            self._record_loss(node, Tier.DEVICE)

    def forget_host(self, host_block: int) -> None:
        """Remove the record of a host block's content, for example because the block is reused. Does nothing if the
        block contains no cached copy."""
        node = self.host_contents[host_block]
        if node is None:
            return
        self.host_contents[host_block] = None
        self.num_cached_host_blocks -= 1
        node.host_block = 0
        self._record_loss(node, Tier.HOST)

    def forget_subtree(self, node: Node) -> tuple[list[int], list[int]]:
        """Forget all cached copies of a node's content and of the contents of all its descendants.

        Return two lists: the device blocks and the host blocks that contained the copies.
        """
        nodes = _with_descendants([node])
        blocks = [block for visited in nodes for block in visited.blocks]
        host_blocks = [visited.host_block for visited in nodes if visited.host_block]
        for block in reversed(blocks):  # leaves first, so that a cursor moves one node at a time
            self.forget(block)
        for host_block in reversed(host_blocks):
            self.forget_host(host_block)
        return blocks, host_blocks

    def dissolve(self) -> None:
        """Break the reference cycles of a prefix index that is no longer needed, because its worker is lost.

        Afterwards parents and children no longer refer to each other, and nodes and cursors do not either. Python then
        frees all of them without a run of the garbage collector.
        """
        for node in self.nodes():
            node.children.clear()
            node.cursors = None
        self.roots.clear()

    def take_events(self) -> list[KvEvent]:
        """Return the cache events since the last call, in order: which contents were stored in a tier or removed from
        it."""
        changes, self._changes = self._changes, []
        return [
            node.stored(tier) if is_stored else BlockRemoved(node.block_hash, tier, node.root.digest)
            for node, tier, is_stored in changes
        ]

    def drop_events(self) -> KvEventCounts:
        """Discard the pending cache events, and return the number of discarded events of each type."""
        changes, self._changes = self._changes, []
        return Counter(BlockStored if is_stored else BlockRemoved for _, _, is_stored in changes)

    def nodes(self) -> list[Node]:
        """Return all nodes of the prefix index, including the roots. Parents come before their children."""
        return _with_descendants(self.roots.values())

    def snapshot(self) -> list[BlockStored]:
        """Return `BlockStored` events for all cached contents, so that a new subscriber knows the present state.
        Parents come before their children."""
        return [
            node.stored(tier)
            for node in self.nodes()
            for tier, copies in ((Tier.DEVICE, node.blocks), (Tier.HOST, node.host_block))
            if copies
        ]

    def _root_node(self, root: Root) -> Node:
        node = self.roots.get(root)
        if node is None:
            node = self.roots[root] = Node(root, None, b"", root.block_hash)
        return node

    def _record_loss(self, node: Node, tier: Tier) -> None:
        """Record that the last copy of a node's content in one tier (device or host) is gone. Move the cursors of
        waiting prompts if the content is not cached any more."""
        self._changes.append((node, tier, False))
        if node.num_cursors and not node.is_cached:
            self.cursors.move_back(node)
        self._prune(node)

    def _prune(self, node: Node) -> None:
        """Delete an index node that has no cached copies, children or cursors. Then delete each ancestor for which the
        same is true."""
        while not node.blocks and not node.host_block and not node.children and not node.cursors:
            if node.parent is None:
                del self.roots[node.root]
                return
            del node.parent.children[node.token_bytes]
            node = node.parent


def _with_descendants(nodes: Iterable[Node]) -> list[Node]:
    """Return the given index nodes and all their descendants, parents before their children."""
    found = list(nodes)
    for node in found:
        found.extend(node.children.values())
    return found
