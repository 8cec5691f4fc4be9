"""The controller, and the scheduler under it on a virtual clock: the target is held, and the trainer is not idle."""

from __future__ import annotations

import heapq
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.rollout.adaptive import AdaptiveController, Measured
from miles_core.rollout.ledger import Ledger
from miles_core.rollout.policy import SchedulePolicy
from miles_core.rollout.scheduler import Scheduler
from tests.rollout.test_scheduler import ended, prompt_at

GROUP, BATCH = 4, 4


def controller(**changes: float) -> AdaptiveController:
    base = {"batch_groups": 8, "group_size": 4, "target_staleness": 1.0, "max_running": 1000, "capacity": 8}
    return AdaptiveController(**{**base, **changes})  # type: ignore[arg-type]


def measured(**changes: float) -> Measured:
    base = {"train_seconds": 10.0, "episode_seconds": 20.0, "ended_per_trained": 1.0, "staleness": 1.0}
    return Measured(**{**base, **changes})


def test_concurrency_is_littles_law_with_headroom() -> None:
    assert controller().update(measured()).max_running == 1.25 * 32 * 20 / 10
    assert controller().update(measured(ended_per_trained=2.0)).max_running == 2 * 1.25 * 32 * 20 / 10
    assert controller().update(measured(train_seconds=0.0)).max_running == 1000


def test_capacity_falls_while_batches_are_too_old_and_rises_while_they_are_young() -> None:
    one = controller()
    old = [one.update(measured(staleness=3.0)).capacity for _ in range(4)]
    assert old == sorted(old, reverse=True)
    assert old[-1] == 1.0
    young = [one.update(measured(staleness=0.0)).capacity for _ in range(80)]
    assert young == sorted(young)
    assert young[-1] == 8.0


@given(
    st.lists(
        st.builds(
            Measured,
            train_seconds=st.floats(0, 1e6),
            episode_seconds=st.floats(0, 1e6),
            ended_per_trained=st.floats(0, 100),
            staleness=st.floats(0, 100),
        ),
        max_size=20,
    )
)
def test_settings_stay_in_their_bounds(steps: list[Measured]) -> None:
    one = controller()
    for step in steps:
        settings = one.update(step)
        assert 4 <= settings.max_running <= 1000
        assert 1 <= settings.capacity <= 8


def simulate(
    *, adaptive: bool, target: float, train: float, mean: float, steps: int = 120
) -> tuple[float, float, float]:
    """(mean staleness, trainer's idle share, mean concurrency) of the second half of a run on a virtual clock, with
    log-normal episodes that do not slow each other down."""
    now = 0.0
    ledger = Ledger(Path(":memory:"))
    policy = SchedulePolicy(
        mode="async",
        batch_groups=BATCH,
        group_size=GROUP,
        retries=1,
        max_drops=0,
        max_running=400,
        capacity=16,
        max_staleness=100,
        adaptive=adaptive,
        target_staleness=target,
    )
    scheduler = Scheduler(policy, ledger, prompt_at, seed=0, clock=lambda: now)
    generator = random.Random(1)
    events: list[tuple[float, int, object]] = []
    number = version = 0
    free_at, wanted_at = 0.0, 0.0
    ages: list[float] = []
    idle: list[float] = []
    running: list[float] = []
    scheduler.begin(0)
    while len(ages) < steps:
        for start in scheduler.starts():
            number += 1
            seconds = generator.lognormvariate(0, 0.8) * mean / 1.377
            heapq.heappush(events, (now + seconds, number, (start, version)))
        taken = scheduler.take(version) if now >= free_at else None
        if taken is not None:
            ages.append(sum(version - (g.oldest_version or 0) for g in taken) / len(taken))
            idle.append(now - wanted_at)
            running.append(scheduler.metrics["running_mean"])
            ledger.move([g.group_id for g in taken], "trained")
            free_at = now + train
            number += 1
            heapq.heappush(events, (free_at, number, None))
            continue
        now, _, event = heapq.heappop(events)
        if event is None:
            version += 1
            wanted_at = now
            scheduler.begin(version)
        else:
            start, sampled = event  # type: ignore[misc]
            group = scheduler.episode_ended(ended(start, version=sampled))
            if group is not None:
                scheduler.group_scored(group, None)
    half = steps // 2
    spent = sum(idle[half:])
    return sum(ages[half:]) / half, spent / (spent + half * train), sum(running[half:]) / half


@pytest.mark.parametrize(("train", "mean", "target"), [(10.0, 10.0, 3.5), (10.0, 3.0, 2.0), (10.0, 20.0, 6.0)])
def test_the_target_is_held_and_the_trainer_is_busy(train: float, mean: float, target: float) -> None:
    staleness, idle, running = simulate(adaptive=True, target=target, train=train, mean=mean)
    fixed, _, most = simulate(adaptive=False, target=target, train=train, mean=mean)
    print(
        f"adaptive: staleness {staleness:.2f}, idle {idle:.3f}, running {running:.1f}; fixed: {fixed:.2f}, {most:.1f}"
    )
    assert staleness == pytest.approx(target, abs=0.5)
    assert idle < 0.05
    assert fixed > 2 * staleness, "as many as may be is too old"
