"""Statistics of an evaluation: mean, standard error over prompts, unbiased pass@k."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["mean_and_error", "pass_at_k"]


def mean_and_error(per_prompt: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Mean reward over prompts, and its standard error: the samples of one prompt are averaged first, since they are
    not independent. The error of fewer than two prompts is 0. Raises `ValueError` without any sample.

    >>> mean_and_error([[1.0, 0.0], [1.0, 1.0]])
    (0.75, 0.25)
    """
    means = [sum(rewards) / len(rewards) for rewards in per_prompt if rewards]
    if not means:
        raise ValueError("no scored sample to take a mean of")
    mean = sum(means) / len(means)
    if len(means) < 2:
        return mean, 0.0
    variance = sum((m - mean) ** 2 for m in means) / (len(means) - 1)
    return mean, math.sqrt(variance / len(means))


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k samples is correct, from `correct` of `samples`
    (Chen et al., arXiv 2107.03374): 1 − C(n−c, k) / C(n, k).

    >>> pass_at_k(1, 4, 2)
    0.5
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {samples}")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)
