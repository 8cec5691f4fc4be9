"""One training process: weights, optimizer and random state, and the step that moves them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from miles_core.contracts.backends import BackendStart, StepReport
from miles_core.contracts.objective import BatchColumns, Needs, Objective, PreparedObjective
from miles_core.data.group import Batch
from miles_core.data.trajectory import Trajectory
from miles_core.errors import NumericsError
from miles_core.training.beside import Beside
from miles_core.training.checkpoint import load_state, snapshot, write_state
from miles_core.training.columns import batch_columns, training_trajectories
from miles_core.training.device import device_of
from miles_core.training.fidelity import fidelity_metrics
from miles_core.training.layout import Layout, lay_out
from miles_core.training.lora import add_adapters, save_adapter
from miles_core.training.optimizer import adamw, clip, gradients_of, sum_gradients
from miles_core.training.packing import clusters_of, plan, rows_needed
from miles_core.training.ranks import Ranks
from miles_core.training.schedule import learning_rate
from miles_core.training.scorer import Scored, Scorer, load_scorer
from miles_core.training.settings import FsdpConfig
from miles_core.training.sharding import shard
from miles_core.training.weights import named_weights, save_pretrained

__all__ = ["Trainer"]

Masks = Sequence[NDArray[np.bool_]]


class Trainer:
    """Deterministic: the same weights, optimizer state and batch give the same bits, also in a new process.

    With several ranks, each computes its share of a batch, and holds a shard of every parameter or all of it. All of
    them know the columns of the whole batch, so advantages, normalisers and what is refused are the same everywhere.
    """

    def __init__(self, config: FsdpConfig, start: BackendStart) -> None:
        torch.manual_seed(start.seed)
        self.config = config
        self.start = start
        self.step = 0
        self.device = device_of(config.device, start.rank)
        self.ranks = Ranks.join(start, self.device)
        self.scorer = load_scorer(
            start.model_directory,
            dtype=start.dtype,
            temperature=start.temperature,
            activation_checkpointing=config.activation_checkpointing,
            critic=start.critic,
            device=self.device,
        )
        if config.lora is not None:
            add_adapters(self.scorer.model, config.lora)
        self._shard(self.scorer)
        self._reference: Scorer | None = None
        self.policy = [p for p in self.scorer.model.parameters() if p.requires_grad]
        self.critic = [] if self.scorer.critic is None else list(self.scorer.critic.parameters())
        self.optimizer = adamw(self.policy, config, config.learning_rate)
        self.critic_optimizer = adamw(self.critic, config, config.critic_learning_rate) if self.critic else None
        self._saving = Beside("checkpoint")
        self._exporting = Beside("export")
        self._writers = self.ranks.another_group()

    @property
    def reference(self) -> Scorer:
        """The weights that the run started from, frozen; loaded when something first asks for them."""
        if self._reference is None:
            self._reference = load_scorer(
                self.start.model_directory,
                dtype=self.start.dtype,
                temperature=self.start.temperature,
                device=self.device,
            ).requires_grad_(False)
            self._shard(self._reference)
        return self._reference

    def _shard(self, scorer: Scorer) -> None:
        if self.ranks.size > 1 and self.config.sharding == "full":
            shard(scorer, self.ranks, self.device)

    def micro_batches(self, trajectories: Sequence[Trajectory], wanted: Masks) -> Iterator[Layout]:
        """This rank's layouts: over all ranks they hold every trajectory of which a token is wanted, once. Every rank
        has the same number of them, some possibly empty."""
        tokens = [t.token_ids for t in trajectories]
        rows = [rows_needed(mask) for mask in wanted]
        groups = [t.group_id for t in trajectories]
        budget, share = self.config.max_tokens_per_microbatch, self.config.share_prefix
        if self.ranks.size > 1:  # at least one micro-batch a rank, of about equal size, where there is enough to do
            budget = max(1, min(budget, -(-sum(rows) // self.ranks.size)))
        clusters = clusters_of(tokens, rows, groups, budget=budget, share=share)
        for own in plan(clusters, budget=budget, ranks=self.ranks.size)[self.ranks.rank]:
            members = [i for cluster in own for i in cluster.members]
            yield lay_out(members, tokens, rows, wanted, share=share)

    def logprobs(
        self, trajectories: Sequence[Trajectory], wanted: Masks, scorer: Scorer | None = None
    ) -> list[NDArray[np.float32]]:
        """Log-probs of the wanted tokens, float32 [T] a trajectory, 0 elsewhere."""
        flat = self._scored(trajectories, wanted, scorer or self.scorer).logprobs.numpy()
        ends = np.cumsum([len(t) for t in trajectories])
        return np.split(flat, ends[:-1]) if len(trajectories) else []

    def train_step(self, batch: Batch, objective: Objective) -> StepReport:
        """One optimizer step. See `TrainBackend.train_step`."""
        seconds: dict[str, float] = {}
        trajectories = training_trajectories(batch)
        masks = [t.loss_mask for t in trajectories]
        with _timed(seconds, "prepare"):
            columns = self._columns(batch, trajectories, masks, objective.needs)
            prepared = objective.prepare(columns)
        with _timed(seconds, "forward_backward"):
            top_ids = columns.teacher_top_ids if Needs.TEACHER_TOP in objective.needs else None
            work = _Work(trajectories, masks, prepared, objective.needs, top_ids)
            loss, metrics, logprobs = self._accumulate(work)
        with _timed(seconds, "optimizer"):
            norm = clip(self.policy, self.config.max_grad_norm, self.ranks)
            critic_norm = clip(self.critic, self.config.max_grad_norm, self.ranks)
            if not np.isfinite(norm + critic_norm):
                self._refuse_gradient(work, norm + critic_norm)
            rate = self._move()
        return StepReport(
            step=self.step,
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            metrics={
                **prepared.metrics,
                **metrics,
                **({"critic/grad_norm": critic_norm} if self.critic else {}),
                **fidelity_metrics(columns, logprobs),
            },
            seconds=seconds,
        )

    def _move(self) -> float:
        """Let the optimizers move; the policy's learning rate."""
        config = self.config
        rate = learning_rate(
            self.step,
            peak=config.learning_rate,
            schedule=config.schedule,
            warmup_steps=config.warmup_steps,
            total_steps=self.start.total_steps,
            final_fraction=config.final_fraction,
        )
        if self.critic_optimizer is not None:
            self.critic_optimizer.step()
        if self.critic_optimizer is None or self.step >= config.critic_warmup_steps:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        self._forget_gradients()
        self.step += 1
        return rate

    def _columns(self, batch: Batch, trajectories: Sequence[Trajectory], masks: Masks, needs: Needs) -> BatchColumns:
        """The batch's columns, with those that need a forward pass of their own."""
        if Needs.VALUES in needs and not self.critic:
            raise ValueError("the objective asks for values, but the backend was started without a critic")
        columns = batch_columns(batch)
        if Needs.TEACHER in needs and columns.teacher_logprobs is None:
            raise ValueError("the objective asks for a teacher's log-probs, but the batch has none")
        if Needs.TEACHER_TOP in needs and columns.teacher_top_logprobs is None:
            raise ValueError("the objective asks for a teacher's likeliest tokens, but the batch has none")
        if Needs.TRAINER_LOGPROBS in needs or Needs.VALUES in needs:
            scored = self._scored(trajectories, masks, self.scorer, values=Needs.VALUES in needs)
            old = scored.logprobs if Needs.TRAINER_LOGPROBS in needs else None
            columns = dataclasses.replace(columns, old_logprobs=old, values=scored.values)
        if Needs.REFERENCE in needs:
            reference = self._scored(trajectories, masks, self.reference).logprobs
            columns = dataclasses.replace(columns, reference_logprobs=reference)
        return columns

    def _scored(
        self, trajectories: Sequence[Trajectory], wanted: Masks, scorer: Scorer, *, values: bool = False
    ) -> Scored:
        """Flat columns over all tokens of the trajectories, on every rank; without gradients."""
        starts = _starts(trajectories)
        columns = torch.zeros(2 if values else 1, starts[-1], dtype=scorer.dtype)
        with torch.no_grad():
            for layout in self.micro_batches(trajectories, wanted):
                scored = scorer.score(layout, values=values)
                _place(columns[0], scored.logprobs, layout, starts)
                if scored.values is not None:
                    _place(columns[1], scored.values, layout, starts)
        self.ranks.sum(columns)
        return Scored(columns[0], None, columns[1] if values else None)

    def _accumulate(self, work: _Work) -> tuple[float, dict[str, float], torch.Tensor]:
        """Gradients of all micro-batches; the loss, the metrics' sums, and the log-probs [N] of the batch."""
        starts = _starts(work.trajectories)
        logprobs = torch.zeros(starts[-1], dtype=self.scorer.dtype)
        totals = {"": 0.0}
        for layout in self.micro_batches(work.trajectories, work.masks):
            loss, failure = None, None
            try:
                loss, sums, scored = self._loss(layout, work)
            except NumericsError as error:
                failure = error
            try:
                self.ranks.raise_together(failure)
            except NumericsError:
                self._forget_gradients()
                raise
            assert loss is not None
            torch.autograd.backward(loss)
            totals[""] += float(loss.detach())
            for name, value in sums.items():
                totals[name] = totals.get(name, 0.0) + float(value)
            _place(logprobs, scored, layout, starts)
        if self.ranks.size > 1 and self.config.sharding == "none":
            sum_gradients([*self.policy, *self.critic], self.ranks)
        metrics = self.ranks.sums(totals)
        return metrics.pop(""), metrics, self.ranks.sum(logprobs)

    def _loss(self, layout: Layout, work: _Work) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
        starts = _starts(work.trajectories)
        scored = self.scorer.score(
            layout,
            entropy=Needs.ENTROPY in work.needs,
            values=Needs.VALUES in work.needs,
            top_ids=None if work.top_ids is None else _taken(work.top_ids, layout, starts),
        )
        extra = {name: column for name, column in scored._asdict().items() if name != "logprobs" and column is not None}
        loss, sums = work.prepared.loss(torch.from_numpy(layout.trajectories), scored.logprobs, extra)
        return loss, dict(sums), scored.logprobs.detach()

    def _refuse_gradient(self, work: _Work, norm: float) -> None:
        """Find the trajectories whose gradient is not finite, one micro-batch at a time, and raise."""
        guilty: list[str] = []
        for layout in self.micro_batches(work.trajectories, work.masks):
            self._forget_gradients()
            torch.autograd.backward(self._loss(layout, work)[0])
            finite = all(bool(g.isfinite().all()) for g in gradients_of([*self.policy, *self.critic]))
            if self.ranks.any(not finite):
                own = [work.trajectories[i].trajectory_id for i in layout.trajectories]
                guilty += [name for names in self.ranks.gather(own) for name in names]
        self._forget_gradients()
        where = ", ".join(guilty[:8]) or "only the sum over micro-batches"
        more = f" and {len(guilty) - 8} more" if len(guilty) > 8 else ""
        raise NumericsError(f"gradient norm is {norm} in the micro-batch of {where}{more}; the optimizer has not moved")

    def _forget_gradients(self) -> None:
        self.scorer.zero_grad(set_to_none=True)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `miles_core.training.weights.named_weights`."""
        return named_weights(self.scorer)

    def begin_save(self, directory: Path) -> None:
        """Copy everything to host memory, and write the copy beside what comes next. See `training.checkpoint`."""
        self.finish_save()
        state = snapshot(self.scorer, self._optimizers, step=self.step)
        self._saving.begin(write_state, directory, state, self._writers)

    def finish_save(self, *, wait: bool = True) -> bool:
        """Whether the last checkpoint is complete on disk; raises what its writing met."""
        return self._saving.finish(wait=wait)

    def load(self, directory: Path) -> None:
        """Continue exactly where `save` stopped."""
        self.step = load_state(directory, self.scorer, self._optimizers)

    def move(self, device: torch.device) -> None:
        """Put weights and optimizer state there; to compute, they must be on `self.device`."""
        for scorer in (self.scorer, self._reference):
            if scorer is not None:
                scorer.to(device)
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                state.update({key: value.to(device) for key, value in state.items()})
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer, *([] if self.critic_optimizer is None else [self.critic_optimizer])]

    def export(self, directory: Path) -> None:
        """A Hugging Face directory with the tokenizer of the model that the run started from. Adapters are merged, and
        stand by themselves, in peft's format, under `adapter`."""
        weights = dict(self.named_weights())
        writes = self.ranks.rank == 0
        if writes:
            self._write_model(weights, directory)
        if self.config.lora is not None:
            base = str(self.start.model_directory)
            save_adapter(self.scorer.model, self.config.lora, directory / "adapter", base=base, write=writes)

    def begin_export(self, directory: Path) -> None:
        """Copy the weights to host memory, and write the copy beside what comes next."""
        self.finish_export()
        weights = {name: tensor.to("cpu", copy=True) for name, tensor in self.named_weights()}
        if self.ranks.rank == 0:
            self._exporting.begin(self._write_model, weights, directory)

    def finish_export(self, *, wait: bool = True) -> bool:
        """Whether what `begin_export` began is complete on disk; raises what its writing met."""
        return self._exporting.finish(wait=wait)

    def _write_model(self, weights: Mapping[str, torch.Tensor], directory: Path) -> None:
        from transformers import AutoTokenizer

        save_pretrained(self.scorer.model, weights, directory)
        AutoTokenizer.from_pretrained(self.start.model_directory, local_files_only=True).save_pretrained(directory)


class _Work(NamedTuple):
    """What one step computes: the loss of these tokens. `top_ids` int64 [N, k] are the teacher's, where they count."""

    trajectories: Sequence[Trajectory]
    masks: Masks
    prepared: PreparedObjective
    needs: Needs
    top_ids: torch.Tensor | None


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - begin


def _starts(trajectories: Sequence[Trajectory]) -> list[int]:
    """Where each trajectory's tokens start in the batch's flat columns, and where the last one's end."""
    return [0, *np.cumsum([len(t) for t in trajectories], dtype=np.int64).tolist()]


def _place(column: torch.Tensor, values: torch.Tensor, layout: Layout, starts: Sequence[int]) -> None:
    """Write a layout's tokens to where they stand in the batch."""
    for index, start, stop in zip(layout.trajectories, layout.offsets[:-1], layout.offsets[1:], strict=True):
        column[starts[index] : starts[index + 1]] = values[start:stop]


def _taken(column: torch.Tensor, layout: Layout, starts: Sequence[int]) -> torch.Tensor:
    """The inverse of `_place`: a column's values at a layout's tokens."""
    parts = [column[starts[index] : starts[index + 1]] for index in layout.trajectories]
    return torch.cat([column[:0], *parts])
