"""One training process: weights, optimizer and random state, and the step that moves them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from miles_core.contracts.backends import BackendStart, StepReport
from miles_core.contracts.objective import BatchColumns, Needs, Objective, PreparedObjective
from miles_core.data.group import Batch
from miles_core.data.trajectory import Trajectory
from miles_core.errors import NumericsError
from miles_core.training.columns import batch_columns, training_trajectories
from miles_core.training.fidelity import fidelity_metrics
from miles_core.training.layout import Layout, lay_out
from miles_core.training.packing import clusters_of, plan, rows_needed
from miles_core.training.schedule import learning_rate
from miles_core.training.scorer import Scorer, load_scorer
from miles_core.training.settings import FsdpConfig

__all__ = ["Trainer"]

Masks = Sequence[NDArray[np.bool_]]


class Trainer:
    """Deterministic: the same weights, optimizer state and batch give the same bits, also in a new process."""

    def __init__(self, config: FsdpConfig, start: BackendStart) -> None:
        torch.manual_seed(start.seed)
        self.config = config
        self.start = start
        self.step = 0
        self.scorer = load_scorer(
            start.model_directory,
            dtype=start.dtype,
            temperature=start.temperature,
            activation_checkpointing=config.activation_checkpointing,
        )
        self._reference: Scorer | None = None
        parameters = list(self.scorer.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=True,
        )

    @property
    def reference(self) -> Scorer:
        """The weights that the run started from, frozen; loaded when something first asks for them."""
        if self._reference is None:
            self._reference = load_scorer(
                self.start.model_directory, dtype=self.start.dtype, temperature=self.start.temperature
            ).requires_grad_(False)
        return self._reference

    def micro_batches(self, trajectories: Sequence[Trajectory], wanted: Masks) -> Iterator[Layout]:
        """Layouts that together hold every trajectory of which a token is wanted, once."""
        tokens = [t.token_ids for t in trajectories]
        rows = [rows_needed(mask) for mask in wanted]
        groups = [t.group_id for t in trajectories]
        budget, share = self.config.max_tokens_per_microbatch, self.config.share_prefix
        (own,) = plan(clusters_of(tokens, rows, groups, budget=budget, share=share), budget=budget)
        for clusters in own:
            members = [i for cluster in clusters for i in cluster.members]
            yield lay_out(members, tokens, rows, wanted, share=share)

    def logprobs(
        self, trajectories: Sequence[Trajectory], wanted: Masks, scorer: Scorer | None = None
    ) -> list[NDArray[np.float32]]:
        """Log-probs of the wanted tokens, float32 [T] a trajectory, 0 elsewhere."""
        result = [np.zeros(len(t), dtype=np.float32) for t in trajectories]
        with torch.no_grad():
            for layout in self.micro_batches(trajectories, wanted):
                flat = (scorer or self.scorer).score(layout)[0].cpu().numpy()
                for index, start, stop in zip(
                    layout.trajectories, layout.offsets[:-1], layout.offsets[1:], strict=True
                ):
                    result[index] = flat[start:stop]
        return result

    def train_step(self, batch: Batch, objective: Objective) -> StepReport:
        """One optimizer step. See `TrainBackend.train_step`."""
        seconds: dict[str, float] = {}
        trajectories = training_trajectories(batch)
        masks = [t.loss_mask for t in trajectories]
        with _timed(seconds, "prepare"):
            columns = self._columns(batch, trajectories, masks, objective.needs)
            prepared = objective.prepare(columns)
        with _timed(seconds, "forward_backward"):
            loss, metrics, logprobs = self._accumulate(
                trajectories, masks, prepared, objective.needs, len(columns.loss_mask)
            )
        rate = learning_rate(
            self.step,
            peak=self.config.learning_rate,
            schedule=self.config.schedule,
            warmup_steps=self.config.warmup_steps,
            total_steps=self.start.total_steps,
            final_fraction=self.config.final_fraction,
        )
        with _timed(seconds, "optimizer"):
            norm = float(torch.nn.utils.get_total_norm(p.grad for p in self.scorer.parameters() if p.grad is not None))
            if not np.isfinite(norm):
                self._refuse_gradient(trajectories, masks, prepared, objective.needs, norm)
            if norm > self.config.max_grad_norm:
                scale = self.config.max_grad_norm / norm
                torch._foreach_mul_([p.grad for p in self.scorer.parameters() if p.grad is not None], scale)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return StepReport(
            step=self.step,
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            metrics={**prepared.metrics, **metrics, **fidelity_metrics(columns, logprobs)},
            seconds=seconds,
        )

    def _columns(self, batch: Batch, trajectories: Sequence[Trajectory], masks: Masks, needs: Needs) -> BatchColumns:
        """The batch's columns, with those that need a forward pass of their own."""
        for need in (Needs.TEACHER, Needs.VALUES):
            if need in needs:
                raise ValueError(f"the fsdp backend does not provide {need.name}, which the objective asks for")
        columns = batch_columns(batch)
        if Needs.TRAINER_LOGPROBS in needs:
            columns = dataclasses.replace(columns, old_logprobs=_flat(self.logprobs(trajectories, masks)))
        if Needs.REFERENCE in needs:
            reference = self.logprobs(trajectories, masks, self.reference)
            columns = dataclasses.replace(columns, reference_logprobs=_flat(reference))
        return columns

    def _accumulate(
        self,
        trajectories: Sequence[Trajectory],
        masks: Masks,
        prepared: PreparedObjective,
        needs: Needs,
        tokens: int,
    ) -> tuple[float, dict[str, float], torch.Tensor]:
        """Gradients of all micro-batches; the loss, the metrics' sums, and the log-probs [N] of the batch."""
        starts = np.cumsum([0, *(len(t) for t in trajectories)])
        logprobs = torch.zeros(tokens)
        total = 0.0
        metrics: dict[str, float] = {}
        try:
            for layout in self.micro_batches(trajectories, masks):
                loss, sums, scored = self._loss(layout, prepared, needs)
                torch.autograd.backward(loss)
                total += float(loss.detach())
                for name, value in sums.items():
                    metrics[name] = metrics.get(name, 0.0) + float(value)
                for index, start, stop in zip(
                    layout.trajectories, layout.offsets[:-1], layout.offsets[1:], strict=True
                ):
                    logprobs[starts[index] : starts[index + 1]] = scored[start:stop]
        except NumericsError:
            self.optimizer.zero_grad(set_to_none=True)
            raise
        return total, metrics, logprobs

    def _loss(
        self, layout: Layout, prepared: PreparedObjective, needs: Needs
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
        logprobs, entropy = self.scorer.score(layout, entropy=Needs.ENTROPY in needs)
        extra = {} if entropy is None else {"entropy": entropy}
        loss, sums = prepared.loss(torch.from_numpy(layout.trajectories), logprobs, extra)
        return loss, dict(sums), logprobs.detach()

    def _refuse_gradient(
        self, trajectories: Sequence[Trajectory], masks: Masks, prepared: PreparedObjective, needs: Needs, norm: float
    ) -> None:
        """Find the trajectories whose gradient is not finite, one micro-batch at a time, and raise."""
        guilty: list[str] = []
        for layout in self.micro_batches(trajectories, masks):
            self.optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(self._loss(layout, prepared, needs)[0])
            if not all(bool(p.grad.isfinite().all()) for p in self.scorer.parameters() if p.grad is not None):
                guilty += [trajectories[i].trajectory_id for i in layout.trajectories]
        self.optimizer.zero_grad(set_to_none=True)
        where = ", ".join(guilty[:8]) or "only the sum over micro-batches"
        more = f" and {len(guilty) - 8} more" if len(guilty) > 8 else ""
        raise NumericsError(f"gradient norm is {norm} in the micro-batch of {where}{more}; the optimizer has not moved")

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, float32 tensor), detached, not copied; a tied weight once, under its first name."""
        seen: set[int] = set()
        for name, tensor in self.scorer.model.state_dict().items():
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                yield name, tensor

    def save(self, directory: Path) -> None:
        """Weights, optimizer, step and random state in one file, `trainer.pt`."""
        directory.mkdir(parents=True, exist_ok=True)
        torch.save(
            {
                "weights": dict(self.named_weights()),
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
                "rng": torch.get_rng_state(),
            },
            directory / "trainer.pt",
        )

    def load(self, directory: Path) -> None:
        """Continue exactly where `save` stopped."""
        state = torch.load(directory / "trainer.pt", map_location="cpu", weights_only=True)
        own = dict(self.named_weights())
        if own.keys() != state["weights"].keys():
            different = sorted(own.keys() ^ state["weights"].keys())
            raise ValueError(f"checkpoint {directory} is of another model: weights {different[:4]} do not match")
        for name, tensor in own.items():
            tensor.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        torch.set_rng_state(state["rng"])

    def export(self, directory: Path) -> None:
        """A Hugging Face directory with the tokenizer of the model that the run started from."""
        from transformers import AutoTokenizer

        self.scorer.model.save_pretrained(directory)
        AutoTokenizer.from_pretrained(self.start.model_directory, local_files_only=True).save_pretrained(directory)


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - begin


def _flat(columns: list[NDArray[np.float32]]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(columns)) if columns else torch.zeros(0)
