"""A reward served over HTTP: one request a group."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson
from pydantic import Field

from miles_core.contracts.component import ComponentConfig, Example, Workbench
from miles_core.contracts.rewards import Reward, Sample, Score
from miles_core.errors import RewardError

if TYPE_CHECKING:
    import aiohttp

__all__ = ["RemoteConfig", "RemoteReward"]


class RemoteConfig(ComponentConfig):
    """Section `[reward]` of `remote`."""

    url: str = Field(pattern=r"^https?://")
    """Where groups are posted."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Sent with every request (authorisation)."""
    deadline: float = Field(default=60.0, gt=0)
    """Seconds for one group, all tries and waits together."""
    retries: int = Field(default=4, ge=0)
    """How often a request is tried again after a transport error or a 5xx answer; other answers are final."""
    backoff: float = Field(default=0.5, gt=0)
    """Seconds before the first retry, up to half of it more at random; doubles with each."""
    concurrency: int = Field(default=32, ge=1)
    """Requests that are open at once."""


class RemoteReward(Reward[RemoteConfig]):
    """Posts `{"samples": [{episode_id, prompt_id, messages, response, label, metadata}, …]}`, reads `{"scores": […]}`.

    A score is a number or a mapping of numbers; null says that the sample cannot be scored.
    """

    Config = RemoteConfig

    @classmethod
    def example(cls, bench: Workbench) -> Example:
        """A service that compares the answer with the label, and has no score for a row without one."""

        def answer(body: Any) -> Any:
            samples = body["samples"]
            return {"scores": [None if s["label"] is None else float(s["response"] == s["label"]) for s in samples]}

        return Example(settings={"url": bench.serve(answer)})

    def __init__(self, config: RemoteConfig) -> None:
        super().__init__(config)
        self._session: aiohttp.ClientSession | None = None

    async def setup(self) -> None:
        """See `Reward.setup`."""
        import aiohttp

        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self.config.concurrency), headers=self.config.headers
        )

    async def close(self) -> None:
        """See `Reward.close`."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def score(self, samples: Sequence[Sample]) -> list[Score | RewardError]:
        """See `Reward.score`. Raises `RewardError` when the service refuses, or does not answer by the deadline."""
        if self._session is None:
            await self.setup()
        try:
            body = orjson.dumps(
                {"samples": [_payload(sample) for sample in samples]}, option=orjson.OPT_SERIALIZE_NUMPY
            )
        except TypeError as error:
            raise RewardError(f"{samples[0].prompt.prompt_id}: the row is no JSON data ({error})") from error
        tried: list[str] = []
        try:
            async with asyncio.timeout(self.config.deadline):
                answer = await self._post(body, tried)
        except TimeoutError:
            raise RewardError(
                f"{self.config.url} gave no scores within {self.config.deadline:g} s "
                f"({'; '.join(tried) or 'no answer'})"
            ) from None
        return self._scores(answer, samples)

    async def _post(self, body: bytes, tried: list[str]) -> Any:
        """The JSON answer. `tried` collects what went wrong on the way."""
        import aiohttp

        assert self._session is not None
        headers = {"Content-Type": "application/json"}
        for attempt in range(self.config.retries + 1):
            if attempt:
                delay = self.config.backoff * 2 ** (attempt - 1)
                await asyncio.sleep(delay * (1 + random.random() / 2))
            try:
                async with self._session.post(self.config.url, data=body, headers=headers) as response:
                    content = await response.read()
                    status = response.status
            except aiohttp.ClientError as error:
                tried.append(f"try {attempt + 1}: {type(error).__name__}: {error}")
                continue
            if status >= 500:
                tried.append(f"try {attempt + 1}: HTTP {status}")
                continue
            if status != 200:
                raise RewardError(f"{self.config.url} answered HTTP {status}: {content[:300].decode(errors='replace')}")
            try:
                return orjson.loads(content)
            except orjson.JSONDecodeError as error:
                raise RewardError(f"{self.config.url} answered no JSON: {error}") from error
        raise RewardError(f"{self.config.url} failed {self.config.retries + 1} times: {'; '.join(tried)}")

    def _scores(self, answer: Any, samples: Sequence[Sample]) -> list[Score | RewardError]:
        scores = answer.get("scores") if isinstance(answer, Mapping) else None
        if not isinstance(scores, list) or len(scores) != len(samples):
            raise RewardError(
                f"{self.config.url} answered {str(answer)[:200]}, expected {{'scores': [one for each of "
                f"{len(samples)} samples]}}"
            )
        return [
            RewardError(f"episode {sample.episode.episode_id}: {self.config.url} gave no score")
            if score is None
            else score
            for score, sample in zip(scores, samples, strict=True)
        ]


def _payload(sample: Sample) -> dict[str, Any]:
    return {
        "episode_id": sample.episode.episode_id,
        "prompt_id": sample.prompt.prompt_id,
        "messages": list(sample.messages),
        "response": sample.response,
        "label": sample.prompt.label,
        "metadata": dict(sample.prompt.metadata),
    }
