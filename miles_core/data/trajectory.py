"""A trajectory: one contiguous training sequence, exactly as the policy sampled it."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

__all__ = ["NOT_SAMPLED", "Status", "Trajectory", "Turn"]

NOT_SAMPLED = -1
"""Value in `Trajectory.versions` of a token that the model did not sample."""

_COLUMNS = (("token_ids", np.int32), ("loss_mask", np.bool_), ("logprobs", np.float32), ("versions", np.int32))
_set = object.__setattr__


class Status(enum.StrEnum):
    """How an episode ended. Infrastructure failures are `failed`, never a reward of 0."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One engine generation inside a trajectory: tokens `start` to `stop` (exclusive) were sampled by it.

    `started` and `finished` are seconds since the epoch. `cached_tokens` of the `start` prompt tokens came from
    the engine's prefix cache. `request_id` is the engine's own, by which the audit finds what went over the wire.
    """

    start: int
    stop: int
    finish_reason: str
    engine: str
    cached_tokens: int = 0
    started: float = 0.0
    finished: float = 0.0
    request_id: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trajectory:
    """Columns over the T tokens of one training sequence. Immutable: the arrays are made read-only.

    | field | dtype, shape | meaning |
    |---|---|---|
    | `token_ids` | int32 [T] | |
    | `loss_mask` | bool [T] | true on sampled tokens that train |
    | `logprobs` | float32 [T] | rollout log-prob (natural, at the sampling temperature), 0 if not sampled |
    | `versions` | int32 [T] | policy version that sampled the token, `NOT_SAMPLED` elsewhere |
    | `weights` | float32 [T], optional | how much a token counts in the loss, 0 to 1; without it, 1 |
    | `teacher_logprobs` | float32 [T], optional | a teacher's log-prob of each token, at the sampling temperature |
    | `teacher_top_ids` | int32 [T, k], optional | the teacher's k likeliest tokens at each position, row 0 unused |
    | `teacher_top_logprobs` | float32 [T, k], with the ids | their log-probs, at the sampling temperature |
    | `conversation` | JSON text, optional | `messages`, `tools`, and `replies`: indices of the messages sampled here |
    | `routed_experts` | int16 or int32 [T−1, layers, k], optional | row i routed the position that predicts token i+1 |

    Raises `ValueError` when columns disagree: the law is that every masked-in token was sampled, and every
    sampled token has a finite log-prob of at most 0 and a version.
    """

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    prompt_id: str
    group_id: str
    episode_id: str
    trajectory_id: str
    turns: tuple[Turn, ...] = ()
    routed_experts: NDArray[np.integer] | None = None
    reward: float | Mapping[str, float] | None = None
    status: Status = Status.COMPLETED
    weights: NDArray[np.float32] | None = None
    teacher_logprobs: NDArray[np.float32] | None = None
    teacher_top_ids: NDArray[np.int32] | None = None
    teacher_top_logprobs: NDArray[np.float32] | None = None
    conversation: str | None = None

    def __post_init__(self) -> None:
        for name, dtype in _COLUMNS:
            column = np.asarray(getattr(self, name))
            if column.ndim != 1:
                raise ValueError(f"{self.trajectory_id}: {name} has shape {column.shape}, expected one dimension")
            if column.dtype != dtype and name != "loss_mask" and column.size and column.dtype.kind not in "iuf":
                raise ValueError(f"{self.trajectory_id}: {name} has dtype {column.dtype}, expected {np.dtype(dtype)}")
            column = column.astype(dtype, copy=True)
            column.flags.writeable = False
            _set(self, name, column)
        length = len(self.token_ids)
        for name in ("loss_mask", "logprobs", "versions"):
            if len(getattr(self, name)) != length:
                raise ValueError(
                    f"{self.trajectory_id}: {name} has {len(getattr(self, name))} tokens, token_ids {length}"
                )
        if length:
            self._check_columns()
        self._check_teacher(length)
        self._check_weights(length)
        self._check_routed_experts(length)
        for turn in self.turns:
            if not 0 <= turn.start <= turn.stop <= length:
                raise ValueError(f"{self.trajectory_id}: turn {turn.start}..{turn.stop} outside {length} tokens")

    def _check_columns(self) -> None:
        """The law. Thousands of trajectories pass here in a step: one look at each column, a second one when it is
        broken."""
        if np.minimum.reduce(self.token_ids) < 0:
            raise ValueError(f"{self.trajectory_id}: negative token id {int(self.token_ids.min())}")
        unsampled = self.versions == NOT_SAMPLED
        if np.count_nonzero(wrong := self.loss_mask & unsampled):
            first = int(np.flatnonzero(wrong)[0])
            raise ValueError(f"{self.trajectory_id}: token {first} trains but has no version: it was not sampled")
        finite = np.isfinite(self.logprobs)
        if np.count_nonzero(finite) != len(finite):
            first = int(finite.argmin())
            raise ValueError(f"{self.trajectory_id}: log-prob of token {first} is {self.logprobs[first]}")
        if float(np.maximum.reduce(self.logprobs)) > 1e-4:
            first = int(self.logprobs.argmax())
            raise ValueError(f"{self.trajectory_id}: log-prob of token {first} is {self.logprobs[first]}, above 0")
        if np.count_nonzero(wrong := (self.logprobs != 0) & unsampled):
            first = int(np.flatnonzero(wrong)[0])
            raise ValueError(f"{self.trajectory_id}: token {first} was not sampled but has a log-prob")

    def _check_teacher(self, length: int) -> None:
        if (self.teacher_top_ids is None) != (self.teacher_top_logprobs is None):
            raise ValueError(f"{self.trajectory_id}: teacher_top_ids and teacher_top_logprobs come together")
        width = None if self.teacher_top_ids is None else np.shape(self.teacher_top_ids)[-1]
        for name, dtype, shape in (
            ("teacher_logprobs", np.float32, (length,)),
            ("teacher_top_ids", np.int32, (length, width)),
            ("teacher_top_logprobs", np.float32, (length, width)),
        ):
            if getattr(self, name) is None:
                continue
            column = np.array(getattr(self, name), dtype=dtype)
            if column.shape != shape or not bool(np.isfinite(column).all()):
                raise ValueError(
                    f"{self.trajectory_id}: {name} has shape {column.shape} or is not finite, expected finite numbers "
                    f"of shape {shape}"
                )
            column.setflags(write=False)
            _set(self, name, column)

    def _check_weights(self, length: int) -> None:
        if self.weights is None:
            return
        column = np.array(self.weights, dtype=np.float32)
        if column.shape != (length,) or not bool(((column >= 0) & (column <= 1)).all()):
            raise ValueError(
                f"{self.trajectory_id}: weights has shape {column.shape} or is outside 0 to 1, expected a number "
                f"from 0 to 1 for each of {length} tokens"
            )
        column.setflags(write=False)
        _set(self, "weights", column)

    def _check_routed_experts(self, length: int) -> None:
        if self.routed_experts is None:
            return
        routes = np.asarray(self.routed_experts)
        if routes.ndim != 3 or routes.shape[0] != max(length - 1, 0):
            raise ValueError(
                f"{self.trajectory_id}: routed_experts has shape {routes.shape}, expected [{length - 1}, layers, k]; "
                "a missing row is an error, never padded"
            )
        if routes.dtype not in (np.int16, np.int32):
            raise ValueError(f"{self.trajectory_id}: routed_experts is {routes.dtype}, expected int16 or int32")
        routes = routes.copy()
        routes.setflags(write=False)
        _set(self, "routed_experts", routes)

    def with_reward(self, reward: float | Mapping[str, float]) -> Trajectory:
        """The same trajectory with its episode's reward. The columns are shared: they were checked when it was made."""
        clone = object.__new__(Trajectory)
        for name in _FIELDS:
            _set(clone, name, getattr(self, name))
        _set(clone, "reward", reward)
        return clone

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def prompt_length(self) -> int:
        """Tokens before the first sampled one (all of them when none was sampled)."""
        sampled = np.flatnonzero(self.versions != NOT_SAMPLED)
        return int(sampled[0]) if len(sampled) else len(self)

    @property
    def trainable_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest sampled token, None when nothing was sampled."""
        sampled = self.versions[self.versions != NOT_SAMPLED]
        return int(sampled.min()) if len(sampled) else None

    def scalar_reward(self, key: str | None = None) -> float:
        """The one number that trains. Raises `ValueError` when there is none, or when it is not finite."""
        reward = self.reward
        if isinstance(reward, Mapping):
            if key is None or key not in reward:
                raise ValueError(
                    f"{self.trajectory_id}: the reward is a mapping with keys {sorted(reward)}; "
                    f"[reward] reward_key is {key!r} and must name one of them"
                )
            reward = reward[key]
        if reward is None:
            raise ValueError(f"{self.trajectory_id}: no reward")
        if not math.isfinite(reward):
            raise ValueError(f"{self.trajectory_id}: reward is {reward}")
        return float(reward)


_FIELDS = tuple(field.name for field in dataclasses.fields(Trajectory))
