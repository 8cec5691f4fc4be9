"""The simulator: against the real producer, its laws, and what it repeats."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.errors import MilesError
from miles_core.rollout.policy import EpisodeStart
from miles_core.runs.rollouts import policy_of
from miles_core.simulation.outcome import Outcome
from miles_core.simulation.scenario import Scenario, load_scenario
from miles_core.simulation.schedule import simulate
from miles_core.simulation.workload import Plan
from miles_core.testing.heavy_tail import HeavyTail, VirtualLoop, measure_wall
from tests.simulation.conftest import small

ROOT = Path(__file__).parents[2]


class SameDraws:
    """The episodes of `miles_core.testing.heavy_tail`, draw for draw."""

    def __init__(self, load: HeavyTail) -> None:
        self._load = load

    def plan(self, start: EpisodeStart) -> Plan:
        generator, load = random.Random(start.seed), self._load
        seconds = [load.tool_seconds * generator.lognormvariate(0, load.sigma) for _ in range(load.turns)]
        return Plan(0, [1] * load.turns, seconds, [0] * load.turns)

    def reward_seconds(self, group_id: str) -> float:
        return 0.0

    def dropped(self, group_id: str) -> bool:
        return False


@pytest.mark.parametrize(
    "schedule",
    [
        {"mode": "sync"},
        {"mode": "sync", "over_sample": 2},
        {"mode": "sync", "over_sample": 2, "partial": True, "max_staleness": 8},
        {"mode": "async", "max_running": 128, "capacity": 3, "max_staleness": 4, "stale": "resample"},
        {"mode": "async", "max_running": 64, "capacity": 2, "max_staleness": 1, "stale": "drop"},
        {"mode": "async", "max_running": 64, "capacity": 4, "slot": "group", "adaptive": True},
    ],
    ids=lambda s: " ".join(map(str, s.values())),
)
def test_the_real_producer_takes_the_same_time_idles_as_long_and_trains_as_stale(schedule: dict[str, Any]) -> None:
    """Both draw the same tool times and sample in no time; what is left is the schedule, and it agrees to 1 in 10⁶."""
    load = HeavyTail(train_seconds=0.5, tool_seconds=0.1)
    tree = {
        "simulation": {"steps": 12, "warmup": 1},
        "schedule": {"batch_groups": 4, "group_size": 8, "max_drops": 10**6, **schedule},
        "engines": {"count": 1, "slots": 1000, "decode": [[1, 1e9], [1000, 1e12]]},
        "episodes": {"tokens": 1},
        "trainer": {"train_seconds": load.train_seconds},
    }
    scenario = Scenario.model_validate(tree)
    simulated = simulate(scenario, SameDraws(load))
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        whole = runner.run(measure_wall(policy_of(scenario.schedule), load, steps=12))
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        first = runner.run(measure_wall(policy_of(scenario.schedule), load, steps=1))
    assert simulated.seconds == pytest.approx(whole.seconds - first.seconds, rel=1e-6)
    idle = whole.trainer_idle - first.trainer_idle
    assert simulated.trainer_idle * simulated.seconds == pytest.approx(idle, rel=1e-6, abs=1e-6)
    assert simulated.staleness_mean == pytest.approx((12 * whole.staleness - first.staleness) / 11)


def test_the_same_seed_gives_the_same_outcome_and_another_does_not(scenario: Callable[..., Scenario]) -> None:
    assert simulate(scenario()) == simulate(scenario())
    assert simulate(scenario()) != simulate(scenario("simulation.seed=1"))


def check_laws(scenario: Scenario, outcome: Outcome) -> None:
    law = outcome.groups
    assert law.holds
    assert law.trained == scenario.simulation.steps * scenario.schedule.batch_groups
    assert outcome.episodes == outcome.steps * scenario.schedule.batch_groups * scenario.schedule.group_size
    missing = outcome.sampled - sum(outcome.tokens.values())
    assert -1 <= missing <= outcome.cut + 1, "every token that was sampled is accounted for"
    for name in ("trainer_idle", "engine_idle", "engine_unused", "trainer_idle_bound", "engine_unused_bound"):
        assert -1e-9 <= getattr(outcome, name) <= 1, name
    assert outcome.trainer_idle >= outcome.trainer_idle_bound - 1e-9 or outcome.seconds < outcome.bound_seconds
    assert 0 <= outcome.wasted <= 1
    if scenario.schedule.mode == "async" and scenario.schedule.stale in ("drop", "retry", "resample"):
        assert outcome.staleness_max <= scenario.schedule.max_staleness
    if scenario.schedule.stale == "reweight" and scenario.schedule.stale_decay == 0:
        assert outcome.staleness_max <= scenario.schedule.max_staleness
    assert outcome.staleness_mean <= outcome.staleness_max
    if scenario.schedule.mode == "async":
        assert outcome.running <= scenario.schedule.max_running


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.fixed_dictionaries(
        {
            "simulation.seed": st.integers(0, 5),
            "schedule.mode": st.sampled_from(["'async'", "'async'", "'sync'"]),
            "schedule.stale": st.sampled_from(["'drop'", "'retry'", "'resample'", "'reweight'"]),
            "schedule.max_staleness": st.integers(1, 3),
            "schedule.capacity": st.integers(1, 4),
            "schedule.slot": st.sampled_from(["'episode'", "'group'"]),
            "schedule.order": st.sampled_from(["'fifo'", "'freshest'", "'oldest_issue'"]),
            "schedule.adaptive": st.sampled_from(["false", "true"]),
            "schedule.partial": st.sampled_from(["false", "true"]),
            "schedule.over_sample": st.integers(0, 2),
            "schedule.pause": st.sampled_from(["'retract'", "'in_place'", "'abort'"]),
            "schedule.episode_timeout": st.sampled_from([20.0, 60.0, 1e6]),
            "schedule.retries": st.integers(0, 3),
            "engines.slots": st.sampled_from([2, 8]),
            "episodes.failures": st.sampled_from([0.0, 0.05]),
            "episodes.filtered": st.sampled_from([0.0, 0.3]),
            "episodes.reward_seconds": st.sampled_from([0.0, 2.0]),
            "trainer.train_seconds": st.sampled_from([2.0, 8.0, 40.0]),
        }
    )
)
def test_nothing_is_lost_doubled_or_too_stale(changes: dict[str, Any]) -> None:
    scenario = small("simulation.steps=6", *(f"{key}={value}" for key, value in changes.items()))
    scenario = scenario.model_copy(update={"schedule": scenario.schedule.model_copy(update={"max_drops": 3000})})
    try:
        outcome = simulate(scenario)
    except MilesError as error:  # a deadline or a bound that nothing meets: the run says so, and stops
        if "max_drops" not in str(error):
            raise
        return
    check_laws(scenario, outcome)


def test_the_heavy_tail_scenario_is_within_two_and_five_percent_of_the_bound() -> None:
    scenario = load_scenario(ROOT / "examples" / "simulations" / "heavy_tail.toml")
    assert scenario.schedule.max_staleness == 2
    outcome = simulate(scenario)
    check_laws(scenario, outcome)
    assert outcome.trainer_idle - outcome.trainer_idle_bound < 0.02
    assert outcome.engine_unused - outcome.engine_unused_bound < 0.05
    assert outcome.engine_idle < 0.05


def test_retracted_requests_are_prefilled_again_and_in_place_ones_are_not(scenario: Callable[..., Scenario]) -> None:
    slow = ("engines.prefill=200.0", "trainer.train_seconds=2.0", "schedule.max_staleness=50")
    retract, in_place = (simulate(scenario(*slow, f"schedule.pause='{mode}'")) for mode in ("retract", "in_place"))
    assert in_place.seconds < retract.seconds


def test_an_abort_without_partial_costs_the_tokens_and_with_partial_keeps_them(
    scenario: Callable[..., Scenario],
) -> None:
    lost, kept = (
        simulate(scenario("schedule.pause='abort'", "schedule.retries=50", f"schedule.partial={partial}"))
        for partial in ("false", "true")
    )
    assert lost.returned["failed"] > 0 == kept.returned.get("failed", 0)
    assert lost.wasted > kept.wasted


def test_the_bound_is_met_where_nothing_has_to_wait(scenario: Callable[..., Scenario]) -> None:
    outcome = simulate(scenario("trainer.train_seconds=500.0", "episodes.tool_seconds=0"))
    assert outcome.seconds == pytest.approx(outcome.bound_seconds)
    assert outcome.trainer_idle == outcome.trainer_idle_bound == 0


def test_equal_scenarios_have_equal_episodes_whatever_the_schedule(scenario: Callable[..., Scenario]) -> None:
    from miles_core.simulation.workload import DrawnWorkload

    one, other = (DrawnWorkload(scenario().episodes, group_size=4, seed=3) for _ in range(2))
    starts = [
        EpisodeStart(group_id=g, episode_id=f"{g}.{a}/{i}", prompt=None, seed=0, priority=0)  # type: ignore[arg-type]
        for g in ("g0", "g1")
        for a in (0, 1)
        for i in range(4)
    ]
    first = {s.episode_id: one.plan(s) for s in starts}
    again = {s.episode_id: other.plan(s) for s in reversed(starts)}
    assert first == again
    assert first["g0.0/0"] != first["g0.1/0"], "another attempt is another draw"
    assert first["g0.0/0"].prompt == first["g0.1/0"].prompt


def test_a_schedule_that_drops_everything_stops_with_the_scheduler_s_error(scenario: Callable[..., Scenario]) -> None:
    with pytest.raises(MilesError, match="max_drops"):
        simulate(scenario("schedule.episode_timeout=0.01", "schedule.max_drops=50"))


def test_outcomes_are_plain_data(scenario: Callable[..., Scenario]) -> None:
    data = simulate(scenario()).as_dict()
    assert {f.name for f in dataclasses.fields(Outcome)} < set(data)
