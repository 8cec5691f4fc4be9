"""LoRA (arXiv 2106.09685) through `peft`: low-rank adapters beside frozen weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from miles_core.errors import ModelError
from miles_core.training.settings import LoraConfig
from miles_core.training.sharding import gathered

__all__ = ["ADAPTER", "adapted_modules", "adapter_weights", "add_adapters", "merged", "save_adapter"]

ADAPTER = "default"
"""Name that peft gives the only adapter; it stands in parameter names, and is left out of files."""


def add_adapters(model: Any, config: LoraConfig) -> None:
    """Put an adapter beside every targeted linear layer, in place, and freeze everything else. B starts at 0, so the
    model computes what it did. Raises `ModelError` when a target names no layer."""
    from peft import inject_adapter_in_model

    try:
        inject_adapter_in_model(_peft_config(config), model, adapter_name=ADAPTER)
    except ValueError as error:
        raise ModelError(f"backend.lora.targets = {list(config.targets)}: {error}") from error


def adapted_modules(model: Any) -> dict[str, Any]:
    """The layers with an adapter, by their name in the checkpoint; empty without LoRA."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def merged(weight: torch.Tensor, module: Any) -> torch.Tensor:
    """W + scale · B A, what the layer computes; a new tensor."""
    low, high = gathered(module.lora_A[ADAPTER].weight), gathered(module.lora_B[ADAPTER].weight)
    return torch.addmm(weight, high, low, alpha=module.scaling[ADAPTER])


def adapter_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in peft's format, float32 tensor), gathered from shards."""
    for name, module in adapted_modules(model).items():
        for part in ("lora_A", "lora_B"):
            yield f"base_model.model.{name}.{part}.weight", gathered(getattr(module, part)[ADAPTER].weight)


def save_adapter(model: Any, config: LoraConfig, directory: Path, *, base: str, write: bool) -> None:
    """peft's format: `adapter_model.safetensors` and `adapter_config.json`. All ranks take part, one writes."""
    weights = {name: tensor.contiguous() for name, tensor in adapter_weights(model)}
    if write:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(weights, directory / "adapter_model.safetensors", metadata={"format": "pt"})
        saved = _peft_config(config)
        saved.base_model_name_or_path = base
        saved.inference_mode = True
        saved.save_pretrained(str(directory))


def _peft_config(config: LoraConfig) -> Any:
    from peft import LoraConfig as PeftLoraConfig

    return PeftLoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=list(config.targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
