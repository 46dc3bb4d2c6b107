"""The prefix index: finds cached full blocks by their tokens, with an exact comparison.

A node represents one full block of tokens after a given prefix. It is identified by its parent and its token bytes. In
each layer group it has one content: the K and V of the group's layers. A content has any number of copies on the device
and at most one copy on the host. A node exists while it or a descendant has a copy. A child is looked up in its parent
by all its token bytes. So a hash collision can never return a wrong block. The chained xxh3_64 hash is only the block's
public name, for events and routing.

The groups with the longest reach are the *spine*: a cached prefix ends at the first node that lacks one of their
contents. Of every other group, a sequence that starts with a prefix needs the last window only. So a prefix is usable
where the spine has everything and every other group has its last window. The contents of a node are evicted
independently.

If the model has states besides K and V, a node may have one more content: the state after the last token of its block.
A sequence that starts after the node reads this state. So it counts as the content of one more group, whose window is
the last block, but whose contents exist at some nodes only.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import ClassVar, NamedTuple

import xxhash

from scheduler_service.core.request import BlockRemoved, BlockStored, KvEvent, KvEventCounts, Tier


class Root(NamedTuple):
    """The part of a cached KV block's identity that is not its tokens: the tenant, the cache salt and the model. A
    request can only use cached blocks with the same root."""

    digest: bytes
    block_hash: int  # the public hash of the empty prefix: the hashes of first blocks are chained to it


def content_root(tenant: str, cache_salt: str, model_digest: bytes) -> Root:
    """Return the root of the prefix index tree for a tenant, a cache salt and a model. Blocks under different roots are
    never mixed up.

    The root contains everything that can make the K and V of equal tokens differ, and the tenant that owns the blocks.
    It need not describe how the worker computes, because a prefix index never outlives its worker.
    """
    named = repr((tenant, cache_salt, model_digest)).encode()
    return Root(sha256(named).digest(), xxhash.xxh3_64_intdigest(named))


def _token_bytes(token_ids: Sequence[int], block_index: int, block_size: int) -> bytes:
    start = block_index * block_size
    return array("I", token_ids[start : start + block_size]).tobytes()


# A sequence that starts after a node needs the node's own state alone. No layer group has this window.
_STATE_WINDOW = -1


class Windows(NamedTuple):
    """The sliding windows of a model's layer groups in tokens, and the number of tokens in a block. A window of 0
    means that the group attends to all preceding positions. The longest reach comes first."""

    of_groups: tuple[int, ...]  # with states, they are the last group
    block_size: int

    def with_states(self) -> Windows:
        """Return the windows of the contents of a node, if the model has states."""
        return self._replace(of_groups=(*self.of_groups, _STATE_WINDOW))

    @property
    def num_spine(self) -> int:
        """Return the number of layer groups with the longest reach, which are the first groups."""
        return self.of_groups.count(self.of_groups[0])

    def num_passed(self, group: int, num_blocks: int) -> int:
        """Return how many of the first `num_blocks` blocks of a prefix a sequence that starts after them need not have
        in a layer group, because the group's window has passed them.

        The last block is always needed, because the next block is added to the prefix index after it.
        """
        window = self.of_groups[group]
        first = (num_blocks * self.block_size - window + 1) // self.block_size if window else 0
        return max(0, min(first, num_blocks - 1))

    def reads(self, group: int, block: int, ends: Iterable[int]) -> bool:
        """Return whether a sequence that starts after one of the given numbers of blocks reads a block in a layer
        group. Blocks are counted from 0."""
        return any(self.num_passed(group, end) <= block < end for end in ends)

    def num_usable(self, nodes: Sequence[Node], *, on_device: bool = False) -> int:
        """Return the length of the longest prefix of `nodes` with which a sequence can start. The spine must have all
        of its contents of these nodes. With `on_device`, only contents on the device count."""
        num_usable = len(nodes)
        while True:
            ends = [
                self._end_before_gap(nodes, num_usable, group, on_device)
                for group in range(self.num_spine, len(self.of_groups))
            ]
            shortest = min(ends, default=num_usable)
            if shortest == num_usable:
                return num_usable
            num_usable = shortest  # every longer prefix has the gap within its last window, too

    def _end_before_gap(self, nodes: Sequence[Node], num_blocks: int, group: int, on_device: bool) -> int:
        """Return `num_blocks` if no node of the group's window before this number of nodes lacks the group's content.
        Otherwise return the index of the first of the adjacent nodes that lack it, with which the window ends."""
        first = self.num_passed(group, num_blocks)
        for i in range(num_blocks - 1, first - 1, -1):
            if _is_missing(nodes[i].content(group), on_device):
                while i and _is_missing(nodes[i - 1].content(group), on_device):
                    i -= 1
                return i
        return num_blocks


@dataclass(slots=True, eq=False, repr=False)
class Cursor:
    """A waiting prompt's position in the prefix index: the node of the last block of its cached prefix.

    The prefix index moves the cursor when blocks are added to the cache or lost from it. So the scheduler always knows
    how many blocks of the prompt are not cached, without searching the index again.
    """

    node: Node  # of the last cached block; the root if none is cached
    token_ids: Sequence[int]
    windows: Windows
    max_blocks: int
    num_blocks: int = 0  # blocks of the spine that are cached, in either tier
    _num_usable: int = -1  # of these; -1: a content of a layer group with a window has come or gone since

    @property
    def block_size(self) -> int:
        return self.windows.block_size

    @property
    def num_usable_blocks(self) -> int:
        """Return the number of full blocks with which the prompt could start now, if what is on the host were
        loaded."""
        if self._num_usable < 0:
            is_whole = len(self.windows.of_groups) == self.windows.num_spine
            self._num_usable = self.num_blocks if is_whole else self.windows.num_usable(self.chain())
        return self._num_usable

    @property
    def num_missing_blocks(self) -> int:
        """Return the number of full blocks of the waiting prompt that would have to be computed."""
        return self.max_blocks - self.num_usable_blocks

    @property
    def awaits_load(self) -> bool:
        """Return whether the last block with which the prompt could start is only on the host, in any layer group."""
        num_usable = self.num_usable_blocks
        return num_usable > 0 and not all(content.blocks for content in self.chain()[num_usable - 1].contents)

    def is_changed_by(self, content: BlockContent, depth: int, *, is_gain: bool) -> bool:
        """Record that a content of a layer group with a window was cached or lost at the cursor's node or above it, in
        block number `depth` of the prompt. Return whether the number of usable blocks may have changed."""
        known = self._num_usable
        is_changed = known < self.num_blocks
        if not is_gain:
            is_changed = self.windows.num_passed(content.group, known) < depth <= known
        if is_changed:
            self._num_usable = -1
        return is_changed

    @property
    def next_bytes(self) -> bytes:
        """Return the token ids, as bytes, of the prompt's first full block that is not cached. Return empty bytes if
        all full blocks are cached."""
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
        """Move the cursor forward in the prefix index to the node of the last cached block of its prompt, and register
        the cursor at that node.

        The cursor must not be registered at a node when this method is called.
        """
        node, next_bytes = self.node, self.next_bytes
        self._num_usable = -1
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
        """Remove the cursor (a waiting prompt's position in the prefix index) from the node at which it is
        registered."""
        standing = self.node.cursors
        assert standing is not None
        next_bytes = self.next_bytes
        del standing[next_bytes][self]
        if not standing[next_bytes]:
            del standing[next_bytes]


@dataclass(slots=True, eq=False, repr=False)
class LaterContent:
    """The content of a node of the prefix index in a layer group other than the first: the K and V of the group's
    layers, and the blocks on the device and on the host that contain a copy. Or, the state after the node's last token,
    and the device state and host state that contain a copy."""

    node: Node
    group: int
    is_spine: bool
    is_state: bool = False
    blocks: tuple[int, ...] = ()  # a tuple of integers, which the garbage collector does not track
    host_block: int = 0  # 0: no copy on the host
    is_moving: bool = False  # a demotion or promotion of this content is in progress

    @property
    def is_cached(self) -> bool:
        """Return whether a block on the device or on the host contains a copy of this content."""
        return bool(self.blocks or self.host_block)


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """A node of the prefix index: one full block of tokens that follows a given prefix. It is also the content of this
    block in the first layer group; `later` has the contents in the others."""

    root: Root
    parent: Node | None
    token_bytes: bytes
    blocks: tuple[int, ...] = ()  # a tuple of integers, which the garbage collector does not track
    host_block: int = 0  # 0: no copy on the host
    is_moving: bool = False  # a demotion or promotion of this content is in progress
    later: tuple[LaterContent, ...] = ()
    children: dict[bytes, Node] = field(default_factory=dict)
    # The cursors attached to this node, by the token bytes of their next block. None: no cursor was ever attached.
    cursors: dict[bytes, dict[Cursor, None]] | None = None
    num_cursors: int = 0  # on this node and its descendants; not counted for a root
    _block_hash: int | None = None
    group: ClassVar[int] = 0
    is_spine: ClassVar[bool] = True
    is_state: ClassVar[bool] = False

    @property
    def node(self) -> Node:
        """Return the node itself, which is the node of its content in the first layer group."""
        return self

    @property
    def contents(self) -> tuple[BlockContent, ...]:
        """Return the content of the node in each layer group."""
        return (self, *self.later)

    def content(self, group: int) -> BlockContent:
        """Return the content of the node in a layer group."""
        return self.later[group - 1] if group else self

    @property
    def is_spine_on_device(self) -> bool:
        """Return whether the spine has its contents on the device."""
        return bool(self.blocks) and not any(content.is_spine and not content.blocks for content in self.later)

    @property
    def is_cached(self) -> bool:
        """Return whether a cached prefix can go on with this node: the spine has its contents, on the device or on the
        host."""
        if not (self.blocks or self.host_block):
            return False
        return not self.later or all(content.is_cached for content in self.later if content.is_spine)

    @property
    def depth(self) -> int:
        """Return the number of blocks from the root up to and including this one."""
        depth, node = 0, self
        while node.parent is not None:
            depth, node = depth + 1, node.parent
        return depth

    @property
    def block_hash(self) -> int:
        """Return the public name of the block. It is computed when it is first needed, because only cache events
        contain it."""
        nodes, node = [], self
        while node._block_hash is None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        block_hash = node.root.block_hash if node._block_hash is None else node._block_hash
        for node in reversed(nodes):
            block_hash = xxhash.xxh3_64_intdigest(block_hash.to_bytes(8, "little") + node.token_bytes)
            node._block_hash = block_hash
        return block_hash

    def standing(self) -> list[Cursor]:
        """Return the cursors that stand at this node."""
        return [cursor for standing in (self.cursors or {}).values() for cursor in standing]

    def is_whole(self, tier: Tier) -> bool:
        """Return whether every layer group has its content in the given tier (device or host)."""
        later = self.later
        if tier is Tier.DEVICE:
            return bool(self.blocks) and (not later or all(each.blocks or each.is_state for each in later))
        return bool(self.host_block) and (not later or all(each.host_block or each.is_state for each in later))

    def stored(self, tier: Tier) -> BlockStored:
        """Return a cache event for subscribers, which says that prompts can now match this block in the given tier
        (device or host)."""
        assert self.parent is not None
        return BlockStored(
            self.block_hash,
            self.parent.block_hash,
            tuple(array("I", self.token_bytes)),
            tier,
            is_first=self.parent.parent is None,
            root=self.root.digest,
        )


BlockContent = Node | LaterContent


def _is_missing(content: BlockContent, on_device: bool) -> bool:
    return not (content.blocks or (content.host_block and not on_device))


class Cursors:
    """The cursors of a prefix index. Each cursor marks the end of the cached prefix of one waiting prompt.

    The cursors move when a block's content gets its first cached copy or loses its last copy.
    """

    def __init__(self) -> None:
        self.number = 0
        self._moved: dict[Cursor, None] = {}

    def add(self, cursor: Cursor) -> None:
        """Add a new cursor for a waiting prompt. The cursor starts at the root of its tree, and this method moves it to
        the last cached block of the prompt."""
        self.number += 1
        cursor.advance()

    def remove(self, cursor: Cursor) -> None:
        """Remove a cursor from the prefix index, for example when its prompt starts to run."""
        self.number -= 1
        self._moved.pop(cursor, None)
        cursor.detach()
        for node in cursor.chain():
            node.num_cursors -= 1

    def take_moved(self) -> list[Cursor]:
        """Return the cursors that may have moved since the last call. A cursor is a waiting prompt's position in the
        prefix index."""
        moved, self._moved = self._moved, {}
        return list(moved)

    def changed(self, content: BlockContent, *, is_gain: bool) -> None:
        """Record that a content of a layer group with a window was cached (`is_gain`) or lost, for the waiting prompts
        whose cached prefix contains its node."""
        if not content.node.num_cursors:
            return
        nodes, depth = [content.node], content.node.depth
        for visited in nodes:
            nodes.extend(child for child in visited.children.values() if child.num_cursors)
            for cursor in visited.standing():
                if cursor.is_changed_by(content, depth, is_gain=is_gain):
                    self._moved[cursor] = None

    def advance_waiting(self, node: Node) -> None:
        """Advance the cursors of the waiting prompts whose next block is the content of `node`. Call this when the
        content has just been cached."""
        waiting = node.parent.cursors if node.parent is not None else None
        for cursor in list((waiting or {}).get(node.token_bytes, ())):
            cursor.detach()
            cursor.advance()
            self._moved[cursor] = None

    def move_back(self, node: Node) -> None:
        """Move the cursors at `node` or below it back to the parent of `node`, because the content of `node` is no
        longer cached."""
        assert node.parent is not None
        nodes = [node]
        for visited in nodes:
            nodes.extend(child for child in visited.children.values() if child.num_cursors)
            for cursor in visited.standing():
                cursor.detach()
                while cursor.node is not node.parent:
                    assert cursor.node.parent is not None
                    cursor.node.num_cursors -= 1
                    cursor.node = cursor.node.parent
                    cursor.num_blocks -= 1
                cursor.advance()
                self._moved[cursor] = None


class PrefixIndex:
    """The prefix cache index of one worker. It finds the KV cache blocks, on the device and on the host, that contain
    the first tokens of a prompt.

    The index is a set of trees. Each node except the roots is the content of one full block.
    """

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        num_host_blocks: int = 0,
        windows: tuple[int, ...] = (0,),
        *,
        has_states: bool = False,
    ) -> None:
        """Create an empty index. `windows` are the sliding windows of the layer groups, see `Windows`. With
        `has_states`, the numbers of states follow those of the blocks, and are included in `num_blocks` and
        `num_host_blocks`."""
        self._block_size = block_size
        self.windows = Windows(windows, block_size)
        self._num_tables, self._num_spine = len(windows), self.windows.num_spine
        if has_states:
            self.windows = self.windows.with_states()
        self._later = range(1, len(self.windows.of_groups))
        self.roots: dict[Root, Node] = {}
        self.contents: list[BlockContent | None] = [None] * (num_blocks + 1)  # by device block
        self.host_contents: list[BlockContent | None] = [None] * (num_host_blocks + 1)
        self.num_cached_blocks = 0
        self.num_cached_host_blocks = 0
        self._changes: list[tuple[Node, Tier, bool]] = []  # content that was stored (True) or removed since take_events
        self.cursors = Cursors()

    def match(self, root: Root, token_ids: Sequence[int], max_blocks: int) -> list[Node]:
        """Find the longest cached prefix of `token_ids`, and return its index nodes, one per full block.

        Each content of the spine is cached on the device, on the host, or on both. The result has at most `max_blocks`
        nodes.
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
        """Create a cursor for a waiting prompt, and return the cursor. From now on, the index keeps the cursor at the
        end of the prompt's cached prefix.

        The prefix may be cached on the device or on the host. It has at most `max_blocks` full blocks of `token_ids`.
        """
        cursor = Cursor(self._root_node(root), token_ids, self.windows, max_blocks)
        self.cursors.add(cursor)
        return cursor

    def unfollow(self, cursor: Cursor) -> None:
        """Stop tracking the cached prefix of a prompt: remove its cursor, and delete index nodes that are no longer
        needed. Call this when the prompt stops waiting."""
        self.cursors.remove(cursor)
        self._prune(cursor.node)

    # Copies

    def find(
        self, root: Root, token_ids: Sequence[int], block_index: int, known: Node | None = None, num_known: int = 0
    ) -> Node | None:
        """Return the index node for block number `block_index` of `token_ids`, or None if the index has no such node.
        The content of the node is not necessarily cached. `known` is the node of the first `num_known` blocks, if it
        is not None."""
        node = known or self.roots.get(root)
        for i in range(num_known, block_index + 1):
            node = node.children.get(_token_bytes(token_ids, i, self._block_size)) if node else None
        return node

    def extend(self, root: Root, parent: Node | None, token_ids: Sequence[int], block_index: int) -> Node:
        """Return the index node for block number `block_index` of `token_ids`. If it does not exist, it is created
        without copies, and the caller must add one.

        `parent` is the node of the preceding block, or None for the first block.
        """
        if parent is None:
            parent = self._root_node(root)
        token_bytes = _token_bytes(token_ids, block_index, self._block_size)
        node = parent.children.get(token_bytes)
        if node is None:
            node = parent.children[token_bytes] = Node(root, parent, token_bytes)
            if self._later:
                node.later = tuple(
                    LaterContent(node, group, group < self._num_spine, group >= self._num_tables)
                    for group in self._later
                )
        return node

    def add_copy(self, content: BlockContent, block: int) -> None:
        """Record that the device block `block` contains a copy of a content, so that other sequences can use it. Raises
        RuntimeError if the index already has content for `block`."""
        if self.contents[block] is not None:
            raise RuntimeError(f"block {block} is published already")
        self.contents[block] = content
        self.num_cached_blocks += 1
        content.blocks += (block,)
        if len(content.blocks) == 1:
            self._record_gain(content, Tier.DEVICE, content.host_block > 0)

    def add_host_copy(self, content: BlockContent, host_block: int) -> None:
        """Record that the host block `host_block` contains a copy of a content. The content must have no copy on the
        host yet."""
        assert not content.host_block
        assert self.host_contents[host_block] is None
        content.host_block = host_block
        self.host_contents[host_block] = content
        self.num_cached_host_blocks += 1
        self._record_gain(content, Tier.HOST, bool(content.blocks))

    def forget(self, block: int) -> None:
        """Remove a device block from the index, for example because the block is about to be overwritten. Does nothing
        if the index has no content for this block."""
        content = self.contents[block]
        if content is None:
            return
        self.contents[block] = None
        self.num_cached_blocks -= 1
        if len(content.blocks) == 1:
            self._record_loss(content, Tier.DEVICE)
        else:
            content.blocks = tuple(copy for copy in content.blocks if copy != block)

    def forget_host(self, host_block: int) -> None:
        """Remove a host block from the index, for example because the block is about to be overwritten. Does nothing if
        the index has no content for this block."""
        content = self.host_contents[host_block]
        if content is None:
            return
        self.host_contents[host_block] = None
        self.num_cached_host_blocks -= 1
        self._record_loss(content, Tier.HOST)

    def forget_subtree(self, node: Node) -> tuple[list[int], list[int]]:
        """Remove all cached copies of a node's contents from the index, and all copies of the blocks that continue this
        node.

        Return the removed blocks as two lists: the device blocks and the host blocks.
        """
        contents = [content for visited in _with_descendants([node]) for content in visited.contents]
        blocks = [block for content in contents for block in content.blocks]
        host_blocks = [content.host_block for content in contents if content.host_block]
        for block in reversed(blocks):  # leaves first, so that a cursor moves one node at a time
            self.forget(block)
        for host_block in reversed(host_blocks):
            self.forget_host(host_block)
        return blocks, host_blocks

    def dissolve(self) -> None:
        """Break the reference cycles of a prefix index whose worker is lost, so that Python frees its memory without a
        run of the garbage collector.

        The cycles are between parent and child nodes, and between nodes and cursors.
        """
        for node in self.nodes():
            node.children.clear()
            node.cursors, node.later = None, ()
        self.roots.clear()

    def take_events(self) -> list[KvEvent]:
        """Return the cache events since the last call, in order. Each event says that a tier (device or host) has got
        the first copy of a block's content or lost the last copy."""
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
        """Return a `BlockStored` event for all content that is cached now, so that a new subscriber learns the present
        state. The event of a block comes after the event of its parent block."""
        return [node.stored(tier) for node in self.nodes() for tier in Tier if node.is_whole(tier)]

    def _root_node(self, root: Root) -> Node:
        node = self.roots.get(root)
        if node is None:
            node = self.roots[root] = Node(root, None, b"")
        return node

    def _record_gain(self, content: BlockContent, tier: Tier, is_cached_elsewhere: bool) -> None:
        """Record that one tier (device or host) has got its first copy of a content. If the other tier has none, move
        the cursors of the waiting prompts."""
        node = content.node
        if not node.later or (not content.is_state and node.is_whole(tier)):
            self._changes.append((node, tier, True))
        if not self.cursors.number or is_cached_elsewhere:
            return
        if not content.is_spine:
            self.cursors.changed(content, is_gain=True)
        elif node.is_cached:
            self.cursors.advance_waiting(node)

    def _record_loss(self, content: BlockContent, tier: Tier) -> None:
        """Remove the last copy of a content in one tier (device or host). If the other tier has no copy either, move
        the cursors of the waiting prompts."""
        node = content.node
        if not content.is_state and node.is_whole(tier):
            self._changes.append((node, tier, False))
        if tier is Tier.DEVICE:
            content.blocks = ()
        else:
            content.host_block = 0
        if node.num_cursors and not (content.blocks or content.host_block):
            if content.is_spine:
                self.cursors.move_back(node)
            else:
                self.cursors.changed(content, is_gain=False)
        self._prune(node)

    def _prune(self, node: Node) -> None:
        """Delete an index node if it has no cached copies, no children and no cursors. Then check its parent in the
        same way, and so on up to the root."""
        while not (node.blocks or node.host_block or node.children or node.cursors):
            if node.later and any(content.is_cached for content in node.later):
                return
            if node.parent is None:
                del self.roots[node.root]
                return
            del node.parent.children[node.token_bytes]
            node.later = ()  # they refer to the node
            node = node.parent


def _with_descendants(nodes: Iterable[Node]) -> list[Node]:
    """Return the given index nodes and all their descendants, parents before their children."""
    found = list(nodes)
    for node in found:
        found.extend(node.children.values())
    return found
