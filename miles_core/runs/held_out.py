"""Held-out evaluation: the sets that a config describes, and measuring a model on them outside a run."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from functools import partial
from pathlib import Path

from miles_core.config.load import LoadedConfig
from miles_core.config.run import RunConfig
from miles_core.contracts.engines import EngineStart, Sampling
from miles_core.contracts.events import EvaluationPoint
from miles_core.data.tokenizer import load_tokenizer
from miles_core.engines.pool import EnginePool
from miles_core.errors import ConfigError, Problem
from miles_core.evaluation.evaluate import EvaluationSet, evaluate
from miles_core.models.reference import resolve_model
from miles_core.plugins import PluginManager
from miles_core.rollout.admission import EngineHold
from miles_core.rollout.episodes import score_group
from miles_core.runs.components import Components, build_components, greedy, sampling_of, stop_ids

__all__ = ["evaluation_sets", "measure"]


def evaluation_sets(config: RunConfig, components: Components, sampling: Sampling) -> list[EvaluationSet]:
    """What `[evaluation]` asks for: each data set sampled, and greedily too where it says so."""
    sets = []
    for section, source in zip(config.evaluation.datasets, components.evaluation_sources, strict=True):
        count = min(section.prompts or len(source), len(source))
        sampled = EvaluationSet(
            name=section.name,
            mode="sampled",
            prompts=tuple(source.prompt(index) for index in range(count)),
            samples=section.samples,
            sampling=sampling,
            max_tokens=config.sampling.max_tokens,
        )
        sets.append(sampled)
        if section.greedy:
            sets.append(dataclasses.replace(sampled, mode="greedy", samples=1, sampling=greedy(sampling)))
    return sets


def measure(loaded: LoadedConfig, plugins: PluginManager, model: str | None) -> list[EvaluationPoint]:
    """Measure `model` (a reference; None: the config's own) on the held-out data of a config, on engines of its own."""
    if not loaded.config.evaluation.datasets:
        problem = Problem(
            key="evaluation.datasets",
            message="there is no data set to evaluate on",
            hint="add a [[evaluation.datasets]] table with name, use and the source's keys",
        )
        raise ConfigError([problem])
    if loaded.config.run.mode == "supervised":
        problem = Problem(
            key="run.mode",
            message="a supervised run has no engine to sample with: its held-out loss is measured while it trains",
            hint="measure its exported model with a config that says how to sample and score",
        )
        raise ConfigError([problem])
    return asyncio.run(_measure(loaded.config, build_components(loaded.config, plugins), model))


async def _measure(config: RunConfig, parts: Components, model: str | None) -> list[EvaluationPoint]:
    resolved = await asyncio.to_thread(resolve_model, model or config.model.path)
    tokenizer = load_tokenizer(resolved.directory)
    parts.environment.bind(parts.family, tokenizer)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            await parts.reward.setup()
            await parts.environment.setup()
            start = EngineStart(
                model_directory=resolved.directory,
                dtype=config.model.dtype,
                run_directory=Path(scratch),
                wait_for_weights=False,
                policy_version=0,
                environment={},
            )
            pool = EnginePool(await parts.engine.start(parts.launcher, start))
            try:
                return [
                    (
                        await evaluate(
                            dataset,
                            parts.environment,
                            EngineHold(pool),
                            partial(score_group, reward=parts.reward, reward_key=config.reward.reward_key),
                            version=0,
                            seed=config.run.seed,
                            timeout=config.schedule.episode_timeout,
                            reward_key=config.reward.reward_key,
                        )
                    )[0]
                    for dataset in evaluation_sets(config, parts, sampling_of(config, stop_ids(parts, tokenizer)))
                ]
            finally:
                await pool.close()
        finally:
            await parts.environment.close()
            await parts.engine.stop()
            await parts.reward.close()
            await parts.launcher.close()
