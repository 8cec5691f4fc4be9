"""Chunked log-probs equal the plain ones, with their gradients, for any chunking."""

from __future__ import annotations

import pytest
import torch

from miles_core.training.logprobs import token_logprobs


def plain(hidden, weight, rows, targets, temperature, bias=None):
    logits = torch.nn.functional.linear(hidden, weight, bias).float() / temperature
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return logp[rows].gather(-1, targets[:, None])[:, 0], entropy[rows]


def inputs(dtype=torch.float32, rows=37, width=16, vocabulary=53, tokens=61):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator, dtype=dtype)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=dtype)
    return (
        hidden,
        weight,
        torch.randint(0, rows, (tokens,), generator=generator),
        torch.randint(0, vocabulary, (tokens,), generator=generator),
    )


@pytest.mark.parametrize("chunk", [1, 4, 7, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_are_those_of_the_plain_formula(chunk, temperature, with_bias):
    hidden, weight, rows, targets = inputs()
    bias = torch.linspace(-1, 1, weight.shape[0]) if with_bias else None
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, *([bias] if with_bias else []))]
    others = [x.detach().clone().requires_grad_() for x in leaves]
    ours = token_logprobs(
        leaves[0],
        leaves[1],
        rows,
        targets,
        temperature=temperature,
        bias=leaves[2] if with_bias else None,
        entropy=True,
        chunk=chunk,
    )
    theirs = plain(others[0], others[1], rows, targets, temperature, others[2] if with_bias else None)
    cotangents = torch.linspace(-1, 2, len(rows)), torch.linspace(0.5, -1, len(rows))
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-5)
    sum((x * c).sum() for x, c in zip(ours, cotangents, strict=True)).backward()
    sum((x * c).sum() for x, c in zip(theirs, cotangents, strict=True)).backward()
    for mine, reference in zip(leaves, others, strict=True):
        torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-4, atol=1e-5)


def test_chunking_does_not_change_a_bit():
    hidden, weight, _, _ = inputs(rows=64, width=64, vocabulary=320)
    rows, targets = torch.arange(64), torch.arange(64)
    whole = token_logprobs(hidden, weight, rows, targets, temperature=1.0, entropy=True, chunk=64)
    parts = token_logprobs(hidden, weight, rows, targets, temperature=1.0, entropy=True, chunk=16)
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_bits_are_those_of_whole_logits(temperature):
    """At the vocabulary and width of SmolLM2, in float32."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(96, 576, generator=generator), torch.randn(49_152, 576, generator=generator) / 25
    rows, targets = torch.arange(96), torch.randint(0, 49_152, (96,), generator=generator)
    ours, _ = token_logprobs(hidden, weight, rows, targets, temperature=temperature, chunk=32)
    logits = torch.nn.functional.linear(hidden, weight) / temperature
    assert torch.equal(ours, logits.log_softmax(-1).gather(1, targets[:, None])[:, 0])


def test_the_sampling_temperature_matters():
    hidden, weight, rows, targets = inputs()
    warm, _ = token_logprobs(hidden, weight, rows, targets, temperature=1.0)
    cool, _ = token_logprobs(hidden, weight, rows, targets, temperature=0.6)
    assert not torch.allclose(warm, cool)
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(hidden, weight, rows, targets, temperature=0.0)


def test_no_tokens_give_no_logprobs():
    hidden, weight, _, _ = inputs()
    empty = torch.zeros(0, dtype=torch.int64)
    logprobs, entropy = token_logprobs(hidden, weight, empty, empty, temperature=1.0, entropy=True)
    assert logprobs.shape == (0,)
    assert entropy.shape == (0,)
