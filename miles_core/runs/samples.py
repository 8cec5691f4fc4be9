"""Preflight of data: rows, chat template and reward, on a sample of rows or on all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from miles_core.config.load import LoadedConfig
from miles_core.contracts.families import ModelFamily, Tokenizer
from miles_core.contracts.rewards import Reward, Sample
from miles_core.contracts.sources import DataSource
from miles_core.data.group import Episode, Prompt
from miles_core.data.tokenizer import load_tokenizer
from miles_core.data.trajectory import Status
from miles_core.errors import MilesError, Problem, RewardError
from miles_core.models.reference import resolve_model
from miles_core.plugins import PluginManager
from miles_core.runs.components import build_components

__all__ = ["check_samples"]

_SAMPLE_ROWS = 3
_MOST_PROBLEMS = 20


def check_samples(loaded: LoadedConfig, plugins: PluginManager, *, every_row: bool) -> list[Problem]:
    """Read rows, render them with the model family, and score a made-up answer. At most 20 problems of rows are told in
    full; the rest are counted."""
    try:
        components = build_components(loaded.config, plugins)
        model = resolve_model(loaded.config.model.path)
        tokenizer = load_tokenizer(model.directory)
    except MilesError as error:
        return [Problem(key="model.path", message=str(error), origin=loaded.origin("model.path"))]
    problems: list[Problem] = []
    sources = [("data", components.source)]
    for index, source in enumerate(components.evaluation_sources):
        sources.append((f"evaluation.datasets.{index}", source))
    limit = loaded.config.sampling.max_tokens
    prompts: list[Prompt] = []
    for key, source in sources:
        found = list(_row_problems(source, components.family, tokenizer, limit=limit, every_row=every_row))
        problems += [Problem(key=key, message=m, origin=loaded.origin(f"{key}.use")) for m in found[:_MOST_PROBLEMS]]
        if len(found) > _MOST_PROBLEMS:
            more = len(found) - _MOST_PROBLEMS
            problems.append(Problem(key=key, message=f"and {more} more rows", origin=loaded.origin(f"{key}.use")))
        if not found and len(source):
            prompts.append(source.prompt(0))
    if prompts:
        problems += asyncio.run(_reward_problems(components.reward, prompts[0], loaded))
    return problems


def _row_problems(
    source: DataSource[Any], family: ModelFamily[Any], tokenizer: Tokenizer, *, limit: int, every_row: bool
) -> Iterator[str]:
    try:
        length = len(source)
    except MilesError as error:
        yield str(error)
        return
    if length == 0:
        yield "the source has no rows"
        return
    rows = range(length) if every_row else sorted({0, length // 2, length - 1})[:_SAMPLE_ROWS]
    for index in rows:
        try:
            prompt = source.prompt(index)
            ids = family.render(prompt.messages, tokenizer, tools=prompt.tools, add_generation_prompt=True)
        except (MilesError, ValueError) as error:
            yield f"row {index}: {error}"
            continue
        if limit and len(ids) >= limit:
            yield f"row {index}: the prompt has {len(ids)} tokens, sampling.max_tokens = {limit} leaves none to sample"


async def _reward_problems(reward: Reward[Any], prompt: Prompt, loaded: LoadedConfig) -> list[Problem]:
    """Score an empty-handed answer: the value is of no interest, that there is one is."""
    episode = Episode(
        episode_id="check/0",
        prompt_id=prompt.prompt_id,
        group_id="check",
        status=Status.COMPLETED,
        trajectories=(),
    )
    answer = str(prompt.label) if prompt.label is not None else ""
    messages = (*prompt.messages, {"role": "assistant", "content": answer})
    sample = Sample(prompt=prompt, response=answer, messages=messages, episode=episode)
    try:
        await reward.setup()
        try:
            await reward.score([sample])
        finally:
            await reward.close()
    except RewardError as error:
        return [Problem(key="reward.use", message=f"on a sample row: {error}", origin=loaded.origin("reward.use"))]
    return []
