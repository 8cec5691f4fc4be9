"""Scenario files, distributions and the command: what they say, and what they refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from miles_core.cli.main import cli
from miles_core.data.parquet import write_rollouts
from miles_core.data.trajectory import Trajectory, Turn
from miles_core.errors import ConfigError
from miles_core.runs.metrics import MetricsStore
from miles_core.simulation.distributions import Distribution
from miles_core.simulation.frontier import Spot, frontier_svg, pareto
from miles_core.simulation.scenario import Scenario, load_scenario
from miles_core.simulation.sweep import grid

ROOT = Path(__file__).parents[2]
SCENARIO = ROOT / "examples" / "simulations" / "heavy_tail.toml"
SHORT = ("--set", "simulation.steps=6", "--set", "simulation.warmup=2", "--set", "schedule.batch_groups=4")


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "simulations").glob("*.toml")), ids=lambda p: p.stem)
def test_examples_are_scenarios(path: Path) -> None:
    assert isinstance(load_scenario(path), Scenario)


@pytest.mark.parametrize(
    ("settings", "mean", "tolerance"),
    [
        ({"value": 3.0}, 3.0, 0.0),
        ({"mean": 3.0}, 3.0, 0.05),
        ({"median": 2.0, "sigma": 0.5}, 2.0 * np.exp(0.125), 0.05),
        ({"values": [1.0, 2.0, 6.0]}, 3.0, 0.05),
        ({"mean": 3.0, "at_most": 1e-9}, 1e-9, 0.0),
    ],
)
def test_distributions_have_their_means(settings: dict[str, object], mean: float, tolerance: float) -> None:
    drawn = Distribution.model_validate(settings).draw(np.random.default_rng(0), (40_000,))
    assert drawn.mean() == pytest.approx(mean, abs=tolerance)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "this gives nothing"),
        ({"value": 1.0, "mean": 2.0}, "value and mean"),
        ({"mean": 2.0, "sigma": 1.0}, "sigma belongs to median"),
        ({"value": -1.0}, "greater than or equal to 0"),
    ],
)
def test_a_distribution_is_one_thing(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Distribution.model_validate(settings)


def test_an_unknown_key_is_refused_with_its_place_and_the_nearest_name(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(SCENARIO.read_text().replace("tool_seconds", "tool_second").replace("max_running", "max_runing"))
    with pytest.raises(ConfigError) as caught:
        load_scenario(path)
    told = str(caught.value)
    assert "2 problems" in told
    assert "did you mean 'tool_seconds'?" in told
    assert "did you mean 'max_running'?" in told
    line = 1 + path.read_text().splitlines().index(next(x for x in path.read_text().splitlines() if "max_runing" in x))
    assert f"bad.toml:{line}" in told


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("engines.decode=[[4, 10.0], [2, 20.0]]", "ascending"),
        ("simulation.warmup=500", "leaves none"),
        ("episodes.failures=1.5", "less than 1"),
        ("trainer.train_seconds={from_run='nowhere'}", "no measurement of train_seconds"),
        ("episodes.reward_seconds={from_run='nowhere'}", "a run does not measure reward_seconds"),
        ("steps", "section.key=value"),
    ],
)
def test_what_makes_no_sense_is_refused(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_scenario(SCENARIO, [override])


def test_a_run_directory_gives_what_it_measured(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    turns = (
        Turn(start=2, stop=4, finish_reason="stop", engine="e", started=10.0, finished=11.0),
        Turn(start=7, stop=8, finish_reason="stop", engine="e", started=13.5, finished=14.0),
    )
    sampled = np.isin(np.arange(8), [2, 3, 7])
    one = Trajectory(
        token_ids=np.arange(8),
        loss_mask=sampled,
        logprobs=np.where(sampled, -1.0, 0.0),
        versions=np.where(sampled, 0, -1),
        prompt_id="p",
        group_id="g",
        episode_id="e",
        trajectory_id="t",
        turns=turns,
    )
    write_rollouts(tmp_path / "rollouts" / "step-000001.parquet", [one], step=1, policy_version=0)
    store = MetricsStore(tmp_path / "metrics.sqlite")
    for step, seconds in ((0, 99.0), (1, 4.0), (2, 6.0)):
        store.log("time", step, {"trainer/train": seconds})
    store.close()
    keys = ("episodes.turns", "episodes.prompt_tokens", "episodes.tokens", "episodes.tool_seconds")
    keys += ("episodes.tool_tokens", "trainer.train_seconds")
    scenario = load_scenario(SCENARIO, [f"{key}={{from_run='{tmp_path}'}}" for key in keys])
    expected = {"turns": {2}, "prompt_tokens": {2}, "tokens": {2, 1}, "tool_seconds": {2.5}, "tool_tokens": {3}}
    for name, values in expected.items():
        assert set(getattr(scenario.episodes, name).draw(np.random.default_rng(0), (50,)).tolist()) == values, name
    assert set(scenario.trainer.train_seconds.draw(np.random.default_rng(0), (50,)).tolist()) == {4.0, 6.0}


def test_a_grid_is_every_combination_and_brackets_keep_their_commas() -> None:
    assert grid(["a.b=1,2", "c.d=[[1, 2], [3, 4]],5"]) == [
        ("a.b=1", "c.d=[[1, 2], [3, 4]]"),
        ("a.b=1", "c.d=5"),
        ("a.b=2", "c.d=[[1, 2], [3, 4]]"),
        ("a.b=2", "c.d=5"),
    ]
    assert grid([]) == [()]
    for bad in ("a.b", "a=1", "a.b=1,,2"):
        with pytest.raises(ConfigError, match="--sweep"):
            grid([bad])


def test_the_frontier_holds_what_nothing_beats() -> None:
    spots = [Spot(x=x, y=y, label="") for x, y in ((1, 9), (2, 5), (2, 7), (3, 5), (4, 1))]
    assert [(s.x, s.y) for s in pareto(spots)] == [(1, 9), (2, 5), (4, 1)]
    svg = frontier_svg(spots, title="a < b", x_label="x", y_label="y")
    assert svg.count("<circle") == 5
    assert "a &lt; b" in svg
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")


def test_the_command_prints_a_row_a_point_draws_and_speaks_json(tmp_path: Path) -> None:
    plot = tmp_path / "out.svg"
    sweep = ["--sweep", "schedule.stale=drop,resample", "--sweep", "schedule.capacity=1,2"]
    arguments = ["simulate", "schedule", str(SCENARIO), *SHORT, *sweep, "--seeds", "2"]
    table = CliRunner().invoke(cli, [*arguments, "--plot", str(plot)])
    assert table.exit_code == 0, table.output
    assert [line.split("|")[1].strip() for line in table.output.splitlines()[2:6]] == [
        "stale drop, capacity 1",
        "stale drop, capacity 2",
        "stale resample, capacity 1",
        "stale resample, capacity 2",
    ]
    assert "work-conserving bound" in table.output
    assert plot.read_text().startswith("<svg")
    lines = CliRunner().invoke(cli, [*arguments, "--json"]).output.splitlines()
    assert [len(json.loads(line)["outcomes"]) for line in lines] == [2, 2, 2, 2]
    assert lines == CliRunner().invoke(cli, [*arguments, "--json"]).output.splitlines()
