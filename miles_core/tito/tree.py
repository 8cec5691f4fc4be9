"""The session tree: what was sampled, by what was said. Pure data, no tokenizer, no clock, no I/O.

A node is a finished turn. It holds what the turn added: the token ids (unsampled prompt part first, sampled part behind
it), log-probs and version spans of the sampled part, and the messages with their digests. A path from a root to a node
is one contiguous sequence of tokens. Nothing here changes before `commit`: a turn that fails leaves no trace.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from miles_core.errors import MilesError

if TYPE_CHECKING:
    from miles_core.contracts.engines import Generation

__all__ = ["Added", "Mode", "Node", "Part", "Plan", "SessionTree", "TurnConflictError", "TurnRefusedError"]

Mode = Literal["linear", "branching"]
Digests = tuple[bytes, ...]


class TurnConflictError(MilesError):
    """The turn contradicts what the session holds, or another turn that is under way (HTTP 409)."""


class TurnRefusedError(MilesError):
    """The session has no room for the turn (HTTP 400)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One engine generation of a turn: `count` sampled tokens. A turn has more than one when the engine aborted it and
    it was taken up again."""

    count: int
    finish_reason: str
    engine: str
    cached_tokens: int
    started: float
    finished: float
    request_id: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Added:
    """What a finished turn adds to its parent's path.

    `drop` of the parent's last ids are not on this path. `ids` int32 [n]: from `sampled` on they were sampled, with
    `logprobs` float32 [n − sampled] and `versions` ((version, count), …). `routes` int [rows, layers, k] are those that
    the parent's path lacks. `messages` is the JSON of the messages: what the request added, then the reply.
    `turn_id` is what the client knows the turn by.
    """

    turn_id: str
    drop: int
    ids: NDArray[np.int32]
    sampled: int
    logprobs: NDArray[np.float32]
    versions: tuple[tuple[int, int], ...]
    finish_reason: str
    parts: tuple[Part, ...]
    messages: bytes
    routes: NDArray[np.int32] | None = None


class Node:
    """A finished turn, or a root (`added` None): one root for each set of tools that a session was asked with.

    A node holds its children, and its tree holds the roots: when that goes, all goes at once, uncollected.
    """

    __slots__ = (
        "__weakref__",
        "_parent",
        "added",
        "attempts",
        "children",
        "depth",
        "digests",
        "length",
        "order",
        "pending",
        "turns",
    )

    def __init__(self, parent: Node | None, digests: Digests, added: Added | None, order: int) -> None:
        self._parent = None if parent is None else weakref.ref(parent)
        self.digests = digests
        self.added = added
        self.order = order
        self.children: tuple[Node, ...] = ()
        self.depth: int = len(digests) + (0 if parent is None else parent.depth)
        self.length: int = 0 if parent is None or added is None else parent.length - added.drop + len(added.ids)
        self.turns: int = 0 if parent is None else parent.turns + 1
        """Turns up to this one."""
        self.attempts = 0
        """Turns that were ever committed behind this node."""
        self.pending = 0
        """Turns behind this node that are under way."""

    @property
    def parent(self) -> Node | None:
        """The turn before; None for a root."""
        if self._parent is None:
            return None
        found = self._parent()
        assert found is not None, "a node is read while its tree is there"
        return found

    def path(self) -> list[Node]:
        """The turns from the first to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.added is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def ids(self, drop: int = 0) -> NDArray[np.int32]:
        """Token ids of the path up to here, without the last `drop`. int32 [length − drop]."""
        pieces: list[NDArray[np.int32]] = []
        node: Node | None = self
        while node is not None and (added := node.added) is not None:
            pieces.append(added.ids[: len(added.ids) - drop] if drop else added.ids)
            drop, node = added.drop, node.parent
        pieces.reverse()
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int32)


@dataclasses.dataclass(eq=False, slots=True)
class Plan:
    """Where a turn attaches: `parent` is the deepest node that the request repeats, `digests` the request's messages
    behind it, `attempt` tells the turns behind one parent apart. A plan is committed once, or released."""

    parent: Node
    digests: Digests
    attempt: int
    replaces: Node | None = None
    open: bool = True


class SessionTree:
    """All finished turns of one session.

    `linear` allows one leaf: a turn attaches to it, or sends its messages again and replaces it. `branching` attaches
    anywhere. `max_nodes` and `max_tokens` (sum over nodes of what they added) bound what a session may hold.
    """

    def __init__(self, *, mode: Mode = "branching", max_nodes: int = 4096, max_tokens: int = 1 << 24) -> None:
        self.mode = mode
        self.max_nodes = max_nodes
        self.max_tokens = max_tokens
        self.nodes = 0
        self.tokens = 0
        self._roots: dict[bytes, Node] = {}
        self.tools: dict[bytes, bytes] = {}
        """JSON of the tools that the identity of a root stands for, where there are any."""
        self._created = 0
        self._leaf: Node | None = None
        self._open: set[Plan] = set()

    # Matching.

    def match(self, identity: bytes, digests: Digests, *, known: Node | None = None) -> Node | None:
        """The deepest node whose path repeats the first messages of a request, the newest of equals; None for a root
        that there is not. Costs one comparison a node of the path, and one a sibling.

        `known` is a node whose messages up to its reply the caller knows to be repeated. Where nothing branches,
        nothing before it is compared.
        """
        best = self._roots.get(identity)
        if best is None:
            return None
        if known is not None and known.parent is not None and known.turns == self.nodes and len(self._roots) == 1:
            best = known.parent
        waiting = [best]
        while waiting:
            node = waiting.pop()
            if (node.depth, node.order) > (best.depth, best.order):
                best = node
            waiting.extend(c for c in node.children if digests[node.depth : c.depth] == c.digests)
        return best

    def plan(self, identity: bytes, digests: Digests, *, known: Node | None = None) -> Plan:
        """Reserve a turn for a request (arguments as of `match`); the caller commits the plan or releases it. Raises
        `TurnConflictError` where the mode, a turn under way or a parent that ended by length forbid it,
        `TurnRefusedError` when the session is full."""
        if self.nodes + len(self._open) >= self.max_nodes:
            raise TurnRefusedError(f"the session holds {self.nodes} turns, its limit; start another session")
        parent, replaces = self.match(identity, digests, known=known), None
        if self.mode == "linear" and self._open:
            raise TurnConflictError("another turn of this linear session is under way; wait for its answer")
        if self.mode == "linear" and self._leaf is not None and parent is not self._leaf:
            leaf = self._leaf
            if parent is None or leaf.parent is not parent or leaf.digests[:-1] != digests[parent.depth :]:
                raise TurnConflictError(
                    "the messages differ from this linear session's before its last turn; repeat them as they were "
                    "answered, or open the session with mode 'branching'"
                )
            replaces = leaf
        if parent is not None and parent.added is not None and parent.added.finish_reason == "length":
            raise TurnConflictError(
                "the turn before was cut at its token limit, so its end was never sampled and it cannot be extended; "
                "raise max_tokens and ask for it again"
            )
        if parent is None:
            parent = self._roots[identity] = Node(None, (), None, 0)
        plan = Plan(parent, digests[parent.depth :], parent.attempts + parent.pending, replaces)
        parent.pending += 1
        self._open.add(plan)
        return plan

    def release(self, plan: Plan) -> None:
        """Forget a plan that was not committed. Safe to call twice, and after `commit`."""
        if plan.open:
            plan.open = False
            plan.parent.pending -= 1
            self._open.discard(plan)
            self._sweep_root(plan.parent)

    def commit(self, plan: Plan, reply: bytes, added: Added) -> Node:
        """Add the finished turn of `plan`, whose reply has the digest `reply`. The plan is used up."""
        assert plan.open, "a plan is committed once"
        node = Node(plan.parent, (*plan.digests, reply), added, self._created + 1)
        self._created += 1
        if plan.replaces is not None:
            self._remove(plan.replaces)
        plan.parent.children = (*plan.parent.children, node)
        plan.parent.attempts += 1
        self.nodes += 1
        self.tokens += len(added.ids)
        self._leaf = node
        self.release(plan)
        return node

    def _remove(self, node: Node) -> None:
        assert node.parent is not None
        assert node.added is not None
        assert not node.children, "only a leaf is replaced"
        node.parent.children = tuple(c for c in node.parent.children if c is not node)
        self.nodes -= 1
        self.tokens -= len(node.added.ids)

    def _sweep_root(self, node: Node) -> None:
        """A root under which nothing was ever said goes with its last plan."""
        if node.added is None and not node.children and not node.pending:
            self._roots = {key: root for key, root in self._roots.items() if root is not node}

    # Reading.

    def tools_of(self, root: Node) -> bytes:
        """JSON of the tools that the turns under a root were asked with."""
        identity = next(key for key, known in self._roots.items() if known is root)
        return self.tools.get(identity, b"[]")

    @property
    def busy(self) -> bool:
        return bool(self._open)

    def room(self) -> int:
        """Tokens that may still be added."""
        return max(0, self.max_tokens - self.tokens)

    def walk(self) -> Iterator[Node]:
        """Every turn, parents first, siblings in the order in which they were committed."""
        waiting = list(reversed(self._roots.values()))
        while waiting:
            node = waiting.pop()
            if node.added is not None:
                yield node
            waiting.extend(reversed(node.children))

    def leaves(self) -> list[Node]:
        """Turns that nothing extends, in the order in which they were committed."""
        return sorted((n for n in self.walk() if not n.children), key=lambda n: n.order)


def spans_of(versions: NDArray[np.int32]) -> tuple[tuple[int, int], ...]:
    """Runs of equal versions as (version, count)."""
    if not len(versions):
        return ()
    if versions.tobytes() == versions[:1].tobytes() * len(versions):  # nearly always
        return ((int(versions[0]), len(versions)),)
    starts = np.flatnonzero(np.concatenate([[True], versions[1:] != versions[:-1]]))
    counts = np.diff(np.append(starts, len(versions)))
    return tuple((int(versions[s]), int(c)) for s, c in zip(starts, counts, strict=True))


def sampled_columns(
    generations: Sequence[Generation],
) -> tuple[NDArray[np.int32], NDArray[np.float32], tuple[tuple[int, int], ...]]:
    """Ids, log-probs and version spans of a turn that took these generations, one behind the other."""
    if len(generations) == 1:
        (only,) = generations
        ids, logprobs = only.token_ids.astype(np.int32, copy=False), only.logprobs.astype(np.float32, copy=False)
        return ids, logprobs, spans_of(only.versions)
    return (
        np.concatenate([g.token_ids for g in generations]).astype(np.int32, copy=False),
        np.concatenate([g.logprobs for g in generations]).astype(np.float32, copy=False),
        spans_of(np.concatenate([g.versions for g in generations])),
    )
