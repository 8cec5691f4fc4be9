"""Trajectories to read: pieces of text, each said by whom, sampled or injected."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from miles_core.contracts.families import Tokenizer
from miles_core.data.trajectory import NOT_SAMPLED, Trajectory

__all__ = ["Piece", "Reading", "read_trajectory"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A run of tokens of one kind: `injected`, `sampled` (and trained) or `masked` (sampled, not trained). `detail`
    tells versions and mean log-prob of a sampled piece."""

    kind: str
    text: str
    detail: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A trajectory as a person reads it."""

    name: str
    heading: str
    pieces: tuple[Piece, ...]


def read_trajectory(trajectory: Trajectory, tokenizer: Tokenizer) -> Reading:
    """Split a trajectory where tokens change kind; each piece is decoded with its special tokens shown."""
    kinds = [
        "injected" if version == NOT_SAMPLED else "sampled" if trains else "masked"
        for version, trains in zip(trajectory.versions.tolist(), trajectory.loss_mask.tolist(), strict=True)
    ]
    pieces = []
    start = 0
    for index in range(1, len(kinds) + 1):
        if index == len(kinds) or kinds[index] != kinds[start]:
            pieces.append(_piece(trajectory, tokenizer, kinds[start], start, index))
            start = index
    reward = trajectory.reward
    told = "no reward" if reward is None else f"reward {reward if isinstance(reward, float) else dict(reward)}"
    heading = f"{told}, {trajectory.status.value}, {len(trajectory)} tokens, {trajectory.trainable_tokens} trained"
    return Reading(name=trajectory.trajectory_id, heading=heading, pieces=tuple(pieces))


def _piece(trajectory: Trajectory, tokenizer: Tokenizer, kind: str, start: int, stop: int) -> Piece:
    text = tokenizer.decode(trajectory.token_ids[start:stop].tolist())
    if kind == "injected":
        return Piece(kind=kind, text=text, detail=f"{stop - start} tokens that the model did not sample")
    versions: Sequence[int] = sorted(set(trajectory.versions[start:stop].tolist()))
    mean = float(trajectory.logprobs[start:stop].mean())
    told = ", ".join(map(str, versions))
    return Piece(kind=kind, text=text, detail=f"{stop - start} tokens, version {told}, mean log-prob {mean:.3f}")
