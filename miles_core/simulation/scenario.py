"""A scenario: what the simulator is told, as one TOML file. `[schedule]` is that of a run config, key for key."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from miles_core.config.load import problems_of
from miles_core.config.origins import OriginTree, read_toml
from miles_core.config.sections import ScheduleSection, Section
from miles_core.errors import ConfigError, Problem
from miles_core.simulation.distributions import Distribution, Drawn, constant
from miles_core.simulation.measured import measure

__all__ = [
    "EnginesSection",
    "EpisodesSection",
    "Scenario",
    "SimulationSection",
    "TrainerSection",
    "load_scenario",
    "override_key",
    "scenario_of",
]


class SimulationSection(Section):
    """How long, and from which seed."""

    steps: int = Field(default=200, ge=2)
    """Optimizer steps to simulate."""

    warmup: int = Field(default=20, ge=1)
    """First steps that are left out of the numbers: the buffer fills."""

    seed: int = Field(default=0, ge=0)
    """Of every draw. An episode draws by the place of its group and its attempt, so that schedules that are compared
    meet the same episodes."""

    @model_validator(mode="after")
    def _some_steps_count(self) -> SimulationSection:
        if self.warmup >= self.steps:
            raise ValueError(f"warmup = {self.warmup} leaves none of {self.steps} steps to measure")
        return self


class EnginesSection(Section):
    """The inference engines. Decoding requests share an engine's rate; prefill stops its decoding."""

    count: int = Field(ge=1)
    """Engines. A new episode goes to the one with the fewest episodes and stays there."""

    slots: int = Field(ge=1)
    """Requests that one engine runs at once; the others queue."""

    decode: tuple[tuple[int, float], ...] = Field(min_length=1)
    """Pairs of (requests, tokens a second of one engine at that many), ascending; linear between them, in proportion
    below the first, constant above the last."""

    prefill: float = Field(default=float("inf"), gt=0)
    """Prompt tokens a second of one engine."""

    cached: float = Field(default=1.0, ge=0, le=1)
    """Share of a conversation's earlier tokens that its next turn finds in the cache."""

    @model_validator(mode="after")
    def _ascending(self) -> EnginesSection:
        batches = [batch for batch, _ in self.decode]
        if batches[0] < 1 or batches != sorted(set(batches)) or min(rate for _, rate in self.decode) <= 0:
            raise ValueError("decode is pairs of (requests ≥ 1, tokens a second > 0), by ascending requests")
        return self


class EpisodesSection(Section):
    """What an episode does: turns of sampling, each but the last followed by a tool call."""

    turns: Drawn = constant(1)
    """Turns, rounded, at least 1."""

    prompt_tokens: Drawn = constant(0)
    """Tokens of a prompt; one draw a group."""

    tokens: Drawn
    """Tokens that a turn samples, rounded, at least 1."""

    tool_seconds: Drawn = constant(0)
    """Seconds of a tool call."""

    tool_tokens: Drawn = constant(0)
    """Tokens that a tool's answer adds to the conversation."""

    reward_seconds: Drawn = constant(0)
    """Seconds that scoring a group takes."""

    ends_with_tool: bool = False
    """The last turn is followed by a tool call too (a test suite, a sandbox that closes)."""

    failures: float = Field(default=0.0, ge=0, lt=1)
    """Probability that an episode fails, at the end of one of its turns."""

    filtered: float = Field(default=0.0, ge=0, lt=1)
    """Probability that a filter drops a finished group."""


class TrainerSection(Section):
    """The trainer. Its time between two batches is a train step and a publish."""

    train_seconds: Drawn
    """Seconds of a train step."""

    publish_seconds: Drawn = constant(0)
    """Seconds of moving a version to the engines, which stand still meanwhile."""


class Scenario(Section):
    """The whole of a scenario file."""

    simulation: SimulationSection = SimulationSection()
    schedule: ScheduleSection
    engines: EnginesSection
    episodes: EpisodesSection
    trainer: TrainerSection


def load_scenario(path: Path, overrides: Sequence[str] = ()) -> Scenario:
    """Read a scenario; `overrides` are `section.key=value`, the value as TOML. Raises `ConfigError` with all problems.
    A relative `from_run` counts from the working directory."""
    tree, origins = read_toml(path)
    for override in overrides:
        override_key(tree, origins, override)
    return scenario_of(tree, origins)


def scenario_of(tree: Mapping[str, Any], origins: OriginTree, *, read: bool = True) -> Scenario:
    """Validate a parsed scenario, and `read` the runs that it names."""
    try:
        scenario = Scenario.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(problems_of(error, origins, model=Scenario)) from error
    if not read:
        return scenario
    sections = {name: _with_measurements(getattr(scenario, name), name, origins) for name in ("episodes", "trainer")}
    return scenario.model_copy(update=sections)


def override_key(tree: dict[str, Any], origins: OriginTree, override: str) -> None:
    """Set one key, `section.key=value`; a value that is no TOML is a string."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) < 2:
        raise ConfigError([Problem(key="--set", value=override, message="must look like section.key=value")])
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    node = tree
    for part in parts[:-1]:
        inner = node.get(part)
        node[part] = node = dict(inner) if isinstance(inner, dict) else {}
    node[parts[-1]] = value
    origins[key.strip()] = f"--set {override}"


def _with_measurements(section: Section, name: str, origins: OriginTree) -> Section:
    found: dict[str, Distribution] = {}
    for key in type(section).model_fields:
        value = getattr(section, key)
        if isinstance(value, Distribution) and value.from_run is not None:
            try:
                found[key] = value.measured(measure(value.from_run, key))
            except (OSError, ValueError) as error:
                whole = f"{name}.{key}.from_run"
                raise ConfigError(
                    [Problem(key=whole, message=str(error), origin=origins.get(whole, ""), value=str(value.from_run))]
                ) from error
    return section.model_copy(update=found)
