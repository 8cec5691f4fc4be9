"""Kinds of faults in the numbers of training that users of comparable systems met: the right values."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from miles_core.contracts.backends import BackendStart  # noqa: E402
from miles_core.contracts.component import ComponentConfig  # noqa: E402
from miles_core.contracts.engines import Sampling  # noqa: E402
from miles_core.contracts.environments import EpisodeTask  # noqa: E402
from miles_core.contracts.objective import BatchColumns  # noqa: E402
from miles_core.contracts.rewards import Sample  # noqa: E402
from miles_core.data.checksums import checksum  # noqa: E402
from miles_core.data.group import Batch, Episode, Group, Prompt  # noqa: E402
from miles_core.data.tokenizer import load_tokenizer  # noqa: E402
from miles_core.data.trajectory import Status, Trajectory  # noqa: E402
from miles_core.engines.pool import EnginePool  # noqa: E402
from miles_core.models.tiny import build_tiny  # noqa: E402
from miles_core.objective.compose import WeightedTerm, compose  # noqa: E402
from miles_core.objective.none import NoAdvantages  # noqa: E402
from miles_core.objective.reinforce_pp import ReinforcePlusPlus, ReinforcePlusPlusConfig  # noqa: E402
from miles_core.objective.supervised import Supervised as SupervisedTerm  # noqa: E402
from miles_core.rollout.environments.supervised import Supervised, SupervisedConfig  # noqa: E402
from miles_core.sync.shared_memory import SharedMemoryTransport  # noqa: E402
from miles_core.sync.transaction import publish  # noqa: E402
from miles_core.testing.stub_engine import StubEngine, hashed_script, stub_engine  # noqa: E402
from miles_core.tito.families.chatml import ChatMLFamily  # noqa: E402
from miles_core.training.fsdp import FsdpBackend  # noqa: E402
from miles_core.training.settings import FsdpConfig  # noqa: E402

LIKELIHOOD = compose(
    estimator=NoAdvantages(ComponentConfig()),
    terms=[WeightedTerm(name="supervised", term=SupervisedTerm(ComponentConfig()))],
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("tiny")
    build_tiny(target, seed=3)
    return target


def backend(directory: Path, *, dtype: str = "float32", temperature: float = 1.0, **config: Any) -> FsdpBackend:
    made = FsdpBackend(FsdpConfig(**{"learning_rate": 1e-2, **config}))
    made.start(BackendStart(model_directory=directory, dtype=dtype, seed=0, temperature=temperature, total_steps=10))
    return made


def batch(*, seed: int = 0, trains: bool = True) -> Batch:
    """One group of two episodes with a prompt of 4 and an answer of 6 tokens."""
    rng = np.random.default_rng(seed)
    episodes = []
    for name in ("a", "b"):
        sampled = np.arange(10) >= 4
        trajectory = Trajectory(
            token_ids=rng.integers(3, 290, 10).astype(np.int32),
            loss_mask=sampled if trains else np.zeros(10, bool),
            logprobs=np.where(sampled, -5.0, 0.0).astype(np.float32),
            versions=np.where(sampled, 0, -1).astype(np.int32),
            prompt_id="p",
            group_id="g",
            episode_id=name,
            trajectory_id=name,
            reward=1.0,
        )
        episodes.append(
            Episode(
                episode_id=name,
                prompt_id="p",
                group_id="g",
                status=Status.COMPLETED,
                trajectories=(trajectory,),
                reward=1.0,
            )
        )
    group = Group(group_id="g", prompt=Prompt(prompt_id="p", messages=()), episodes=tuple(episodes))
    return Batch(groups=(group,), policy_version=0, step=0)


def test_all_labels_masked_is_a_step_of_zero_that_says_it_trained_nothing(directory: Path) -> None:
    trained = backend(directory)
    before = {name: tensor.clone() for name, tensor in trained.named_weights()}
    report = trained.train_step(batch(trains=False), LIKELIHOOD)
    assert (report.loss, report.grad_norm) == (0.0, 0.0)
    assert all(np.isfinite(value) for value in report.metrics.values())
    assert all(torch.equal(before[name], tensor) for name, tensor in trained.named_weights())


async def test_adapters_are_delivered_at_every_step(directory: Path, tmp_path: Path) -> None:
    """After each step the engine holds the trainer's checksums, and those of every adapted layer are new."""
    pytest.importorskip("peft")
    trained = backend(directory, lora={"rank": 2, "targets": ("q_proj", "down_proj")})
    transport = SharedMemoryTransport(ComponentConfig())
    sender, receiver = transport.sender(tmp_path), transport.receiver(tmp_path)
    engine, held = StubEngine(hashed_script(10, 2)), []
    async with stub_engine(engine) as url:
        pool = EnginePool([url], deadline=5.0)
        try:
            for version in (1, 2, 3, 4):
                published = sender.send(version, trained.named_weights())
                await publish(published, receiver, pool, mode="retract", transport="shared_memory")
                assert engine.weights == {t.name: t.checksum for t in published.tensors}
                held.append(dict(engine.weights))
                trained.train_step(batch(seed=version), LIKELIHOOD)
        finally:
            await receiver.close()
            sender.close()
            await pool.close()
    adapted = {name for name in held[0] if name.split(".")[-2] in ("q_proj", "down_proj")}
    assert adapted
    for earlier, later in pairwise(held):
        assert {name for name in held[0] if earlier[name] != later[name]} == adapted


def test_logprobs_are_at_the_temperature_of_sampling(directory: Path) -> None:
    """At another temperature than that of sampling, first-token ratios were 2 before any step."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory)
    trajectory = batch().trajectories[0]
    ids = torch.tensor(trajectory.token_ids.tolist())
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1]
    sampled = (logits / 0.6).log_softmax(-1).gather(-1, ids[1:, None])[:, 0].numpy()
    right, wrong = (backend(directory, temperature=t).logprobs([trajectory])[0][1:] for t in (0.6, 1.0))
    np.testing.assert_allclose(np.exp(right - sampled), 1, atol=1e-4)
    assert float(np.abs(np.exp(wrong - sampled) - 1).max()) > 0.1


def test_mathematics_is_checked_in_a_thread_that_is_not_the_main_one() -> None:
    pytest.importorskip("math_verify")
    from miles_core.rollout.rewards.math import MathConfig, MathReward

    prompt = Prompt(prompt_id="p", messages=(), label="1/3")
    sample = Sample(prompt=prompt, response=r"\boxed{\frac{1}{3}}", messages=(), episode=batch().groups[0].episodes[0])
    scores: list[float] = []

    async def score() -> None:
        reward = MathReward(MathConfig())
        try:
            scores.extend(await reward.score([sample]))
        finally:
            await reward.close()

    thread = threading.Thread(target=lambda: asyncio.run(score()))
    thread.start()
    thread.join(60)
    assert scores == [1.0]


def test_small_updates_are_not_lost_in_bfloat16(directory: Path) -> None:
    """1 − 6e-4 is 1 in bfloat16; the masters keep it, also where the engines' copy does not change."""
    assert torch.tensor(1.0 - 6e-4).bfloat16() == 1.0
    trained = backend(directory, dtype="bfloat16", learning_rate=6e-4)
    norms = {name: tensor.clone() for name, tensor in trained.named_weights() if name.endswith("norm.weight")}
    assert all(bool((tensor == 1).all()) for tensor in norms.values())
    trained.train_step(batch(), LIKELIHOOD)
    moved = {name: tensor for name, tensor in trained.named_weights() if name in norms}
    assert all(tensor.dtype == torch.float32 for tensor in moved.values())
    assert any(bool((tensor != 1).any()) for tensor in moved.values())


def test_a_changed_sign_of_zero_is_a_change_of_bytes() -> None:
    positive, negative = torch.tensor([0.0]), torch.tensor([-0.0])
    assert torch.equal(positive, negative)
    assert checksum(positive.numpy().tobytes()) != checksum(negative.numpy().tobytes())


def test_whitening_is_over_the_global_batch_and_empty_masks_are_in_it_too() -> None:
    """The columns of a rank whose mask is empty add nothing, and nobody whitens a part. That such a rank takes part in
    every collective is in tests/training/test_ranks.py."""
    rewards, lengths = [0.0, 1.0, 3.0, 9.0], [2, 1, 2, 3]

    def advantages(mask: Callable[[int], bool]) -> Any:
        columns = BatchColumns(
            offsets=torch.tensor([0, *np.cumsum(lengths)]),
            episode_of=torch.arange(4),
            group_of=torch.zeros(4, dtype=torch.int64),
            rewards=torch.tensor(rewards, dtype=torch.float64),
            truncated=torch.zeros(4, dtype=torch.bool),
            loss_mask=torch.tensor([mask(i) for i, n in enumerate(lengths) for _ in range(n)]),
            rollout_logprobs=torch.zeros(8),
            versions=torch.zeros(8, dtype=torch.int32),
            policy_version=0,
        )
        return ReinforcePlusPlus(ReinforcePlusPlusConfig()).estimate(columns).advantages

    flat = np.repeat(rewards, lengths)
    np.testing.assert_allclose(advantages(lambda i: True), (flat - flat.mean()) / flat.std(ddof=1), rtol=1e-5)
    kept = flat[:5]
    expected = np.concatenate([(kept - kept.mean()) / kept.std(ddof=1), [0, 0, 0]])
    np.testing.assert_allclose(advantages(lambda i: i < 3), expected, rtol=1e-5)
    assert advantages(lambda i: False).tolist() == [0.0] * 8


@pytest.mark.parametrize("train", ["all", "last"])
async def test_a_conversation_without_an_assistant_trains_nothing(directory: Path, train: Any) -> None:
    """`mask[-0:]` is everything."""
    environment = Supervised(SupervisedConfig(train=train))
    environment.bind(ChatMLFamily(ChatMLFamily.Config()), load_tokenizer(directory))
    task = EpisodeTask(
        prompt=Prompt(prompt_id="p", messages=({"role": "user", "content": "hello"},)),
        group_id="g",
        episode_id="e",
        sampling=Sampling(max_new_tokens=1),
        seed=0,
        max_tokens=0,
    )
    episode = await environment.generate(task, None)  # type: ignore[arg-type]
    assert [t.trainable_tokens for t in episode.trajectories] == [0]
