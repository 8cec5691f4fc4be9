"""The teacher of a distillation run: engines of their own, that score what the student sampled."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.config.sections import TeacherSection
from miles_core.contracts.engines import Engine, EngineStart
from miles_core.contracts.launchers import Launcher
from miles_core.data.group import Batch, Episode
from miles_core.data.tokenizer import FileTokenizer, load_tokenizer
from miles_core.data.trajectory import Status, Trajectory
from miles_core.engines.scoring import TokenScores, score_tokens
from miles_core.errors import ModelError
from miles_core.http import JsonHttp
from miles_core.models.reference import resolve_model

__all__ = ["Teacher"]

_PROBE = 'The quick brown fox: 0123456789, naïve façade, {"a": [1, 2]}\n\tend.'


class Teacher:
    """Its weights never change. Log-probs are at the student's sampling temperature."""

    def __init__(self, section: TeacherSection, engine: Engine[Any], *, temperature: float) -> None:
        self._section = section
        self._temperature = temperature
        self._engine = engine
        self._http = JsonHttp()
        self._urls: list[str] = []

    async def start(self, launcher: Launcher[Any], directory: Path, *, dtype: str, student: FileTokenizer) -> None:
        """Start the engines; their logs go under `directory`. Raises `ModelError` for another tokenizer."""
        model = await asyncio.to_thread(resolve_model, self._section.path)
        own = load_tokenizer(model.directory)
        same = own.encode(_PROBE) == student.encode(_PROBE) and own.added_tokens == student.added_tokens
        if not same or own.vocab_size != student.vocab_size:
            raise ModelError(
                f"teacher.path = {self._section.path!r}: its tokenizer differs from the student's, so that its "
                "log-probs would be of other tokens; distillation needs two models with one vocabulary"
            )
        start = EngineStart(
            model_directory=model.directory,
            dtype=dtype,
            run_directory=directory,
            wait_for_weights=False,
            policy_version=0,
            environment={},
        )
        self._urls = await self._engine.start(launcher, start)

    async def annotate(self, batch: Batch) -> Batch:
        """The batch with the teacher's columns on every trajectory that may train. Raises `EngineError`."""
        wanted = [t for e in batch.episodes if e.status is not Status.FAILED for t in e.trajectories]
        scored = [t for t in wanted if t.trainable_tokens]
        scores = await score_tokens(
            self._http,
            self._urls,
            [t.token_ids.tolist() for t in scored],
            temperature=self._temperature,
            top_k=self._section.top_k,
        )
        found = {t.trajectory_id: own for t, own in zip(scored, scores, strict=True)}
        empty = {t.trajectory_id: _nothing(len(t), self._section.top_k) for t in wanted}
        return with_teacher(batch, {**empty, **found})

    async def close(self) -> None:
        """Stop the engines."""
        await self._http.close()
        await self._engine.stop()


def _nothing(tokens: int, top_k: int) -> TokenScores:
    """The scores of a trajectory of which no token trains: nobody reads them."""
    empty = np.zeros((tokens, top_k), np.int32)
    tops = (empty, empty.astype(np.float32)) if top_k else (None, None)
    return TokenScores(np.zeros(tokens, np.float32), *tops)


def with_teacher(batch: Batch, scores: Mapping[str, TokenScores]) -> Batch:
    """The batch with the scores, by trajectory id; trajectories without any stay as they are."""

    def annotated(trajectory: Trajectory) -> Trajectory:
        own = scores.get(trajectory.trajectory_id)
        if own is None:
            return trajectory
        return dataclasses.replace(
            trajectory,
            teacher_logprobs=own.logprobs,
            teacher_top_ids=own.top_ids,
            teacher_top_logprobs=own.top_logprobs,
        )

    def episode(old: Episode) -> Episode:
        return dataclasses.replace(old, trajectories=tuple(annotated(t) for t in old.trajectories))

    groups = tuple(dataclasses.replace(g, episodes=tuple(episode(e) for e in g.episodes)) for g in batch.groups)
    return dataclasses.replace(batch, groups=groups)
