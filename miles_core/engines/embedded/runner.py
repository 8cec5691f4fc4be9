"""One step of the model: a plan in, one sampled token a sequence out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .attention import NAME, PackedStep, Span
from .kv_pool import KVPool
from .routing import RouteRecorder
from .sampler import Draw, Sampled, sample

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

    from .protocol import GenerateRequest
    from .scheduler import Plan, Segment
    from .sequence import LogprobEntry
    from .sequence import Sequence as Request

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(path: Path, *, dtype: str, device: str) -> PreTrainedModel:
    """Load a causal LM whose attention is the packed one.

    Raises:
        ValueError: the model's attention cannot be replaced (it does not use transformers' AttentionInterface).
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype], attn_implementation=NAME)
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(
            f"{type(model).__name__} does not use transformers' AttentionInterface, so the embedded engine cannot "
            "serve it; serve this model with SGLang"
        )
    model.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]
    if device == "cpu":
        _widen_head(model)
    return model


def _widen_head(model: PreTrainedModel) -> None:
    """Let the output projection multiply from the left: for few tokens, CPU BLAS is faster on W @ x.T."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        logits = torch.mm(head.weight, flat.t()).t()
        if head.bias is not None:
            logits = logits + head.bias
        return logits.reshape(*hidden.shape[:-1], -1)

    if isinstance(head, torch.nn.Linear):
        head.forward = forward  # type: ignore[method-assign, assignment]


class ModelRunner:
    """The model, its KV pool, and for mixture-of-experts models the routes of each slot.

    Args:
        model: as :func:`load_model` gives it.
        slots: tokens of the pool.
        rows: sequences that decode at once.
    """

    def __init__(self, model: PreTrainedModel, *, slots: int, rows: int) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.pool = KVPool(slots=slots, rows=rows)
        self.routes = RouteRecorder(model, slots=slots)

    @torch.inference_mode()
    def step(self, plan: Plan) -> tuple[list[Segment], Sampled | None]:
        """Compute a plan; return the segments that sample, in the order of the sampled batch.

        Prompt log-probs and routed experts that sequences asked for are written to them.
        """
        segments = plan.segments
        packed, ids, positions = self._pack(plan)
        samplers = [segment for segment in segments if segment.samples and segment.sequence.remaining > 0]
        ends = _ends(segments)
        keep = [ends[id(segment)] - 1 for segment in samplers]
        scored = [segment for segment in segments if _scored_positions(segment)]
        for segment in scored:
            first = ends[id(segment)] - (segment.stop - segment.start)
            keep += [first + position - 1 - segment.start for position in _scored_positions(segment)]
        record = any(segment.sequence.request.return_routed_experts for segment in segments)
        with self.routes.recording(packed.slots if record else None):
            output = self.model(
                input_ids=ids,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=torch.tensor(keep or [0], device=self.device),
                packed_step=packed,
            )
        if not record:
            self.routes.forget(packed.slots)
        logits = output.logits[0]
        _score_prompts(scored, logits[len(samplers) :])
        if not samplers:
            return [], None
        draws = [
            Draw(params=segment.sequence.request.sampling, index=len(segment.sequence.logprobs)) for segment in samplers
        ]
        sampled = sample(logits[: len(samplers)], draws)
        for row, segment in enumerate(samplers):
            request = segment.sequence.request
            if request.top_logprobs_num or request.token_ids_logprob:
                top, chosen = _extra_logprobs(request, sampled.row_logprobs(row))
                segment.sequence.top_logprobs.append(top)
                segment.sequence.chosen_logprobs.append(chosen)
        return samplers, sampled

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run one token through the model: what it cannot serve fails here and not on the first request."""
        slot = torch.zeros(1, dtype=torch.long, device=self.device)
        span = Span(start=0, stop=1, slots=slot)
        step = PackedStep(pool=self.pool, slots=slot, decode_positions=slot[:0], longest=0, spans=[span], fresh=[])
        with self.routes.recording(slot):
            self.model(input_ids=slot[None], position_ids=slot[None], use_cache=False, packed_step=step)
        self.routes.forget(slot)

    @staticmethod
    def use_threads(count: int) -> None:
        """Compute with ``count`` threads, in the calling thread."""
        torch.set_num_threads(count)

    def take_routes(self, sequence: Request) -> None:
        """Copy the routes of a sequence's computed tokens to it, before its slots are given back."""
        sequence.routes = self.routes.read(sequence.slots[: sequence.computed])

    def _pack(self, plan: Plan) -> tuple[PackedStep, torch.Tensor, torch.Tensor]:
        segments = plan.segments
        ids, positions, slots = [], [], []
        for segment in segments:
            sequence = segment.sequence
            ids += sequence.ids[segment.start : segment.stop]
            positions.append(np.arange(segment.start, segment.stop))
            slots.append(sequence.slots[segment.start : segment.stop])
        longest = max((segment.stop for segment in plan.decode), default=0)
        lengths = [segment.start for segment in plan.decode]
        self.pool.prepare(plan.moves, lengths, max([longest, *(len(sequence.ids) for sequence in plan.fresh)]))
        spans, start = [], len(plan.decode)
        for segment in plan.extend:
            stop = start + segment.stop - segment.start
            spans.append(Span(start=start, stop=stop, slots=self._tensor(segment.sequence.slots[: segment.stop])))
            start = stop
        decode_positions = np.array([segment.start for segment in plan.decode], dtype=np.int64)
        step = PackedStep(
            pool=self.pool,
            slots=self._tensor(np.concatenate(slots)),
            decode_positions=self._tensor(decode_positions),
            longest=longest,
            spans=spans,
            fresh=[
                (sequence.row, self._tensor(sequence.slots[: len(sequence.ids)]))
                for sequence in plan.fresh
                if sequence.row is not None
            ],
        )
        return step, torch.tensor([ids], device=self.device), self._tensor(np.concatenate(positions))[None]

    def _tensor(self, array: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def _ends(segments: Sequence[Segment]) -> dict[int, int]:
    """Return where each segment ends in the packed step, by ``id(segment)``."""
    lengths = [segment.stop - segment.start for segment in segments]
    return dict(zip(map(id, segments), np.cumsum(lengths).tolist(), strict=True))


def _scored_positions(segment: Segment) -> range:
    """Return the prompt positions whose log-prob this segment's logits give."""
    first = segment.sequence.first_logprob
    if first is None:
        return range(0)
    return range(max(first, segment.start + 1), min(segment.stop + 1, segment.sequence.prompt_tokens))


def _score_prompts(scored: Sequence[Segment], logits: torch.Tensor) -> None:
    """Write prompt log-probs to the sequences of ``scored``, whose logits lie one behind the other."""
    start = 0
    for segment in scored:
        sequence, positions = segment.sequence, _scored_positions(segment)
        scaled = logits[start : start + len(positions)].float() / sequence.request.logprob_temperature
        logprobs = scaled.log_softmax(-1)
        start += len(positions)
        tokens = sequence.ids[positions.start : positions.stop]
        own = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
        sequence.input_logprobs += [(logprob, token, None) for logprob, token in zip(own, tokens, strict=True)]
        if sequence.request.top_logprobs_num or sequence.request.token_ids_logprob:
            for row in logprobs:
                top, chosen = _extra_logprobs(sequence.request, row)
                sequence.input_top_logprobs.append(top)
                sequence.input_chosen_logprobs.append(chosen)


def _extra_logprobs(request: GenerateRequest, logprobs: torch.Tensor) -> tuple[list[LogprobEntry], list[LogprobEntry]]:
    """Return the log-probs of the likeliest tokens and of those that the request named."""
    values, ids = logprobs.topk(request.top_logprobs_num)
    top: list[LogprobEntry] = [(value, token, None) for value, token in zip(values.tolist(), ids.tolist(), strict=True)]
    chosen: list[LogprobEntry] = [(float(logprobs[token]), token, None) for token in request.token_ids_logprob]
    return top, chosen
