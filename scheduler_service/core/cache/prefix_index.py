"""Which full blocks of which content the cache holds, in which tier, found by exact comparison.

A node is content: its parent and its token bytes. It has any number of device copies and at most one host copy, and
lives while it or a descendant has one. A child is looked up under its parent by all its token bytes, so no hash
collision can serve a wrong block. The chained xxh3_64 is only the block's public name, for events and routing.
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
    """The part of a content's identity beside its tokens: equal tokens under another root are another content."""

    digest: bytes
    block_hash: int  # the public name of no tokens at all: the hashes of first blocks are chained to it


def content_root(tenant: str, cache_salt: str, model_digest: bytes) -> Root:
    """Name what makes the K and V of equal tokens differ, and whose they are. How a worker computes is no part of it,
    since no index outlives its worker."""
    named = repr((tenant, cache_salt, model_digest)).encode()
    return Root(sha256(named).digest(), xxhash.xxh3_64_intdigest(named))


def _token_bytes(token_ids: Sequence[int], block_index: int, block_size: int) -> bytes:
    start = block_index * block_size
    return array("I", token_ids[start : start + block_size]).tobytes()


@dataclass(slots=True, eq=False, repr=False)
class Cursor:
    """The place of a waiting prompt in the index: behind the blocks that it begins with and that are cached.

    It moves with what is published and forgotten, so the prompt need not be matched again to know what is left of it.
    """

    node: Node  # of the last block that is cached; to begin with the root
    token_ids: Sequence[int]
    block_size: int
    max_blocks: int
    num_blocks: int = 0  # that are cached, in either tier

    @property
    def num_missing_blocks(self) -> int:
        """Count the full blocks of the prompt that are not cached."""
        return self.max_blocks - self.num_blocks

    @property
    def next_bytes(self) -> bytes:
        """The tokens of the first block that is not cached; empty if all of them are."""
        is_whole = self.num_blocks == self.max_blocks
        return b"" if is_whole else _token_bytes(self.token_ids, self.num_blocks, self.block_size)

    def chain(self) -> list[Node]:
        """The nodes of the cached blocks, first ones first."""
        nodes = []
        node = self.node
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def advance(self) -> None:
        """Move the cursor, which no node has, from its node on to the last cached block of its prompt."""
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

    def lift(self) -> None:
        """Take the cursor from its node."""
        standing = self.node.cursors
        assert standing is not None
        next_bytes = self.next_bytes
        del standing[next_bytes][self]
        if not standing[next_bytes]:
            del standing[next_bytes]


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """One block's worth of content after a given prefix."""

    root: Root
    parent: Node | None
    token_bytes: bytes
    block_hash: int
    blocks: tuple[int, ...] = ()  # of numbers alone: the garbage collector need not look at it
    host_block: int = 0  # 0: none
    is_moving: bool = False  # a demotion or promotion of this content is under way
    children: dict[bytes, Node] = field(default_factory=dict)
    # The cursors that stand here, by the tokens that they would go on with. None: there never were any.
    cursors: dict[bytes, dict[Cursor, None]] | None = None
    num_cursors: int = 0  # here and on what follows it; a root's are not counted

    @property
    def is_cached(self) -> bool:
        """Whether either tier has a copy."""
        return bool(self.blocks or self.host_block)

    def stored(self, tier: Tier) -> BlockStored:
        """Say that a tier has a copy."""
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
    """The cursors of an index, which move as nodes get their first copy and lose their last one."""

    def __init__(self) -> None:
        self.number = 0
        self._moved: dict[Cursor, None] = {}

    def add(self, cursor: Cursor) -> None:
        """Keep a cursor, which begins at its root."""
        self.number += 1
        cursor.advance()

    def remove(self, cursor: Cursor) -> None:
        """Keep a cursor no longer."""
        self.number -= 1
        self._moved.pop(cursor, None)
        cursor.lift()
        for node in cursor.chain():
            node.num_cursors -= 1

    def take_moved(self) -> list[Cursor]:
        """Return the cursors that may have moved since the last call."""
        moved, self._moved = self._moved, {}
        return list(moved)

    def draw(self, node: Node) -> None:
        """A node has got its first copy: cursors that wait for its content go on."""
        waiting = node.parent.cursors if node.parent is not None else None
        for cursor in list((waiting or {}).get(node.token_bytes, ())):
            cursor.lift()
            cursor.advance()
            self._moved[cursor] = None

    def repel(self, node: Node) -> None:
        """A node has lost its last copy: cursors on it, and on what follows it, stand before it."""
        assert node.parent is not None
        nodes = [node]
        for visited in nodes:
            nodes.extend(child for child in visited.children.values() if child.num_cursors)
            for cursor in [cursor for standing in (visited.cursors or {}).values() for cursor in standing]:
                cursor.lift()
                while cursor.node is not node.parent:
                    assert cursor.node.parent is not None
                    cursor.node.num_cursors -= 1
                    cursor.node = cursor.node.parent
                    cursor.num_blocks -= 1
                cursor.advance()
                self._moved[cursor] = None


class PrefixIndex:
    """All content of one worker's cache, as trees of nodes under their roots."""

    def __init__(self, block_size: int, num_blocks: int, num_host_blocks: int = 0) -> None:
        self._block_size = block_size
        self.roots: dict[Root, Node] = {}
        self.contents: list[Node | None] = [None] * (num_blocks + 1)  # by device block
        self.host_contents: list[Node | None] = [None] * (num_host_blocks + 1)
        self.num_cached_blocks = 0
        self.num_cached_host_blocks = 0
        self._changes: list[tuple[Node, Tier, bool]] = []  # what was stored (True) or removed, since take_events
        self.cursors = Cursors()

    def match(self, root: Root, token_ids: Sequence[int], max_blocks: int) -> list[Node]:
        """The longest chain of cached nodes, in either tier, that `token_ids` begin with, at most `max_blocks` long."""
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
        """Keep a cursor at the end of the longest chain of cached nodes, in either tier, that `token_ids` begin with,
        at most `max_blocks` long."""
        cursor = Cursor(self._root_node(root), token_ids, self._block_size, max_blocks)
        self.cursors.add(cursor)
        return cursor

    def unfollow(self, cursor: Cursor) -> None:
        """The cursor is needed no more."""
        self.cursors.remove(cursor)
        self._prune(cursor.node)

    # Copies

    def find(self, root: Root, token_ids: Sequence[int], block_index: int) -> Node | None:
        """The node of a block of `token_ids`, cached or not, if there is one."""
        node = self.roots.get(root)
        for i in range(block_index + 1):
            node = node.children.get(_token_bytes(token_ids, i, self._block_size)) if node else None
        return node

    def publish(self, root: Root, parent: Node | None, token_ids: Sequence[int], block_index: int, block: int) -> Node:
        """`block` holds block `block_index` of `token_ids`; `parent` is the node of the block before, None for the
        first. Returns the block's node."""
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
        """Device block `block` holds the node's content too."""
        if self.contents[block] is not None:
            raise RuntimeError(f"block {block} is published already")
        is_first = not node.blocks
        node.blocks += (block,)
        self.contents[block] = node
        self.num_cached_blocks += 1
        if is_first:
            self._changes.append((node, Tier.DEVICE, True))
            if self.cursors.number and not node.host_block:
                self.cursors.draw(node)

    def add_host_copy(self, node: Node, host_block: int) -> None:
        """Host block `host_block` holds the node's content too."""
        assert not node.host_block
        assert self.host_contents[host_block] is None
        node.host_block = host_block
        self.host_contents[host_block] = node
        self.num_cached_host_blocks += 1
        self._changes.append((node, Tier.HOST, True))
        if not node.blocks:
            self.cursors.draw(node)

    def forget(self, block: int) -> None:
        """`block` no longer holds what it was published for. Nothing happens if it was not published."""
        node = self.contents[block]
        if node is None:
            return
        self.contents[block] = None
        self.num_cached_blocks -= 1
        node.blocks = tuple(copy for copy in node.blocks if copy != block)
        if not node.blocks:
            self._lose(node, Tier.DEVICE)

    def forget_host(self, host_block: int) -> None:
        """`host_block` no longer holds a content's copy. Nothing happens if it held none."""
        node = self.host_contents[host_block]
        if node is None:
            return
        self.host_contents[host_block] = None
        self.num_cached_host_blocks -= 1
        node.host_block = 0
        self._lose(node, Tier.HOST)

    def forget_subtree(self, node: Node) -> tuple[list[int], list[int]]:
        """Forget every copy of this content and of all that follows it; the device and host blocks they were in."""
        nodes = _with_descendants([node])
        blocks = [block for visited in nodes for block in visited.blocks]
        host_blocks = [visited.host_block for visited in nodes if visited.host_block]
        for block in reversed(blocks):  # leaves first, so that a cursor moves a step at a time
            self.forget(block)
        for host_block in reversed(host_blocks):
            self.forget_host(host_block)
        return blocks, host_blocks

    def dissolve(self) -> None:
        """The index is needed no more, nor are cursors. Parents and children no longer hold each other, nor nodes and
        cursors, so that all are freed without a garbage collection."""
        for node in self.nodes():
            node.children.clear()
            node.cursors = None
        self.roots.clear()

    def take_events(self) -> list[KvEvent]:
        """Say what can be matched now and could not at the last call, and the other way round, in order."""
        changes, self._changes = self._changes, []
        return [
            node.stored(tier) if is_stored else BlockRemoved(node.block_hash, tier, node.root.digest)
            for node, tier, is_stored in changes
        ]

    def drop_events(self) -> KvEventCounts:
        """Forget what `take_events` would say, and return how many events these were."""
        changes, self._changes = self._changes, []
        return Counter(BlockStored if is_stored else BlockRemoved for _, _, is_stored in changes)

    def nodes(self) -> list[Node]:
        """Every node, parents before children, roots included."""
        return _with_descendants(self.roots.values())

    def snapshot(self) -> list[BlockStored]:
        """Say what is cached to a new subscriber, parents first."""
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

    def _lose(self, node: Node, tier: Tier) -> None:
        """A node has lost its last copy in a tier."""
        self._changes.append((node, tier, False))
        if node.num_cursors and not node.is_cached:
            self.cursors.repel(node)
        self._prune(node)

    def _prune(self, node: Node) -> None:
        """Drop a node without copies, children and cursors, and its ancestors that only lived for it."""
        while not node.blocks and not node.host_block and not node.children and not node.cursors:
            if node.parent is None:
                del self.roots[node.root]
                return
            del node.parent.children[node.token_bytes]
            node = node.parent


def _with_descendants(nodes: Iterable[Node]) -> list[Node]:
    """The nodes and all that follows them, parents before children."""
    found = list(nodes)
    for node in found:
        found.extend(node.children.values())
    return found
