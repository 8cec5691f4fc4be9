"""The rollout side of a run: the producer from a config, and what a step's rollouts come to in numbers."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from miles_core.config.run import RunConfig
from miles_core.config.sections import ScheduleSection
from miles_core.contracts.backends import StepReport
from miles_core.contracts.engines import Sampling
from miles_core.data.group import Batch, Group, Prompt
from miles_core.rollout.admission import EngineHold
from miles_core.rollout.episodes import score_group
from miles_core.rollout.ledger import Ledger
from miles_core.rollout.order import PromptOrder
from miles_core.rollout.policy import SchedulePolicy
from miles_core.rollout.producer import Producer, Score
from miles_core.rollout.scheduler import Scheduler
from miles_core.runs.components import Components
from miles_core.runs.recording import Recorder, batch_metrics

if TYPE_CHECKING:
    from miles_core.engines.pool import EnginePool

__all__ = ["StepMeter", "make_producer", "make_scheduler", "policy_of", "scorer"]


def policy_of(schedule: ScheduleSection) -> SchedulePolicy:
    """`[schedule]` as the scheduler reads it."""
    return SchedulePolicy(
        mode=schedule.mode,
        batch_groups=schedule.batch_groups,
        group_size=schedule.group_size,
        retries=schedule.retries,
        max_drops=schedule.max_drops,
        over_sample=schedule.over_sample,
        partial=schedule.partial,
        max_running=schedule.max_running or 2 * schedule.batch_groups * schedule.group_size,
        slot=schedule.slot,
        capacity=schedule.capacity,
        max_staleness=schedule.max_staleness,
        stale=schedule.stale,
        stale_decay=schedule.stale_decay,
        order=schedule.order,
        adaptive=schedule.adaptive,
        target_staleness=schedule.target_staleness,
    )


def scorer(config: RunConfig, parts: Components) -> Score:
    """How a group is scored: the config's reward, under its deadline."""
    return partial(
        score_group,
        reward=parts.reward,
        reward_key=config.reward.reward_key,
        timeout=config.schedule.reward_timeout,
    )


def make_scheduler(config: RunConfig, parts: Components, ledger: Ledger) -> Scheduler:
    """The scheduler of a run whose ledger is new, or was rewound."""
    order = PromptOrder(len(parts.source), config.run.seed, shuffle=True)

    def prompt_at(position: int) -> Prompt:
        epoch, index = order.row(position)
        return parts.source.prompt(index, epoch=epoch)

    return Scheduler(policy_of(config.schedule), ledger, prompt_at, seed=config.run.seed)


def make_producer(
    config: RunConfig,
    parts: Components,
    scheduler: Scheduler,
    hold: EngineHold,
    score: Score,
    record: Recorder,
    *,
    sampling: Sampling,
) -> Producer:
    """The producer that carries out what the scheduler decides."""

    def finished(group: Group) -> None:
        record.emit("miles_group_finished", group=group)

    def dropped(group_id: str, reason: str) -> None:
        record.emit("miles_group_dropped", group_id=group_id, reason=reason)

    policy = policy_of(config.schedule)
    return Producer(
        scheduler,
        parts.environment,
        hold,
        score,
        parts.filters,
        sampling=sampling,
        max_tokens=config.sampling.max_tokens,
        episode_timeout=config.schedule.episode_timeout,
        ordered=policy.waves,
        parks=policy.mode == "sync" and policy.partial,
        reward_key=config.reward.reward_key,
        on_finished=finished,
        on_dropped=dropped,
    )


class StepMeter:
    """Logs what a step was. Engines and pool count from the start of the run; a step is the difference."""

    def __init__(self, record: Recorder, pool: EnginePool, producer: Producer, reward_key: str | None) -> None:
        self._record = record
        self._pool = pool
        self._producer = producer
        self._reward_key = reward_key
        self._asked = self._stepped = time.monotonic()
        self._busy: dict[str, float] = {}
        self._seen = (0, 0, 0)

    async def engines(self, step: int) -> None:
        """The engines' own account of their time since the last step, in seconds of one engine. One that cannot be
        asked is left out, and one that was started again counts from 0."""
        counters = {a.url: float(a.info.get("busy_seconds", 0.0)) for a in await self._pool.answering()}
        if not counters:
            return
        now = time.monotonic()
        before = {url: self._busy.get(url, 0.0) for url in counters}
        spent = sum(busy - (before[url] if busy >= before[url] else 0.0) for url, busy in counters.items())
        span = (now - self._asked) * len(counters)
        self._busy, self._asked = {**self._busy, **counters}, now
        self._record.log("time", step, {"engine/busy_seconds": spent, "engine/idle_seconds": max(span - spent, 0.0)})

    def step(self, batch: Batch, report: StepReport) -> dict[str, float]:
        """Log the step that was taken on `batch`. Returns what a live panel shows."""
        step = batch.step + 1
        scheduler = self._producer.scheduler
        rollout = batch_metrics(batch, self._reward_key)
        rollout |= {f"dropped/{reason}": float(n) for reason, n in sorted(scheduler.dropped.items())}
        training = {
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "learning_rate": report.learning_rate,
            **report.metrics,
        }
        self._record.log("rollout", step, rollout)
        self._record.log("train", step, training)
        returned = {f"returned/{why}": float(n) for why, n in sorted(scheduler.returned.items())}
        self._record.log("schedule", step, {**scheduler.metrics, **returned})
        self._record.log("time", step, self._times(batch, report))
        return {"reward": rollout["reward/mean"], "loss": report.loss, "grad_norm": report.grad_norm}

    def _times(self, batch: Batch, report: StepReport) -> dict[str, float]:
        pool, before = self._pool, self._stepped
        self._stepped = time.monotonic()
        seen = (pool.prompt_tokens, pool.cached_tokens, pool.sampled_tokens)
        prompt, cached, sampled = (new - old for new, old in zip(seen, self._seen, strict=True))
        self._seen = seen
        tools = sum(e.metrics.get("tool_seconds", 0.0) for e in batch.episodes)
        return {
            **{f"backend/{name}": value for name, value in report.seconds.items()},
            "engine/prefix_hit_rate": cached / prompt if prompt else 0.0,
            "engine/sampled_tokens": float(sampled),
            "engine/tokens_per_second": sampled / max(self._stepped - before, 1e-9),
            "rollout/tool_seconds": tools,
        }
