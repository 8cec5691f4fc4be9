"""Radix tree over token ids: which prefixes have keys and values, and in which pool slots.

Follows RadixAttention (arXiv 2312.07104, section 3) at token granularity. The tree owns the slots of
its nodes. A sequence holds a lock on the deepest node it reads; unlocked leaves are evicted, least
recently used first. Time is a counter of operations, so that the same operations evict the same nodes.

:meth:`PrefixCache.detach` forgets every prefix at once (the weights changed): unlocked slots are free
immediately, locked ones when their last reader lets go, and no later request can match them.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    IntArray = npt.NDArray[np.int64]


class SlotAllocator:
    """A stack of free slot numbers, 0 to ``capacity - 1``."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = np.arange(capacity - 1, -1, -1, dtype=np.int64)
        self._count = capacity

    @property
    def free(self) -> int:
        """How many slots nobody holds."""
        return self._count

    def take(self, count: int) -> IntArray:
        """Return ``count`` slots; the caller has checked ``free``."""
        assert count <= self._count, f"{count} slots wanted, {self._count} free"
        self._count -= count
        return self._free[self._count : self._count + count][::-1].copy()

    def give(self, slots: IntArray) -> None:
        """Return slots to the stack."""
        assert self._count + len(slots) <= self.capacity, "a slot was freed twice"
        self._free[self._count : self._count + len(slots)] = slots[::-1]
        self._count += len(slots)


@dataclass(eq=False)
class Node:
    """An edge of the tree: tokens ``ids`` behind ``parent``, their ``slots``, and who reads them."""

    ids: IntArray
    slots: IntArray
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    readers: int = 0
    """Locks on this node or below it."""
    used: int = 0
    detached: bool = False


class PrefixCache:
    """The tree. All lengths are in tokens; ids and slots are int64 arrays of equal length."""

    def __init__(self, slots: SlotAllocator) -> None:
        self._slots = slots
        self._root = self._new_root()
        self._clock = 0
        self.evictable = 0
        """Slots that :meth:`evict` could free now."""

    @staticmethod
    def _new_root() -> Node:
        empty = np.empty(0, dtype=np.int64)
        return Node(ids=empty, slots=empty, parent=None)

    @property
    def root(self) -> Node:
        """The node of the empty prefix."""
        return self._root

    def match(self, ids: IntArray) -> tuple[IntArray, Node]:
        """Return the slots of the longest cached prefix of ``ids``, and its node (split there if need be)."""
        self._clock += 1
        node, parts, offset = self._root, [], 0
        while offset < len(ids):
            child = node.children.get(int(ids[offset]))
            if child is None:
                break
            common = _common_length(child.ids, ids[offset:])
            if common < len(child.ids):
                child = self._split(child, common)
            child.used = self._clock
            parts.append(child.slots)
            offset += common
            node = child
        return (np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)), node

    def extend(self, node: Node, ids: IntArray, slots: IntArray) -> Node | None:
        """Cache ``ids`` right behind ``node``; None, and nothing done, where the tree goes on that way already."""
        first = int(ids[0])
        if first in node.children:
            return None
        self._clock += 1
        leaf = Node(ids=ids.copy(), slots=slots.copy(), parent=node, used=self._clock)
        node.children[first] = leaf
        self.evictable += len(leaf.ids)
        return leaf

    def insert(self, ids: IntArray, slots: IntArray) -> int:
        """Cache ``ids`` in ``slots``; return how many leading tokens were cached before.

        The tree takes the slots behind that length; for those before it, it has its own.
        """
        matched, node = self.match(ids)
        present = len(matched)
        if present < len(ids):
            self.extend(node, ids[present:], slots[present:])
        return present

    def lock(self, node: Node) -> None:
        """Keep ``node`` and everything above it."""
        for above in _path(node):
            if above.readers == 0 and not above.detached:
                self.evictable -= len(above.ids)
            above.readers += 1

    def unlock(self, node: Node) -> None:
        """Undo one :meth:`lock`."""
        for above in _path(node):
            above.readers -= 1
            assert above.readers >= 0, "unlocked more often than locked"
            if above.readers == 0:
                if above.detached:
                    self._slots.give(above.slots)
                else:
                    self.evictable += len(above.ids)

    def evict(self, count: int) -> None:
        """Free at least ``count`` slots of unlocked leaves, least recently used first, or all there are."""
        order = 0
        heap: list[tuple[int, int, Node]] = []
        for node in self._nodes():
            if not node.children and node.readers == 0:
                heap.append((node.used, order, node))
                order += 1
        heapq.heapify(heap)
        freed = 0
        while heap and freed < count:
            _, _, node = heapq.heappop(heap)
            freed += len(node.ids)
            self.evictable -= len(node.ids)
            self._slots.give(node.slots)
            parent = node.parent
            assert parent is not None
            del parent.children[int(node.ids[0])]
            if parent.parent is not None and not parent.children and parent.readers == 0:
                order += 1
                heapq.heappush(heap, (parent.used, order, parent))

    def detach(self) -> None:
        """Forget all prefixes; slots still read are freed when their last reader unlocks them."""
        for node in list(self._nodes()):
            node.detached = True
            if node.readers == 0:
                self._slots.give(node.slots)
        self._root = self._new_root()
        self.evictable = 0

    def _split(self, node: Node, length: int) -> Node:
        """Cut ``node`` after ``length`` tokens; return the new upper half."""
        parent = node.parent
        assert parent is not None
        upper = Node(
            ids=node.ids[:length],
            slots=node.slots[:length],
            parent=parent,
            children={int(node.ids[length]): node},
            readers=node.readers,
            used=node.used,
        )
        parent.children[int(upper.ids[0])] = upper
        node.ids, node.slots, node.parent = node.ids[length:], node.slots[length:], upper
        return upper

    def _nodes(self) -> Iterator[Node]:
        """Yield every node but the root, in insertion order, parents first."""
        stack = list(self._root.children.values())[::-1]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(list(node.children.values())[::-1])


def _path(node: Node) -> Iterator[Node]:
    """Yield ``node`` and its ancestors without the root."""
    current: Node | None = node
    while current is not None and current.parent is not None:
        yield current
        current = current.parent


def _common_length(left: IntArray, right: IntArray) -> int:
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length
