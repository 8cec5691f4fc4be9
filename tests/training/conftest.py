"""A tiny model, and batches made of random ids. Hypothesis without deadlines: the cores are shared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from miles_core.contracts.backends import BackendStart
from miles_core.data.group import Batch, Episode, Group, Prompt
from miles_core.data.trajectory import Status, Trajectory
from miles_core.training.fsdp import FsdpBackend
from miles_core.training.settings import FsdpConfig

settings.register_profile("training", deadline=None)
settings.load_profile("training")


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    from miles_core.models.tiny import build_tiny

    target = tmp_path_factory.mktemp("tiny")
    build_tiny(target, seed=3)
    return target


def make_batch(seed: int = 0, *, groups: int = 2, size: int = 4, version: int = 0, reward=None) -> Batch:
    """Groups of one-trajectory episodes with answers of 1 to 5 tokens; one empty answer, one masked span."""
    rng = np.random.default_rng(seed)
    made = []
    for g in range(groups):
        prompt = rng.integers(3, 290, 6)
        episodes = []
        for e in range(size):
            length = 0 if (g, e) == (0, 0) else int(rng.integers(1, 6))
            ids = np.concatenate([prompt, rng.integers(3, 290, length)]).astype(np.int32)
            sampled = np.arange(len(ids)) >= len(prompt)
            mask = sampled & ((g, e) != (0, 1))
            name = f"g{g}e{e}"
            trajectory = Trajectory(
                token_ids=ids,
                loss_mask=mask,
                logprobs=np.where(sampled, -5.0, 0.0).astype(np.float32),
                versions=np.where(sampled, version, -1).astype(np.int32),
                prompt_id=f"p{g}",
                group_id=f"g{g}",
                episode_id=name,
                trajectory_id=name,
                reward=float(rng.random()) if reward is None else reward,
            )
            episodes.append(
                Episode(
                    episode_id=name,
                    prompt_id=f"p{g}",
                    group_id=f"g{g}",
                    status=Status.COMPLETED,
                    trajectories=(trajectory,),
                    reward=trajectory.reward,
                )
            )
        made.append(Group(group_id=f"g{g}", prompt=Prompt(prompt_id=f"p{g}", messages=()), episodes=tuple(episodes)))
    return Batch(groups=tuple(made), policy_version=version, step=0)


def make_backend(directory: Path, *, dtype: str = "float32", temperature: float = 1.0, **config) -> FsdpBackend:
    backend = FsdpBackend(FsdpConfig(**{"learning_rate": 1e-2, **config}))
    backend.start(BackendStart(model_directory=directory, dtype=dtype, seed=0, temperature=temperature, total_steps=10))
    return backend


@pytest.fixture(scope="session")
def batches():
    return make_batch


@pytest.fixture(scope="session")
def backends(directory):
    return lambda **config: make_backend(directory, **config)
