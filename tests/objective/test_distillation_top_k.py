"""Distillation on k tokens and the rest, against plain loops over whole vocabularies, and by finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_core.contracts.objective import MicroBatch
from miles_core.objective.distillation_top_k import DistillationTopK, DistillationTopKConfig

DIRECTIONS = ["reverse", "forward"]
logits = st.lists(st.floats(-6, 6), min_size=5, max_size=5)


def batch(student, teacher, mask):
    n = len(mask)
    column = torch.zeros(n, dtype=torch.float64)
    return MicroBatch(
        offsets=torch.tensor([0, n]),
        loss_mask=torch.tensor(mask),
        logprobs=column,
        old_logprobs=column,
        rollout_logprobs=column,
        advantages=column,
        corrections=torch.ones(n, dtype=torch.float64),
        top_logprobs=student,
        teacher_top_logprobs=teacher,
    )


def reference(student, teacher, top, direction):
    """KL of two full distributions (lists of probabilities) after all but the `top` outcomes are made one."""
    coarse = [[p[i] for i in top] for p in (student, teacher)]
    p, q = ([*own, max(1 - math.fsum(own), 1e-6)] for own in coarse)
    if direction == "forward":
        p, q = q, p
    return math.fsum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True))


@given(st.lists(st.tuples(logits, logits, st.booleans()), min_size=1, max_size=4), st.integers(1, 5))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_it_is_the_divergence_of_the_coarse_distributions(direction, rows, k):
    student, teacher = (torch.tensor([r[i] for r in rows], dtype=torch.float64).log_softmax(-1) for i in (0, 1))
    ids = teacher.topk(k).indices
    mask = [r[2] for r in rows]
    result = DistillationTopK(DistillationTopKConfig(direction=direction)).loss(
        batch(student.gather(1, ids), teacher.gather(1, ids), mask)
    )
    for t, kept in enumerate(mask):
        expected = reference(student[t].exp().tolist(), teacher[t].exp().tolist(), ids[t].tolist(), direction)
        if kept:
            assert result.per_token[t].item() == pytest.approx(expected, rel=1e-6, abs=2e-5 if k == 5 else 1e-9)
    assert result.sums["kl"].item() == pytest.approx(
        sum(result.per_token[t].item() for t, kept in enumerate(mask) if kept), abs=1e-9
    )


@given(logits, logits)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_it_is_never_above_that_of_the_whole_vocabularies_nor_below_zero(direction, first, second):
    student, teacher = (torch.tensor([x], dtype=torch.float64).log_softmax(-1) for x in (first, second))
    p, q = (student, teacher) if direction == "reverse" else (teacher, student)
    whole = float((p.exp() * (p - q)).sum())
    ids = teacher.topk(3).indices
    term = DistillationTopK(DistillationTopKConfig(direction=direction))
    coarse = term.loss(batch(student.gather(1, ids), teacher.gather(1, ids), [True])).per_token.item()
    assert -1e-5 <= coarse <= whole + 1e-5


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_gradient_by_finite_differences(direction):
    torch.manual_seed(0)
    teacher = torch.randn(3, 6, dtype=torch.float64).log_softmax(-1)
    ids = teacher.topk(2).indices
    term = DistillationTopK(DistillationTopKConfig(direction=direction))

    def loss(free):
        student = free.log_softmax(-1).gather(1, ids)
        per_token = term.loss(batch(student, teacher.gather(1, ids), [True, False, True])).per_token
        return per_token[[0, 2]].sum()

    assert torch.autograd.gradcheck(loss, torch.randn(3, 6, dtype=torch.float64, requires_grad=True))


def test_a_student_that_is_the_teacher_has_nothing_to_learn():
    torch.manual_seed(0)
    free = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    student = free.log_softmax(-1)
    ids = student.topk(3).indices
    top = student.gather(1, ids)
    result = DistillationTopK(DistillationTopKConfig()).loss(batch(top, top.detach(), [True, True]))
    result.per_token.sum().backward()
    assert result.per_token.tolist() == pytest.approx([0, 0], abs=1e-12)
    assert float(free.grad.abs().max()) < 1e-12


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_certain_models_give_finite_numbers(direction):
    """Probabilities of exactly 1 leave no rest; those of exactly 0 have a log-prob of about −100."""
    sure = torch.tensor([[0.0, -100.0], [-100.0, 0.0]], requires_grad=True)
    other = torch.tensor([[-100.0, 0.0], [-100.0, 0.0]])
    result = DistillationTopK(DistillationTopKConfig(direction=direction)).loss(batch(sure, other, [True, True]))
    result.per_token.sum().backward()
    assert bool(result.per_token.isfinite().all())
    assert bool(sure.grad.isfinite().all())
