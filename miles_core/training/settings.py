"""Config section of the `fsdp` backend."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from miles_core.contracts.component import ComponentConfig
from miles_core.training.schedule import Schedule

__all__ = ["Device", "FsdpConfig", "LoraConfig"]

Device = Literal["auto", "cpu", "cuda"]


class LoraConfig(ComponentConfig):
    """`[backend.lora]`: train low-rank adapters and nothing else."""

    rank: int = Field(default=16, ge=1)
    """Rank of each adapter."""

    alpha: int = Field(default=32, ge=1)
    """An adapter's output is scaled by alpha / rank."""

    targets: tuple[str, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )
    """Names of the linear layers that get one."""


class FsdpConfig(ComponentConfig):
    """AdamW (arXiv 1711.05101), clipping, schedule and memory of the `fsdp` backend."""

    nproc: int = Field(default=1, ge=1)
    """Trainer processes, which share the work of each batch."""

    sharding: Literal["full", "none"] = "full"
    """What each of several processes holds. `full`: a shard of weights, gradients and optimizer state (FSDP2). `none`:
    all of them, and gradients are summed once a step, which is faster where they fit."""

    device: Device = "auto"
    """Where to compute: `cpu`, `cuda` (one GPU a process), or `auto`, a GPU where there is one."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""

    schedule: Schedule = "constant"
    """What follows the warm-up: constant, linear or cosine."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear rise to the peak."""

    final_fraction: float = Field(default=0.0, ge=0, le=1)
    """Rate of the last step as a fraction of the peak (linear and cosine)."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's first decay."""

    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's second decay."""

    epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's denominator offset."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled decay of matrices; vectors (norms, biases) are not decayed."""

    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""

    max_tokens_per_microbatch: int = Field(default=4096, ge=1)
    """Row budget of a micro-batch, with each group's prompt counted once. A trajectory above it is computed alone."""

    share_prefix: bool = True
    """Compute what trajectories of a micro-batch have in common once: a group's prompt, few-shot examples."""

    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""

    lora: LoraConfig | None = None
    """Train LoRA adapters instead of the weights (needs `peft`)."""

    critic_learning_rate: float = Field(default=1e-3, gt=0)
    """Learning rate of the value head, where the algorithm has one (`ppo`)."""

    critic_warmup_steps: int = Field(default=0, ge=0)
    """First steps that move the value head alone."""
