"""Packed attention equals one trajectory at a time, and nothing leaks, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from miles_core.errors import ModelError
from miles_core.training.attention import Packing, packed_attention
from miles_core.training.layout import Span, lay_out
from miles_core.training.packing import rows_needed
from miles_core.training.scorer import load_scorer


@pytest.fixture(scope="module")
def scorer(directory):
    return load_scorer(directory, dtype="float32", temperature=1.0)


def a_batch(seed=0):
    """Two groups with a prompt each that begin alike, answers of 1 to 9 tokens, and one trajectory of its own."""
    rng = np.random.default_rng(seed)
    few_shot = rng.integers(3, 290, 5)
    tokens = []
    for prompt_length in (12, 7):
        prompt = np.concatenate([few_shot, rng.integers(3, 290, prompt_length)])
        tokens += [np.concatenate([prompt, rng.integers(3, 290, n)]).astype(np.int32) for n in (1, 4, 4, 9)]
    return [*tokens, rng.integers(3, 290, 15).astype(np.int32)]


def packed_logprobs(scorer, tokens, share=True):
    wanted = [np.ones(len(t), dtype=bool) for t in tokens]
    layout = lay_out(range(len(tokens)), tokens, [rows_needed(w) for w in wanted], wanted, share=share)
    flat = scorer.score(layout)[0]
    parts = {int(i): flat[layout.offsets[k] : layout.offsets[k + 1]] for k, i in enumerate(layout.trajectories)}
    return [parts[i] for i in range(len(tokens))]


@pytest.mark.parametrize("share", [True, False])
def test_equals_one_trajectory_at_a_time_through_transformers(directory, scorer, share):
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens = a_batch()
    for ids, packed in zip(tokens, packed_logprobs(scorer, tokens, share), strict=True):
        ids = torch.from_numpy(ids).long()
        logits = plain(ids[None]).logits[0, :-1]
        expected = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        assert packed[0] == 0
        torch.testing.assert_close(packed[1:], expected, rtol=0, atol=2e-6)


def test_gradients_equal_one_trajectory_at_a_time(directory, scorer):
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens = a_batch()
    scorer.zero_grad()
    sum(p.square().sum() for p in packed_logprobs(scorer, tokens)).backward()
    for ids in tokens:
        ids = torch.from_numpy(ids).long()
        plain(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None]).square().sum().backward()
    for (name, ours), theirs in zip(scorer.model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=2e-4, atol=2e-4, msg=name)


@pytest.mark.parametrize("share", [True, False])
def test_perturbing_one_trajectory_leaves_the_others_bit_identical(scorer, share):
    tokens = a_batch()
    before = packed_logprobs(scorer, tokens, share)
    for victim in range(len(tokens)):
        changed = [t.copy() for t in tokens]
        changed[victim][-2 if victim % 4 else -1] += 1
        after = packed_logprobs(scorer, changed, share)
        for other in set(range(len(tokens))) - {victim}:
            assert torch.equal(before[other], after[other]), (victim, other)
        assert not torch.equal(before[victim], after[victim])


def test_a_perturbed_answer_moves_no_gradient_of_another_input(scorer):
    spans = (
        Span(start=0, length=3, prefix_rows=np.empty((1, 0), dtype=np.int64)),
        Span(start=3, length=2, prefix_rows=np.array([[0, 1, 2], [0, 1, 2]])),
    )
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 7, 8, requires_grad=True) for heads in (4, 2, 2))
    out, _ = packed_attention(torch.nn.Module(), query, key, value, None, packing=Packing(spans, torch.device("cpu")))
    assert out.shape == (1, 7, 4, 8)
    out[0, 3:5].sum().backward()  # the first answer
    for x in (query, key, value):
        assert torch.equal(x.grad[0, :, 5:], torch.zeros_like(x.grad[0, :, 5:]))
    assert bool((value.grad[0, :, :3] != 0).all())  # it does see the prompt


def test_refuses_what_it_does_not_compute():
    spans = (Span(start=0, length=5, prefix_rows=np.empty((1, 0), dtype=np.int64)),)
    x = torch.zeros(1, 2, 5, 4)
    packing = Packing(spans, torch.device("cpu"))
    with pytest.raises(ValueError, match="sliding window of 4"):
        packed_attention(torch.nn.Module(), x, x, x, None, packing=packing, sliding_window=4)
    with pytest.raises(ValueError, match="dropout"):
        packed_attention(torch.nn.Module(), x, x, x, None, dropout=0.1, packing=packing)
    with pytest.raises(ValueError, match="softcap"):
        packed_attention(torch.nn.Module(), x, x, x, None, packing=packing, softcap=50.0)


def test_a_model_that_does_not_attend_through_the_interface_is_refused(directory):
    other = load_scorer(directory, dtype="float32", temperature=1.0)
    other.model.set_attn_implementation("sdpa")
    with pytest.raises(ModelError, match="0 of 2 layers"):
        packed_logprobs(other, a_batch())
