"""Heavy-tailed episodes under the real producer and scheduler: an engine that answers at once, tools that sleep for
log-normal times, and a train step of a fixed time. Runs in real time, or on `VirtualLoop`."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import selectors
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.engines import EngineClient, Generation, OnTokens, Sampling, TokenIds
from miles_core.contracts.environments import EpisodeTask, GenerateEnvironment
from miles_core.data.group import Episode, Group, Prompt
from miles_core.data.trajectory import Status
from miles_core.rollout.admission import EngineHold
from miles_core.rollout.ledger import Ledger
from miles_core.rollout.policy import SchedulePolicy
from miles_core.rollout.producer import Producer
from miles_core.rollout.recorder import TrajectoryRecorder
from miles_core.rollout.scheduler import Scheduler

__all__ = ["HeavyTail", "VirtualLoop", "Wall", "measure_wall"]


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer instead of waiting for it. For code that waits for timers and
    tasks alone."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        self._now += seconds


class _Jump(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout:
            self._loop.jump(timeout)
        return super().select(0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HeavyTail:
    """The load: `turns` tool calls an episode, each of log-normal seconds with median `tool_seconds` and shape `sigma`;
    `train_seconds` a step."""

    train_seconds: float
    tool_seconds: float
    turns: int = 3
    sigma: float = 1.0
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Wall:
    """What a run took: seconds in all, seconds that the trainer waited, mean staleness of the trained groups."""

    seconds: float
    trainer_idle: float
    staleness: float


class _Engine:
    """Answers at once with one token of the current version."""

    def __init__(self) -> None:
        self.version = 0
        self.interruptions = 0

    async def generate(
        self,
        input_ids: TokenIds,
        sampling: Sampling,
        *,
        routing_key: str = "",
        priority: int = 0,
        on_tokens: OnTokens | None = None,
    ) -> Generation:
        return Generation(
            token_ids=np.array([1], np.int32),
            logprobs=np.array([-1.0], np.float32),
            versions=np.array([self.version], np.int32),
            finish_reason="stop",
            engine="instant",
            prompt_tokens=len(input_ids),
            cached_tokens=0,
            started=0.0,
            finished=0.0,
        )

    async def interrupt(self) -> None: ...

    def forget(self, routing_key: str) -> None: ...


class _Sleeps(GenerateEnvironment[ComponentConfig]):
    def __init__(self, load: HeavyTail) -> None:
        super().__init__(ComponentConfig())
        self._load = load

    async def generate(self, task: EpisodeTask, engine: EngineClient) -> Episode:
        generator = random.Random(task.seed)
        recorder = TrajectoryRecorder(task)
        for _ in range(self._load.turns):
            recorder.append_prompt([0])
            recorder.append_generation(await engine.generate(recorder.ids, task.sampling))
            await asyncio.sleep(self._load.tool_seconds * generator.lognormvariate(0, self._load.sigma))
        trajectory = recorder.build(Status.COMPLETED)
        return Episode(
            episode_id=task.episode_id,
            prompt_id=task.prompt.prompt_id,
            group_id=task.group_id,
            status=Status.COMPLETED,
            trajectories=(trajectory,),
        ).with_reward(1.0)


def _prompt_at(position: int) -> Prompt:
    return Prompt(prompt_id=f"p{position}", messages=())


async def _scored(group: Group) -> Group:
    return group


async def measure_wall(policy: SchedulePolicy, load: HeavyTail, *, steps: int) -> Wall:
    """Take `steps` steps and measure them by the running loop's clock. The ledger is checked at the end."""
    clock = asyncio.get_running_loop().time
    ledger = Ledger(Path(":memory:"))
    engine = _Engine()
    producer = Producer(
        Scheduler(policy, ledger, _prompt_at, seed=load.seed, clock=clock),
        _Sleeps(load),
        EngineHold(engine, partial=policy.partial, decode=str),
        _scored,
        (),
        sampling=Sampling(max_new_tokens=1),
        max_tokens=0,
        episode_timeout=1e9,
        ordered=policy.waves,
        parks=policy.mode == "sync" and policy.partial,
        reward_key=None,
        on_finished=lambda group: None,
        on_dropped=lambda group_id, reason: None,
    )
    begin, idle = clock(), 0.0
    ages: list[int] = []
    for step in range(steps):
        wanted = clock()
        groups = await producer.batch(step, step)
        idle += clock() - wanted
        ages += [step - (group.oldest_version or 0) for group in groups]
        await asyncio.sleep(load.train_seconds)
        ledger.move([group.group_id for group in groups], "trained", step=step)
        engine.version = step + 1
    seconds = clock() - begin
    await producer.stop()
    ledger.check()
    ledger.close()
    return Wall(seconds=seconds, trainer_idle=idle, staleness=sum(ages) / len(ages))
