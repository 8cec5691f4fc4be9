"""A scorer's weights under the names of its Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from miles_core.training.lora import ADAPTER, adapted_modules, merged
from miles_core.training.scorer import Scorer
from miles_core.training.sharding import gathered

__all__ = ["named_weights", "save_pretrained"]

_MODEL = "model."
_BASE = ".base_layer."


def named_weights(scorer: Scorer) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, float32 tensor), detached, one at a time, adapters merged; a tied weight once, under its first name.

    Gathered from shards: every rank must exhaust it. Without shards, what no adapter touches is not copied.
    """
    adapted = adapted_modules(scorer.model)
    again = {name for name, _ in scorer.named_parameters(remove_duplicate=False)} - {
        name for name, _ in scorer.named_parameters()
    }
    for full_name, tensor in scorer.state_dict().items():
        if full_name in again or not full_name.startswith(_MODEL) or f".{ADAPTER}." in full_name:
            continue
        name = full_name.removeprefix(_MODEL)
        module, found, kind = name.partition(_BASE)
        whole = gathered(tensor)
        if found and kind == "weight":
            whole = merged(whole, adapted[module])
        yield from _as_in_checkpoint(scorer.model, f"{module}.{kind}" if found else name, whole)


def _as_in_checkpoint(model: Any, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """transformers 5 packs tensors of a checkpoint (the experts of a layer) into one parameter; this unpacks it."""
    yield from revert_weight_conversion(model, {name: tensor}).items()


def save_pretrained(model: Any, weights: Mapping[str, torch.Tensor], directory: Path) -> None:
    """A Hugging Face directory of these weights with the model's config."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(model.config)  # type: ignore[no-untyped-call]
    plain.generation_config = model.generation_config
    plain.save_pretrained(directory, state_dict=dict(weights))
