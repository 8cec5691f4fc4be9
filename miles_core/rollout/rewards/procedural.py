"""The task family's own scorer, for prompts of the `reasoning_gym` source."""

from __future__ import annotations

from collections.abc import Sequence

from miles_core.contracts.component import Example, Requirement, Workbench
from miles_core.contracts.rewards import Reward, Sample, Score
from miles_core.errors import RewardError
from miles_core.rollout.rewards.answers import AnswerConfig, extract_answer, score_each

__all__ = ["ReasoningGymReward"]


class ReasoningGymReward(Reward[AnswerConfig]):
    """Scores from 0 to 1 by the family's `score_answer`; a response without an answer scores 0.

    The item is drawn again from the prompt's metadata, so it is the one that was asked, in any process.
    """

    Config = AnswerConfig
    requires = (
        Requirement(key="import:reasoning_gym", reason="the task families' scorers live in it (extra 'tasks')"),
    )

    @classmethod
    def example(cls, bench: Workbench) -> Example:
        """A question of `basic_arithmetic`, answered rightly and wrongly."""
        from miles_core.rollout.sources.reasoning_gym import ReasoningGymConfig, ReasoningGymSource

        families = ReasoningGymConfig.model_validate({"families": ("basic_arithmetic",)})
        prompt = ReasoningGymSource(families).prompt(0)
        return Example(inputs=((prompt, str(prompt.label)), (prompt, "none"), (prompt, "")))

    async def score(self, samples: Sequence[Sample]) -> list[Score | RewardError]:
        """See `Reward.score`."""
        return score_each(samples, self._score)

    def _score(self, sample: Sample) -> Score:
        from miles_core.rollout.sources.reasoning_gym import score_answer

        metadata = sample.prompt.metadata
        missing = [key for key in ("family", "config", "draw") if key not in metadata]
        if missing:
            raise RewardError(
                f"prompt {sample.prompt.prompt_id}: metadata lacks {', '.join(missing)}; the reward 'reasoning_gym' "
                "scores prompts of the data source 'reasoning_gym'"
            )
        answer = extract_answer(self.config, sample.response)
        try:
            return score_answer(metadata["family"], metadata["config"], metadata["draw"], answer)
        except Exception as error:  # a family's scorer meets whatever the policy wrote
            raise RewardError(
                f"the scorer of {metadata['family']} failed on {answer!r:.200}: {type(error).__name__}: {error}"
            ) from error
