"""From a response to the answer in it, and from a row to its reference answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import field_validator, model_validator

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.rewards import Sample, Score
from miles_core.errors import RewardError

__all__ = ["AnswerConfig", "extract_answer", "last_boxed", "named", "references", "score_each"]

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")


class AnswerConfig(ComponentConfig):
    """How the answer is found in a response; the part of `[reward]` that `exact`, `f1`, `choice` and `math` share."""

    extract: Literal["all", "first_line", "last_line", "regex"] = "all"
    """Which part of the response is the answer: all of it, its first or last line that is not blank, or the last match
    of `pattern`."""
    pattern: str = ""
    """With `extract = "regex"`: a Python regular expression; its first group, if it has one, is the answer."""
    boxed: bool = False
    r"""Take the content of the last `\boxed{}` in that part; a response without one has no answer."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"is no regular expression: {error}") from error
        return value

    @model_validator(mode="after")
    def _pattern_is_used(self) -> AnswerConfig:
        if (self.extract == "regex") != bool(self.pattern):
            raise ValueError('pattern is needed with extract = "regex", and has no effect without it')
        return self


def extract_answer(config: AnswerConfig, response: str) -> str | None:
    """The answer, white space stripped; None when the response has none."""
    text: str | None = response
    if config.extract == "regex":
        matches = list(re.finditer(config.pattern, response))
        text = None if not matches else matches[-1][1 if matches[-1].re.groups else 0]
    elif config.extract != "all":
        lines = [line for line in response.splitlines() if line.strip()]
        text = None if not lines else lines[0 if config.extract == "first_line" else -1]
    if text is not None and config.boxed:
        text = last_boxed(text)
    return None if text is None else text.strip()


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{…}` whose braces balance; None when there is none.

    >>> last_boxed(r"\boxed{1} and \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    for match in reversed(list(_BOXED.finditer(text))):
        depth, position = 1, match.end()
        while position < len(text) and depth:
            if text[position] == "\\":
                position += 1  # an escaped brace is no brace
            elif text[position] in "{}":
                depth += 1 if text[position] == "{" else -1
            position += 1
        if depth == 0:
            return text[match.end() : position - 1]
    return None


def references(sample: Sample) -> list[str]:
    """The reference answers of a row: its label, or each of a list of them, as text.

    Raises `RewardError` for a row without a label, or whose label is no text, number or list of them.
    """
    label = sample.prompt.label
    values = label if isinstance(label, list | tuple) else [label]
    if not values or not all(isinstance(value, str | int | float) for value in values):
        raise RewardError(
            f"prompt {sample.prompt.prompt_id}: the label is {label!r}, expected text, a number or a list of them; "
            "does label_key name the right field?"
        )
    return [str(value) for value in values]


def score_each(samples: Sequence[Sample], score: Callable[[Sample], Score]) -> list[Score | RewardError]:
    """Scores of samples that do not depend on each other; one that cannot be scored fails alone."""
    scores: list[Score | RewardError] = []
    for sample in samples:
        try:
            scores.append(score(sample))
        except RewardError as error:
            scores.append(named(error, sample))
    return scores


def named(error: RewardError, sample: Sample) -> RewardError:
    """The same error, its message naming the episode."""
    return RewardError(f"episode {sample.episode.episode_id}: {error}")
