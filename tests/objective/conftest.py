"""Slow plain-Python float64 references, loops over lists, and random batches to compare on.

Tests reach them through the fixture `slow`.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from types import ModuleType

import pytest
import torch
from hypothesis import settings

from miles_core.contracts.objective import BatchColumns

settings.register_profile("objective", deadline=None)
settings.load_profile("objective")


@pytest.fixture(scope="session")
def slow() -> ModuleType:
    return sys.modules[__name__]


def make_columns(seed=0, *, groups=3, masked=0.25, branching=True, **extra):
    """A random global batch: uneven groups, branching episodes, masked spans, empty and all-masked trajectories."""
    rng = random.Random(seed)
    offsets, episode_of, group_of, rewards, truncated, mask = [0], [], [], [], [], []
    for group in range(groups):
        for _ in range(rng.choice([1, 2, 3, 5])):
            episode = len(rewards)
            rewards.append(rng.choice([0.0, 1.0, rng.uniform(-2, 2)]))
            group_of.append(group)
            for _ in range(rng.choice([1, 1, 3]) if branching else 1):
                length = rng.choice([0, 1, 2, 5, 8])
                kind = rng.random()
                mask += [kind > 0.15 and rng.random() > masked for _ in range(length)]
                offsets.append(offsets[-1] + length)
                episode_of.append(episode)
                truncated.append(rng.random() < 0.3)
    tokens = offsets[-1]
    column = lambda low, high: torch.tensor([rng.uniform(low, high) for _ in range(tokens)])  # noqa: E731
    fields = {
        "offsets": torch.tensor(offsets),
        "episode_of": torch.tensor(episode_of),
        "group_of": torch.tensor(group_of),
        "rewards": torch.tensor(rewards, dtype=torch.float64),
        "truncated": torch.tensor(truncated),
        "loss_mask": torch.tensor(mask, dtype=torch.bool),
        "rollout_logprobs": column(-3, 0),
        "versions": torch.zeros(tokens, dtype=torch.int32),
        "policy_version": 0,
        "old_logprobs": column(-3, 0),
        "reference_logprobs": column(-3, 0),
        "teacher_logprobs": column(-3, 0),
        "values": column(-1, 1),
        "trajectory_ids": tuple(f"t{i}" for i in range(len(episode_of))),
    }
    return BatchColumns(**{**fields, **extra})


def plain_columns(rewards, groups, lengths=None, masks=None, logprobs=None, old=None):
    """One trajectory an episode, given by lists."""
    lengths = [len(m) for m in masks] if masks else lengths or [1] * len(rewards)
    tokens = sum(lengths)
    flat = [m for row in masks for m in row] if masks else [True] * tokens
    return BatchColumns(
        offsets=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]),
        episode_of=torch.arange(len(rewards)),
        group_of=torch.tensor(groups),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        truncated=torch.zeros(len(rewards), dtype=torch.bool),
        loss_mask=torch.tensor(flat, dtype=torch.bool),
        rollout_logprobs=torch.tensor(logprobs or [-1.0] * tokens),
        versions=torch.zeros(tokens, dtype=torch.int32),
        policy_version=0,
        old_logprobs=torch.tensor(old) if old else None,
        trajectory_ids=tuple(f"t{i}" for i in range(len(rewards))),
    )


def trajectories(columns):
    """For each trajectory: (episode, [token indices that train])."""
    offsets, mask = columns.offsets.tolist(), columns.loss_mask.tolist()
    return [
        (episode, [t for t in range(offsets[s], offsets[s + 1]) if mask[t]])
        for s, episode in enumerate(columns.episode_of.tolist())
    ]


def grpo(rewards, groups, scale="group", leave_one_out=False):
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        own = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if len(own) < 2 or max(own) - min(own) <= 1e-6 * max(abs(r) for r in own):
            out.append(0.0)
            continue
        mean = math.fsum(own) / len(own)
        if leave_one_out:
            mean = (math.fsum(own) - reward) / (len(own) - 1)
        value = reward - mean
        if scale == "group":
            value /= statistics.stdev(own) + 1e-6
        if scale == "batch":
            value /= statistics.stdev(rewards) + 1e-6
        out.append(value)
    return out


def whiten(values):
    if len(values) < 2:
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    return [(v - mean) / math.sqrt(statistics.variance(values) + 1e-8) for v in values]


def aggregate(columns, per_token, kind, constant_length=7):
    """The loss as the definitions say, from lists."""
    by_episode = {}
    for episode, tokens in trajectories(columns):
        by_episode.setdefault(episode, []).extend(per_token[t] for t in tokens)
    rows = [row for row in by_episode.values() if row]
    if not rows:
        return 0.0
    if kind == "token":
        return math.fsum(x for row in rows for x in row) / sum(len(row) for row in rows)
    if kind == "sequence":
        return math.fsum(math.fsum(row) / len(row) for row in rows) / len(rows)
    return math.fsum(x for row in rows for x in row) / (constant_length * len(rows))
