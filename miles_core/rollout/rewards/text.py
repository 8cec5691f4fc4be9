"""Rewards that compare texts: `exact`, `f1` and `choice`."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from miles_core.contracts.component import Example, Workbench
from miles_core.contracts.rewards import Reward, Sample, Score
from miles_core.data.group import Prompt
from miles_core.errors import RewardError
from miles_core.rollout.rewards.answers import AnswerConfig, extract_answer, references, score_each

__all__ = ["Choice", "ChoiceConfig", "Exact", "ExactConfig", "TokenF1", "token_f1"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class ExactConfig(AnswerConfig):
    """Section `[reward]` of `exact`."""

    ignore_case: bool = False
    """Compare without regard to case."""


class Exact(Reward[ExactConfig]):
    """1 when the answer equals a reference answer, white space around both stripped; otherwise 0."""

    Config = ExactConfig

    async def score(self, samples: Sequence[Sample]) -> list[Score | RewardError]:
        """See `Reward.score`."""
        return score_each(samples, self._score)

    def _score(self, sample: Sample) -> Score:
        answer = extract_answer(self.config, sample.response)
        wanted = [reference.strip() for reference in references(sample)]
        if answer is not None and self.config.ignore_case:
            answer, wanted = answer.casefold(), [reference.casefold() for reference in wanted]
        return float(answer in wanted)


class TokenF1(Reward[AnswerConfig]):
    """Token-overlap F1 with the best reference answer, as SQuAD measures it (arXiv 1606.05250, section 6.1)."""

    Config = AnswerConfig

    async def score(self, samples: Sequence[Sample]) -> list[Score | RewardError]:
        """See `Reward.score`."""
        return score_each(samples, self._score)

    def _score(self, sample: Sample) -> Score:
        wanted = references(sample)
        answer = extract_answer(self.config, sample.response)
        return 0.0 if answer is None else max(token_f1(answer, reference) for reference in wanted)


def token_f1(answer: str, reference: str) -> float:
    """F1 of the two bags of words, lower case, without punctuation and articles. Two empty bags agree: 1."""
    ours, theirs = _words(answer), _words(reference)
    if not ours or not theirs:
        return float(ours == theirs)
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * common / (len(ours) + len(theirs))


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


class ChoiceConfig(AnswerConfig):
    """Section `[reward]` of `choice`."""

    letters: str = "ABCD"
    """Letters of the options, in order."""
    options_key: str = "options"
    """Metadata field with the list of a row's options: only as many letters count. Rows without it have them all."""


class Choice(Reward[ChoiceConfig]):
    """Multiple choice: 1 when the option that the response settles on is the label, a letter or a 0-based index.

    The option is the one named last behind the word "answer"; without one, the response's last capital letter that
    stands alone (`B`, `(B)`, `B.`).
    """

    Config = ChoiceConfig

    @classmethod
    def example(cls, bench: Workbench) -> Example:
        """One question, answered in several ways."""
        question = ({"role": "user", "content": "2 + 2 is (A) 3, (B) 4?"},)
        prompt = Prompt(prompt_id="choice:1", messages=question, label="B", metadata={"options": ["3", "4"]})
        return Example(inputs=tuple((prompt, text) for text in ("B", "The answer is (B).", "A", "")))

    async def score(self, samples: Sequence[Sample]) -> list[Score | RewardError]:
        """See `Reward.score`."""
        return score_each(samples, self._score)

    def _score(self, sample: Sample) -> Score:
        letters = self._letters(sample)
        label = sample.prompt.label
        if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(letters):
            wanted = letters[label]
        elif isinstance(label, str) and len(label.strip()) == 1 and label.strip().upper() in letters:
            wanted = label.strip().upper()
        else:
            raise RewardError(
                f"prompt {sample.prompt.prompt_id}: the label is {label!r}, expected one of {', '.join(letters)} or an "
                f"index from 0 to {len(letters) - 1}"
            )
        answer = extract_answer(self.config, sample.response)
        return float(answer is not None and chosen(answer, letters) == wanted)

    def _letters(self, sample: Sample) -> str:
        options = sample.prompt.metadata.get(self.config.options_key)
        if options is None:
            return self.config.letters
        if not isinstance(options, Sequence) or not 0 < len(options) <= len(self.config.letters):
            raise RewardError(
                f"prompt {sample.prompt.prompt_id}: metadata field {self.config.options_key!r} is {options!r}, not "
                f"a list of 1 to {len(self.config.letters)} options (set letters for more)"
            )
        return self.config.letters[: len(options)]


def chosen(text: str, letters: str) -> str | None:
    """The option that `text` settles on, None when it names none."""
    group = f"[{re.escape(letters)}]"
    # The keyword in any case, the letter as a capital: "answer: a mistake" names no option.
    stated: list[str] = re.findall(rf"(?i:answer)\W*(?i:is|:)?\W*({group})(?!\w)", text)
    alone: list[str] = stated or re.findall(rf"(?<!\w)({group})(?!\w)", text)
    return alone[-1] if alone else None
