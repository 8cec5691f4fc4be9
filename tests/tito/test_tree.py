"""Random session trees against a slow reference that keeps every turn's whole history."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from miles_core.data.trajectory import NOT_SAMPLED
from miles_core.tito.export import Identity, all_leaves, export, without_retries
from miles_core.tito.tree import Added, Part, Plan, SessionTree, TurnConflictError, TurnRefusedError, spans_of

NAMES = Identity(prompt_id="p", group_id="g", episode_id="e")


def added(turn_id: int, prompt: list[int], sampled: list[int], *, finish: str = "stop", drop: int = 0) -> Added:
    """A turn whose log-probs and versions tell every token apart."""
    return Added(
        turn_id=str(turn_id),
        drop=drop,
        ids=np.array([*prompt, *sampled], np.int32),
        sampled=len(prompt),
        logprobs=-np.array(sampled, np.float32) / 1024,
        versions=spans_of(np.array([i // 3 for i in sampled], np.int32)),
        finish_reason=finish,
        parts=(
            Part(
                count=len(sampled),
                finish_reason=finish,
                engine="e",
                cached_tokens=0,
                started=0.0,
                finished=1.0,
                request_id=str(turn_id),
            ),
        ),
        messages=b"[]",
    )


@dataclasses.dataclass
class Turn:
    """A turn as the reference keeps it: the whole history before it, its reply, all its ids."""

    identity: bytes
    request: tuple[bytes, ...]
    reply: bytes
    ids: list[int]
    sampled: list[int]
    finish: str
    order: int

    @property
    def history(self) -> tuple[bytes, ...]:
        return (*self.request, self.reply)


class Trees(RuleBasedStateMachine):
    """`linear` and `branching` differ in what `plan` refuses; what is committed obeys the same laws."""

    plans = Bundle("plans")
    mode: Any = "branching"

    def __init__(self) -> None:
        super().__init__()
        self.tree = SessionTree(mode=self.mode, max_nodes=12, max_tokens=10_000)
        self.turns: list[Turn] = []
        self.next_id = 1
        self.orders = 0
        self.open = 0

    def longest(self, identity: bytes, request: tuple[bytes, ...]) -> Turn | None:
        found = [t for t in self.turns if t.identity == identity and request[: len(t.history)] == t.history]
        return max(found, key=lambda t: (len(t.history), t.order), default=None)

    @rule(
        target=plans,
        base=st.integers(0, 30),
        new=st.lists(st.sampled_from([b"u", b"v"]), min_size=1, max_size=2),
        identity=st.sampled_from([b"", b"tools"]),
        again=st.booleans(),
    )
    def plan(self, base: int, new: list[bytes], identity: bytes, again: bool) -> Any:
        known = [t.request if again else (*t.history, *new) for t in self.turns if t.identity == identity]
        request = known[base % len(known)] if known else tuple(new)
        parent = self.longest(identity, request)
        try:
            plan = self.tree.plan(identity, request)
        except TurnConflictError:
            length = parent is not None and parent.finish == "length"
            assert length or (self.mode == "linear" and not self.allowed(parent, identity, request))
            return multiple()
        except TurnRefusedError:
            assert len(self.turns) + self.open >= 12
            return multiple()
        assert parent is None or parent.finish != "length"
        assert self.mode == "branching" or self.allowed(parent, identity, request)
        assert plan.parent.ids().tolist() == ([] if parent is None else parent.ids)
        assert plan.parent.depth == (0 if parent is None else len(parent.history))
        self.open += 1
        return plan, identity, request, parent

    def allowed(self, parent: Turn | None, identity: bytes, request: tuple[bytes, ...]) -> bool:
        """Linear: nothing under way, and it extends the last turn or sends its messages again."""
        return not self.open and (
            not self.turns
            or parent is self.turns[-1]
            or (identity, request) == (self.turns[-1].identity, self.turns[-1].request)
        )

    @rule(
        open_plan=consumes(plans),
        reply=st.sampled_from([b"a", b"b"]),
        prompt=st.integers(0, 2),
        count=st.integers(0, 3),
        finish=st.sampled_from(["stop", "stop", "stop", "length"]),
        drop=st.integers(0, 1),
    )
    def commit(self, open_plan: Any, reply: bytes, prompt: int, count: int, finish: str, drop: int) -> None:
        plan, identity, request, parent = open_plan
        drop = min(drop, 0 if parent is None else len(parent.sampled))
        fresh = list(range(self.next_id, self.next_id + prompt + count))
        self.next_id += prompt + count
        self.orders += 1
        self.open -= 1
        turn = added(self.orders, fresh[:prompt], fresh[prompt:], finish=finish, drop=drop)
        node = self.tree.commit(plan, reply, turn)
        before = [] if parent is None else parent.ids[: len(parent.ids) - drop]
        if self.mode == "linear" and self.turns and self.turns[-1].request == request and parent is not self.turns[-1]:
            self.turns.pop()
        self.turns.append(Turn(identity, request, reply, [*before, *fresh], fresh[prompt:], finish, self.orders))
        assert node.ids().tolist() == self.turns[-1].ids
        assert node.length == len(node.ids())

    @rule(open_plan=consumes(plans))
    def fail(self, open_plan: tuple[Plan, bytes, tuple[bytes, ...], Turn | None]) -> None:
        self.open -= 1
        self.tree.release(open_plan[0])
        self.tree.release(open_plan[0])

    @invariant()
    def the_tree_holds_the_committed_turns_and_nothing_else(self) -> None:
        held = sorted((n.order, n.ids().tolist()) for n in self.tree.walk())
        assert held == [(t.order, t.ids) for t in sorted(self.turns, key=lambda t: t.order)]
        assert self.tree.nodes == len(self.turns)
        assert self.tree.tokens == sum(len(n.added.ids) for n in self.tree.walk() if n.added)
        assert self.tree.busy == (self.open > 0)
        roots = {t.identity for t in self.turns}
        assert len(self.tree._roots) <= len(roots) + self.open
        if not self.open:
            assert self.tree._roots.keys() == roots

    @invariant()
    def every_sampled_token_trains_once(self) -> None:
        trajectories = export(self.tree, NAMES, picker=all_leaves)
        trained = [int(i) for t in trajectories for i in t.token_ids[t.loss_mask]]
        assert sorted(trained) == sorted(i for t in self.turns for i in t.sampled)
        for trajectory in trajectories:
            sampled = trajectory.versions != NOT_SAMPLED
            ids = trajectory.token_ids[sampled]
            assert (trajectory.versions[sampled] == ids // 3).all()
            assert np.allclose(trajectory.logprobs[sampled], -ids / 1024)
            assert sum(t.stop - t.start for t in trajectory.turns) == int(sampled.sum())

    @invariant()
    def retries_are_dropped_and_nothing_else(self) -> None:
        kept = {leaf.order for leaf in without_retries(self.tree)}
        for leaf in self.tree.leaves():
            turn = next(t for t in self.turns if t.order == leaf.order)
            asked_again = any(
                t.identity == turn.identity and t.request == turn.request and t.order > turn.order
                for n in self.tree.walk()
                for t in self.turns
                if n.order == t.order and n.parent is leaf.parent
            )
            assert (leaf.order in kept) is not asked_again


class LinearTrees(Trees):
    mode = "linear"


TestBranching = Trees.TestCase
TestBranching.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestLinear = LinearTrees.TestCase
TestLinear.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def turn(tree: SessionTree, request: list[bytes], reply: bytes, node: Added) -> None:
    tree.commit(tree.plan(b"", tuple(request)), reply, node)


def test_a_length_stopped_turn_is_not_extended():
    """Its end was never sampled; a client that goes on would lose the later turns from the sample."""
    tree = SessionTree()
    turn(tree, [b"u"], b"a", added(1, [1], [2], finish="length"))
    with pytest.raises(TurnConflictError, match="token limit"):
        tree.plan(b"", (b"u", b"a", b"v"))
    assert not tree.busy


def test_a_retry_that_fails_leaves_the_turn_it_would_have_replaced():
    tree = SessionTree(mode="linear")
    turn(tree, [b"u"], b"a", added(1, [1], [2]))
    plan = tree.plan(b"", (b"u",))
    tree.release(plan)
    assert [n.order for n in tree.walk()] == [1]
    turn(tree, [b"u", b"a", b"v"], b"b", added(2, [3], [4]))
    assert export(tree, NAMES)[0].token_ids.tolist() == [1, 2, 3, 4]


def test_a_linear_session_refuses_what_departs_from_it():
    tree = SessionTree(mode="linear")
    turn(tree, [b"u"], b"a", added(1, [1], [2]))
    turn(tree, [b"u", b"a", b"v"], b"b", added(2, [3], [4]))
    for request in ([b"u"], [b"x"], [b"u", b"a", b"w"], [b"u", b"c", b"v"]):
        with pytest.raises(TurnConflictError, match="linear"):
            tree.plan(b"", tuple(request))
    with pytest.raises(TurnConflictError, match="linear"):
        tree.plan(b"tools", (b"u", b"a", b"v", b"b", b"w"))


def test_cut_at_the_token():
    tree = SessionTree()
    turn(tree, [b"u"], b"a", added(1, [1, 2], [3, 4]))
    turn(tree, [b"u", b"a", b"v"], b"b", added(2, [5], [6, 7, 8]))
    (trajectory,) = export(tree, NAMES, max_tokens=7)
    assert trajectory.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert trajectory.status == "truncated"
    assert [(t.start, t.stop, t.finish_reason) for t in trajectory.turns] == [(2, 4, "stop"), (5, 7, "length")]
    (short,) = export(tree, NAMES, max_tokens=5)
    assert short.token_ids.tolist() == [1, 2, 3, 4]
    assert len(short.turns) == 1


@pytest.mark.parametrize("sampled", [[], [9]])
def test_an_empty_reply_and_a_lone_stop_token(sampled: list[int]):
    tree = SessionTree()
    turn(tree, [b"u"], b"a", added(1, [1, 2], sampled))
    (trajectory,) = export(tree, NAMES)
    assert trajectory.token_ids.tolist() == [1, 2, *sampled]
    assert trajectory.trainable_tokens == len(sampled)
