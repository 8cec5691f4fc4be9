"""Laws of group filters: pure functions that are defined for every group.

PYTEST_DONT_REWRITE: a broken law is told by its own sentence, not by a diff of tensors.
"""

from __future__ import annotations

from typing import Any

from miles_core.data.group import Episode, Group, Prompt
from miles_core.data.trajectory import Status
from miles_core.testing.kit import Case, Check

__all__ = ["CHECKS", "group"]

CASES: tuple[tuple[float, ...], ...] = (
    (0.0, 1.0, 1.0, 0.0),
    (),
    (1.0,),
    (0.0, 0.0, 0.0),
    (1.0, 1.0),
    (-1.0, -1.0, -1.0),
    (1e30, -1e30),
    (1e-30, 0.0),
)


def it_is_total(case: Case) -> None:
    chosen = case.create()
    for rewards in CASES:
        for status in Status:
            try:
                reason: Any = chosen.drop_reason(group(len(rewards), status), list(rewards))
            except Exception as error:
                raise AssertionError(
                    f"a group of {status} episodes with rewards {list(rewards)} raises {type(error).__name__}: {error}"
                ) from error
            assert reason is None or isinstance(reason, str), f"the reason to drop a group is {reason!r}, expected text"


def a_reason_is_short_and_not_empty(case: Case) -> None:
    chosen = case.create()
    for rewards in CASES:
        for status in Status:
            reason = chosen.drop_reason(group(len(rewards), status), list(rewards))
            assert reason is None or 0 < len(reason) <= 60, (
                f"the reason {reason!r:.100} is empty or long: it is a name that is counted, such as zero_std"
            )


def it_is_pure(case: Case) -> None:
    chosen, fresh = case.create(), case.create()
    groups = [(group(len(rewards), Status.COMPLETED), rewards) for rewards in CASES]
    first = [chosen.drop_reason(one, list(rewards)) for one, rewards in groups]
    again = [chosen.drop_reason(one, list(rewards)) for one, rewards in reversed(groups)][::-1]
    other = [fresh.drop_reason(one, list(rewards)) for one, rewards in reversed(groups)][::-1]
    assert first == again == other, f"the answer depends on what was asked before: {first}, {again}, {other}"


def it_leaves_the_rewards_alone(case: Case) -> None:
    chosen = case.create()
    for rewards in CASES:
        given = list(rewards)
        chosen.drop_reason(group(len(rewards), Status.COMPLETED), given)
        assert given == list(rewards), f"the rewards {list(rewards)} became {given}"


CHECKS: tuple[Check, ...] = (it_is_total, a_reason_is_short_and_not_empty, it_is_pure, it_leaves_the_rewards_alone)


def group(size: int, status: Status) -> Group:
    """A group of `size` episodes without trajectories."""
    prompt = Prompt(prompt_id="p", messages=({"role": "user", "content": "hello"},))
    return Group(
        group_id="g",
        prompt=prompt,
        episodes=tuple(
            Episode(episode_id=f"g.{i}", prompt_id="p", group_id="g", status=status, trajectories=())
            for i in range(size)
        ),
    )
