"""Rewards for the tests of the loop."""

from __future__ import annotations

import asyncio
import math

from miles_core.contracts.rewards import Sample


def length(sample: Sample) -> float:
    return float(sum(sample.episode.trajectories[0].token_ids.tolist()) % 7)


def broken(sample: Sample) -> float:
    raise RuntimeError("no idea what this is worth")


def nan(sample: Sample) -> float:
    return math.nan


def sometimes_constant(sample: Sample) -> float:
    constant = int(sample.prompt.prompt_id.rpartition(":")[2]) % 2
    return 1.0 if constant else length(sample) + int(sample.episode.episode_id[-1])


async def hangs(sample: Sample) -> float:
    await asyncio.sleep(3600)
    return 0.0
