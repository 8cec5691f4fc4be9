"""A causal language model that scores packed micro-batches: ids in, log-probs of chosen tokens out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from miles_core.errors import ModelError
from miles_core.training.attention import PACKED_ATTENTION, Packing
from miles_core.training.layout import Layout, lay_out
from miles_core.training.logprobs import token_logprobs

__all__ = ["Scored", "Scorer", "load_scorer"]

# Config keys that change the logits after the output projection; `token_logprobs` computes none of them.
_LOGIT_CHANGES = ("final_logit_softcapping", "logits_scaling", "logit_scale")


class Scored(NamedTuple):
    """Of every token of a layout, float32 [n] (`top_logprobs` [n, k]), in host memory, 0 where not wanted; what was not
    asked for is None."""

    logprobs: torch.Tensor
    entropy: torch.Tensor | None = None
    values: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Scored:
        """The same change of every column that is there."""
        rest = (None if column is None else change(column) for column in self[1:])
        return Scored(change(self.logprobs), *rest)


class Scorer(nn.Module):
    """Wraps a transformers model in float32 master weights; computes in `compute_dtype`.

    `critic` is a linear head that reads the value of a state from the model's last hidden state. No gradient flows from
    it into the model: the value loss cannot move the policy, and one forward pass gives both.
    """

    def __init__(self, model: Any, *, temperature: float, compute_dtype: torch.dtype, critic: bool = False) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.compute_dtype = compute_dtype
        self.sharded = False
        self.critic: nn.Linear | None = None
        if critic:
            self.critic = nn.Linear(model.config.get_text_config().hidden_size, 1)
            nn.init.zeros_(self.critic.weight)
            nn.init.zeros_(self.critic.bias)

    @property
    def dtype(self) -> torch.dtype:
        """Of what it returns: float32, or float64 where the weights are."""
        return torch.float64 if self.compute_dtype == torch.float64 else torch.float32

    def score(
        self, layout: Layout, *, entropy: bool = False, values: bool = False, top_ids: torch.Tensor | None = None
    ) -> Scored:
        """Score a micro-batch. `top_ids` int64 [n, k] are other tokens whose log-probs are wanted in place of each.

        One without trajectories is computed on a stand-in, of which nothing counts: a rank with nothing to do takes
        part in every collective, in the backward pass too.
        """
        if len(layout.trajectories):
            return self._score(layout, entropy, values, top_ids)
        others = None if top_ids is None else top_ids.new_zeros(2, top_ids.shape[1])
        return self._score(_stand_in(), entropy, values, others).map(lambda column: column[:0])

    def _score(self, layout: Layout, entropy: bool, values: bool, top_ids: torch.Tensor | None) -> Scored:
        if self.compute_dtype != torch.bfloat16 or self.sharded:  # shards are cast when they are gathered
            result: Scored = self(layout, entropy, values, top_ids)
            return result
        # Gradients pass the cast, so micro-batches add up in the float32 masters.
        low = {name: p.to(self.compute_dtype) for name, p in self.named_parameters()}
        result = functional_call(self, low, (layout, entropy, values, top_ids))
        return result

    def forward(self, layout: Layout, entropy: bool, values: bool, top_ids: torch.Tensor | None) -> Scored:
        head = self.model.get_output_embeddings()
        device = head.weight.device
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
        hidden = output.last_hidden_state[0]
        rows, targets, index = (
            torch.from_numpy(a).to(device) for a in (layout.row_of, layout.targets, layout.token_index)
        )
        wanted, count = len(targets), 0 if top_ids is None else top_ids.shape[1]
        if top_ids is not None:
            targets = torch.cat([targets, top_ids.to(device)[index].flatten()])
        logprobs, entropies = token_logprobs(
            hidden,
            head.weight,
            torch.cat([rows, rows.repeat_interleave(count)]),
            targets,
            temperature=self.temperature,
            bias=head.bias,
            entropy=entropy,
        )
        states = None
        if values:
            assert self.critic is not None, "values of a model without critic"
            states = self.critic(hidden.detach().index_select(0, rows))[:, 0].to(logprobs.dtype)
        tokens = int(layout.offsets[-1])
        return Scored(
            logprobs[:wanted],
            None if entropies is None else entropies[:wanted],
            states,
            None if top_ids is None else logprobs[wanted:].view(wanted, count),
        ).map(lambda column: column.new_zeros(tokens, *column.shape[1:]).index_copy(0, index, column).cpu())


def _stand_in() -> Layout:
    ids = np.zeros(2, dtype=np.int32)
    return lay_out([0], [ids], [1], [np.array([False, True])])


def load_scorer(
    directory: Path,
    *,
    dtype: str,
    temperature: float,
    activation_checkpointing: bool = False,
    critic: bool = False,
    device: torch.device | str = "cpu",
) -> Scorer:
    """Load a model directory for training. `dtype` is the compute dtype, float32 or bfloat16; masters are float32. With
    float64 both are, for proofs.

    Raises `ModelError` when the model computes something that packed scoring does not.
    """
    if dtype not in ("float64", "float32", "bfloat16"):
        raise ModelError(f"training dtype {dtype!r}: allowed are float32 and bfloat16, and float64 for proofs")
    master = torch.float64 if dtype == "float64" else torch.float32
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=master, attn_implementation=PACKED_ATTENTION, local_files_only=True
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
    scorer = Scorer(model, temperature=temperature, compute_dtype=getattr(torch, dtype), critic=critic)
    return scorer.to(device=device, dtype=master)
