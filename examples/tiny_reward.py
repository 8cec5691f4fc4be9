"""Reward of the tiny example: the share of an answer's characters that are of the asked kind."""

from __future__ import annotations

from miles_core.contracts.rewards import Sample


def share(sample: Sample) -> float:
    """1.0 when every character of the answer is one of the label's, 0.0 for an empty answer."""
    answer = sample.response.strip()
    return sum(character in sample.prompt.label for character in answer) / max(len(answer), 1)
