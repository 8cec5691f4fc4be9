"""A causal language model that scores packed micro-batches: ids in, log-probs of chosen tokens out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from miles_core.errors import ModelError
from miles_core.training.attention import PACKED_ATTENTION, Packing
from miles_core.training.layout import Layout
from miles_core.training.logprobs import token_logprobs

__all__ = ["Scorer", "load_scorer"]

# Config keys that change the logits after the output projection; `token_logprobs` computes none of them.
_LOGIT_CHANGES = ("final_logit_softcapping", "logits_scaling", "logit_scale")


class Scorer(nn.Module):
    """Wraps a transformers model in float32 master weights; computes in `compute_dtype`."""

    def __init__(self, model: Any, *, temperature: float, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.compute_dtype = compute_dtype

    def score(self, layout: Layout, *, entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs float32 [n] of the layout's tokens (0 where not wanted), entropy likewise when asked for."""
        if self.compute_dtype == torch.float32:
            result: tuple[torch.Tensor, torch.Tensor | None] = self(layout, entropy)
            return result
        # Gradients pass the cast, so micro-batches add up in the float32 masters.
        low = {name: p.to(self.compute_dtype) for name, p in self.named_parameters()}
        result = functional_call(self, low, (layout, entropy))
        return result

    def forward(self, layout: Layout, entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        head = self.model.get_output_embeddings()
        device = head.weight.device
        tokens = int(layout.offsets[-1])
        if len(layout.input_ids) == 0:
            empty = torch.zeros(tokens, device=device)
            return empty, (torch.zeros(tokens, device=device) if entropy else None)
        packing = Packing(layout.spans, device)
        output = self.model.base_model(
            input_ids=torch.from_numpy(layout.input_ids).to(device)[None],
            position_ids=torch.from_numpy(layout.position_ids).to(device)[None],
            use_cache=False,
            packing=packing,
        )
        layers = self.model.config.get_text_config().num_hidden_layers
        if packing.calls != layers:
            raise ModelError(
                f"{type(self.model).__name__}: {packing.calls} of {layers} layers attend through transformers' "
                "attention interface; the others would mix the trajectories of a pack"
            )
        logprobs, entropies = token_logprobs(
            output.last_hidden_state[0],
            head.weight,
            torch.from_numpy(layout.row_of).to(device),
            torch.from_numpy(layout.targets).to(device),
            temperature=self.temperature,
            bias=head.bias,
            entropy=entropy,
        )
        index = torch.from_numpy(layout.token_index).to(device)
        full = torch.zeros(tokens, device=device)
        return full.index_copy(0, index, logprobs), None if entropies is None else full.index_copy(0, index, entropies)


def load_scorer(directory: Path, *, dtype: str, temperature: float, activation_checkpointing: bool = False) -> Scorer:
    """Load a model directory for training. `dtype` is the compute dtype, float32 or bfloat16; masters are float32.

    Raises `ModelError` when the model computes something that packed scoring does not.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ModelError(f"training dtype {dtype!r}: allowed are float32 and bfloat16")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation=PACKED_ATTENTION, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model directory {directory}: transformers cannot load it for training: {error}") from error
    for key in _LOGIT_CHANGES:
        if getattr(model.config, key, None) not in (None, 1, 1.0):
            raise ModelError(
                f"model directory {directory}: config.json sets {key} = {getattr(model.config, key)}, which the fsdp "
                "backend does not compute"
            )
    if activation_checkpointing:
        # transformers renamed the method within version 5.
        new = hasattr(model, "activation_checkpointing_enable")
        enable = model.activation_checkpointing_enable if new else model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    model.train()
    return Scorer(model, temperature=temperature, compute_dtype=getattr(torch, dtype))
