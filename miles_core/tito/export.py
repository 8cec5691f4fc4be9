"""From a session tree to trajectories: one a leaf that is kept, every sampled token trained once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import orjson
from numpy.typing import NDArray

from miles_core.data.trajectory import NOT_SAMPLED, Status, Trajectory, Turn
from miles_core.tito.tree import Node, SessionTree

__all__ = ["PICKERS", "Identity", "Picker", "all_leaves", "export", "from_ipc", "to_ipc", "without_retries"]

Picker = Callable[[SessionTree], Sequence[Node]]
"""Chooses the leaves that become trajectories, in the order in which shared spans go to the first of them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What the trajectories of a session are called; their ids are `episode_id.0`, `episode_id.1`, …"""

    prompt_id: str
    group_id: str
    episode_id: str


def all_leaves(tree: SessionTree) -> Sequence[Node]:
    """Every leaf, in the order in which they were sampled."""
    return tree.leaves()


def without_retries(tree: SessionTree) -> Sequence[Node]:
    """Every leaf but those that were asked again with the same messages: the client went on from a later answer."""
    return [leaf for leaf in tree.leaves() if not _retried(leaf)]


PICKERS: dict[str, Picker] = {"drop_retries": without_retries, "all": all_leaves}


def _retried(leaf: Node) -> bool:
    assert leaf.parent is not None
    asked = leaf.digests[:-1]
    return any(s.order > leaf.order and s.digests[:-1] == asked for s in leaf.parent.children)


def export(
    tree: SessionTree, identity: Identity, *, max_tokens: int = 0, picker: Picker = without_retries
) -> tuple[Trajectory, ...]:
    """The trajectories of a session. A turn on several kept paths is in the loss mask of the first alone; in the others
    its tokens are history, with their log-probs and versions. Longer paths are cut at `max_tokens` (0: never), at the
    token, and are `truncated`.

    Sampled tokens that every kept path dropped at a junction get a trajectory of their own: the path to their turn, in
    which they alone train.
    """
    trained: dict[int, int] = {}  # how many of a turn's sampled tokens are in a mask already
    found: list[Trajectory] = []
    paths = [leaf.path() for leaf in picker(tree)]
    ends = {path[-1].order: path for path in paths}
    for path in paths:
        cut = (n + 1 for n, (_, after) in enumerate(itertools.pairwise(path)) if after.added and after.added.drop)
        for shorter in (path[:stop] for stop in cut):
            if not max_tokens or shorter[-1].length <= max_tokens:
                ends.setdefault(shorter[-1].order, shorter)
    for order, path in ends.items():
        added = path[-1].added
        assert added is not None
        if len(found) < len(paths) or trained.get(order, 0) < len(added.logprobs):
            said = _conversation(tree, path)
            found.append(_trajectory(path, trained, identity, said, index=len(found), max_tokens=max_tokens))
    return tuple(found)


def _trajectory(
    path: Sequence[Node],
    trained: dict[int, int],
    identity: Identity,
    conversation: str | None,
    *,
    index: int,
    max_tokens: int,
) -> Trajectory:
    ids = path[-1].ids()
    mask = np.zeros(len(ids), np.bool_)
    logprobs = np.zeros(len(ids), np.float32)
    versions = np.full(len(ids), NOT_SAMPLED, np.int32)
    spans: list[tuple[Node, int, int]] = []
    turns: list[Turn] = []
    for number, node in enumerate(path):
        added = node.added
        assert added is not None
        dropped = path[number + 1].added.drop if number + 1 < len(path) else 0  # type: ignore[union-attr]
        start = node.length - len(added.logprobs)
        stop = node.length - dropped
        spans.append((node, start, stop))
        logprobs[start:stop] = added.logprobs[: stop - start]
        versions[start:stop] = _versions(added.versions)[: stop - start]
        lost = bool(dropped and max_tokens and node.length > max_tokens)  # no trajectory has room for what was dropped
        for part in added.parts:
            end = min(start + part.count, stop)
            turns.append(
                Turn(
                    start=start,
                    stop=end,
                    finish_reason="length" if lost and end == stop else part.finish_reason,
                    engine=part.engine,
                    cached_tokens=part.cached_tokens,
                    started=part.started,
                    finished=part.finished,
                    request_id=part.request_id,
                )
            )
            start = end
    last = path[-1].added
    assert last is not None
    status = Status.TRUNCATED if last.finish_reason == "length" else Status.COMPLETED
    length, turns, status = _fit(versions, turns, status, max_tokens)
    for node, start, stop in spans:
        done, held = trained.get(node.order, 0), max(min(stop, length) - start, 0)
        mask[start + done : start + held] = True
        trained[node.order] = max(done, held)
    routes = _routes(path)
    return Trajectory(
        token_ids=ids[:length],
        loss_mask=mask[:length],
        logprobs=logprobs[:length],
        versions=versions[:length],
        prompt_id=identity.prompt_id,
        group_id=identity.group_id,
        episode_id=identity.episode_id,
        trajectory_id=f"{identity.episode_id}.{index}",
        turns=tuple(turns),
        routed_experts=None if routes is None else routes[: max(length - 1, 0)],
        conversation=conversation,
        status=status,
    )


def _conversation(tree: SessionTree, path: Sequence[Node]) -> str | None:
    """The path's messages, the tools that they were asked with, and which messages are its turns' replies, as JSON
    text; None where the turns were asked for in token ids."""
    root = path[0].parent
    said = [node.added.messages[1:-1] for node in path if node.added is not None]
    if root is None or not all(said):
        return None
    replies = orjson.dumps([node.depth - 1 for node in path])
    parts = (b'{"messages":[', b",".join(said), b'],"tools":', tree.tools_of(root), b',"replies":', replies, b"}")
    return b"".join(parts).decode()


def _versions(spans: Sequence[tuple[int, int]]) -> NDArray[np.int32]:
    return np.repeat([v for v, _ in spans], [c for _, c in spans]).astype(np.int32)


def _fit(
    versions: NDArray[np.int32], turns: list[Turn], status: Status, max_tokens: int
) -> tuple[int, list[Turn], Status]:
    """Length, turns and status once the path ends at `max_tokens`, and behind its last sampled token: what nobody
    answered teaches nothing. A path without sampled tokens keeps its prompt."""
    limit = max_tokens or len(versions)
    sampled = np.flatnonzero(versions != NOT_SAMPLED)
    fitting = sampled[sampled < limit]
    if len(fitting) < len(sampled):
        status = Status.TRUNCATED
    length = int(fitting[-1]) + 1 if len(fitting) else min(limit, len(versions))
    kept = [turn for turn in turns if turn.start < length or turn.stop <= length]
    cut = [t if t.stop <= length else dataclasses.replace(t, stop=length, finish_reason="length") for t in kept]
    return length, cut, status


def _routes(path: Sequence[Node]) -> NDArray[np.int32] | None:
    """Rows of the whole path, [T−1, layers, k]. Raises `ValueError` when turns disagree about having them."""
    pieces: list[NDArray[np.int32]] = []
    for node in path:
        added = node.added
        assert added is not None
        if added.routes is None:
            if pieces and len(added.logprobs):
                raise ValueError(f"turn {node.order} came without routed experts, the turns before it with them")
            continue
        assert node.parent is not None
        held = sum(map(len, pieces))
        if held > max(node.parent.length - added.drop - 1, 0):
            pieces = [np.concatenate(pieces)[: max(node.parent.length - added.drop - 1, 0)]]
        pieces.append(added.routes)
    return np.concatenate(pieces) if pieces else None


def to_ipc(trajectories: Sequence[Trajectory]) -> bytes:
    """Trajectories as one Arrow IPC stream, the columns of the rollout files."""
    import pyarrow as pa

    from miles_core.data.parquet import rollout_table

    table = rollout_table(trajectories, step=0, policy_version=0)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def from_ipc(data: bytes) -> list[Trajectory]:
    """The trajectories of an Arrow IPC stream, equal to those that were sent."""
    import pyarrow as pa

    from miles_core.data.parquet import trajectories_of

    with pa.ipc.open_stream(data) as reader:
        return trajectories_of(reader.read_all())
