"""Batches of branching episodes, and a step's loss and whole gradient, for tests in one process and in several."""

from __future__ import annotations

import dataclasses
from types import MethodType

import numpy as np
import torch
from conftest import make_batch

from miles_core.contracts.component import ComponentConfig
from miles_core.data.group import Batch, Episode
from miles_core.objective.compose import WeightedTerm, compose
from miles_core.objective.entropy import Entropy
from miles_core.objective.kl import Kl, KlConfig
from miles_core.objective.policy import Policy, PolicyConfig
from miles_core.objective.reinforce_pp import ReinforcePlusPlusBaseline, ReinforcePlusPlusConfig
from miles_core.objective.tis import Tis, TisConfig
from miles_core.training.sharding import gathered


def objective(aggregation="sequence", ratio="token"):
    """Whitened advantages, a reference, an entropy, a correction: everything that knows the whole batch."""
    return compose(
        estimator=ReinforcePlusPlusBaseline(ReinforcePlusPlusConfig()),
        terms=[
            WeightedTerm(name="policy", term=Policy(PolicyConfig(ratio=ratio))),
            WeightedTerm(name="kl", term=Kl(KlConfig()), coefficient=0.1),
            WeightedTerm(name="entropy", term=Entropy(ComponentConfig()), coefficient=0.01),
        ],
        corrections=[("tis", Tis(TisConfig()))],
        aggregation=aggregation,
        constant_length=7,
    )


def branching(seed=0) -> Batch:
    """Every episode has two trajectories, which land apart."""
    batch = make_batch(seed, groups=3, size=6)
    groups = []
    for group in batch.groups:
        episodes = []
        for i in range(3):
            first, second = group.episodes[i], group.episodes[i + 3]
            parts = [
                dataclasses.replace(t, episode_id=first.episode_id, reward=first.reward)
                for t in (*first.trajectories, *second.trajectories)
            ]
            episodes.append(dataclasses.replace(first, trajectories=tuple(parts)))
        groups.append(dataclasses.replace(group, episodes=tuple(episodes)))
    return dataclasses.replace(batch, groups=tuple(groups))


def changed(batch: Batch, trajectory) -> Batch:
    """The batch with every trajectory replaced by what the function makes of it."""

    def episode(old: Episode) -> Episode:
        return dataclasses.replace(old, trajectories=tuple(trajectory(t) for t in old.trajectories))

    groups = [dataclasses.replace(g, episodes=tuple(map(episode, g.episodes))) for g in batch.groups]
    return dataclasses.replace(batch, groups=tuple(groups))


def padded(batch: Batch) -> Batch:
    """Three tokens that nobody sampled behind every trajectory."""

    def longer(t):
        return dataclasses.replace(
            t,
            token_ids=np.append(t.token_ids, [0, 0, 0]).astype(np.int32),
            loss_mask=np.append(t.loss_mask, [False] * 3),
            logprobs=np.append(t.logprobs, [0, 0, 0]).astype(np.float32),
            versions=np.append(t.versions, [-1, -1, -1]).astype(np.int32),
        )

    return changed(batch, longer)


def reordered(batch: Batch) -> Batch:
    """Groups, episodes and trajectories in the opposite order."""
    groups = [
        dataclasses.replace(
            g,
            episodes=tuple(
                dataclasses.replace(e, trajectories=tuple(reversed(e.trajectories))) for e in reversed(g.episodes)
            ),
        )
        for g in reversed(batch.groups)
    ]
    return dataclasses.replace(batch, groups=tuple(groups))


def step(backend, batch, own):
    """Loss and the whole gradient, by parameter, of a step that moves nothing."""
    found = {}

    def look(trainer):
        for name, parameter in trainer.scorer.named_parameters():
            if parameter.grad is not None:
                found[name] = gathered(parameter.grad).clone()
        trainer._forget_gradients()
        return 0.0

    backend.trainer._move = MethodType(look, backend.trainer)
    try:
        report = backend.train_step(batch, own)
    finally:
        del backend.trainer._move
    return report.loss, found


def projections(gradients):
    """A few numbers that any change of a gradient would change, for JSON: by parameter its norm and one projection."""
    numbers = {}
    for name, gradient in gradients.items():
        flat = gradient.flatten().double()
        numbers[name] = [float(flat.norm()), float(flat @ torch.arange(len(flat), dtype=torch.float64).cos())]
    return numbers
