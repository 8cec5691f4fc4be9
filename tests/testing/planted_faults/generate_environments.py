"""Faults of generate environments."""

from __future__ import annotations

import asyncio
import dataclasses
import random

import numpy as np

from miles_core.data.trajectory import Status
from miles_core.errors import EngineError
from miles_core.rollout.environments.single_turn import SingleTurn
from planted_faults import scaffolded

Good = scaffolded("generate_environments")
GOOD = (Good, SingleTurn)


def changed(episode, **columns):
    """The episode, its trajectories with other columns or fields."""
    trajectories = tuple(dataclasses.replace(t, **columns) for t in episode.trajectories)
    return dataclasses.replace(episode, trajectories=trajectories)


class Retokenises(SingleTurn):
    """Decodes and encodes again what was sampled."""

    async def generate(self, task, engine):
        episode = await super().generate(task, engine)
        (trajectory,) = episode.trajectories
        start = trajectory.prompt_length
        text = self.tokenizer.decode(trajectory.token_ids[start:-1].tolist())
        ids = [*trajectory.token_ids[:start], *self.tokenizer.encode(text), trajectory.token_ids[-1]]
        length = len(ids)
        return changed(
            episode,
            token_ids=np.array(ids, np.int32),
            loss_mask=trajectory.loss_mask[:length],
            logprobs=trajectory.logprobs[:length],
            versions=trajectory.versions[:length],
            turns=(dataclasses.replace(trajectory.turns[0], stop=length),),
        )


class GuessesLogprobs(SingleTurn):
    """Recomputes log-probs."""

    async def generate(self, task, engine):
        episode = await super().generate(task, engine)
        return changed(episode, logprobs=episode.trajectories[0].logprobs * np.float32(1.001))


class OneVersion(SingleTurn):
    """Believes that the version never changes."""

    async def generate(self, task, engine):
        episode = await super().generate(task, engine)
        versions = np.where(episode.trajectories[0].versions >= 0, 0, -1)
        return changed(episode, versions=versions)


class ForgetsATurn(SingleTurn):
    """Asks twice, keeps one."""

    async def generate(self, task, engine):
        await super().generate(task, engine)
        return await super().generate(task, engine)


class TrainsNothing(SingleTurn):
    """Masks all of it."""

    async def generate(self, task, engine):
        episode = await super().generate(task, engine)
        return changed(episode, loss_mask=np.zeros(len(episode.trajectories[0]), np.bool_))


class AlwaysCompleted(SingleTurn):
    """A cut answer is an answer."""

    async def generate(self, task, engine):
        episode = await super().generate(task, engine)
        return dataclasses.replace(changed(episode, status=Status.COMPLETED), status=Status.COMPLETED)


class EpisodeOnly(SingleTurn):
    """Its trajectories know nothing of the end."""

    async def generate(self, task, engine):
        return changed(await super().generate(task, engine), status=Status.COMPLETED)


class OwnIds(SingleTurn):
    """Names its episodes itself."""

    async def generate(self, task, engine):
        return await super().generate(dataclasses.replace(task, episode_id="mine"), engine)


class Mute(SingleTurn):
    """Keeps no conversation."""

    async def generate(self, task, engine):
        return dataclasses.replace(await super().generate(task, engine), messages=task.prompt.messages)


class Boundless(SingleTurn):
    """Knows no limit."""

    async def generate(self, task, engine):
        return await super().generate(dataclasses.replace(task, max_tokens=0), engine)


class Unseeded(SingleTurn):
    """Leaves the seed to the engine."""

    async def generate(self, task, engine):
        class Client:
            async def generate(self, ids, sampling, **options):
                return await engine.generate(ids, dataclasses.replace(sampling, seed=None), **options)

        return await super().generate(task, Client())


class RandomSeeds(SingleTurn):
    """Draws its own seeds."""

    async def generate(self, task, engine):
        return await super().generate(dataclasses.replace(task, seed=random.getrandbits(31)), engine)


class Detached(SingleTurn):
    """Asks in a task of its own, which nobody cancels."""

    async def generate(self, task, engine):
        self.running = asyncio.create_task(super().generate(task, engine))
        return await asyncio.shield(self.running)


class SwallowsCancellation(SingleTurn):
    """Makes an empty episode of it."""

    async def generate(self, task, engine):
        try:
            return await super().generate(task, engine)
        except asyncio.CancelledError:
            return None


class EmptyAnswer(SingleTurn):
    """A dead engine said nothing."""

    async def generate(self, task, engine):
        from miles_core.testing.scripted import ScriptedClient

        try:
            return await super().generate(task, engine)
        except EngineError:
            return await super().generate(task, ScriptedClient([self.tokenizer.special("<|im_end|>")]))


class Translates(SingleTurn):
    """Raises an error that nobody knows."""

    async def generate(self, task, engine):
        try:
            return await super().generate(task, engine)
        except EngineError as error:
            raise RuntimeError("engine") from error


FAULTS = {
    "trajectories_are_what_was_sampled": (Retokenises, GuessesLogprobs, OneVersion, ForgetsATurn),
    "what_the_engine_sampled_trains": (TrainsNothing,),
    "status_follows_the_finish_reason": (AlwaysCompleted, EpisodeOnly),
    "ids_are_those_of_the_task": (OwnIds,),
    "the_conversation_is_kept": (Mute,),
    "max_tokens_bounds_a_trajectory": (Boundless,),
    "equal_tasks_make_equal_requests": (Unseeded, RandomSeeds),
    "cancellation_leaves_nothing": (Detached, SwallowsCancellation),
    "a_dead_engine_is_no_sample": (EmptyAnswer, Translates),
}
