"""Mathematical equality, by math-verify in worker processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic import Field

from miles_core.contracts.component import Requirement
from miles_core.contracts.rewards import Reward, Sample, Score
from miles_core.errors import RewardError
from miles_core.rollout.rewards.answers import AnswerConfig, extract_answer, named, references

__all__ = ["MathConfig", "MathReward"]

_LINE_LIMIT = 1 << 24


class MathConfig(AnswerConfig):
    """Section `[reward]` of `math`."""

    workers: int = Field(default=1, ge=1)
    """Worker processes."""
    verify_seconds: int = Field(default=5, ge=1)
    """Time for parsing one answer, and for comparing it: an answer that takes longer is not equal, and scores 0."""
    timeout: float = Field(default=60.0, gt=0)
    """Seconds after which a worker that does not answer is killed and replaced; the sample cannot be scored then."""


class MathReward(Reward[MathConfig]):
    r"""1 when the answer equals a reference answer as mathematics (`\frac{1}{3}` and `1/3`), otherwise 0.

    math-verify takes the last `\boxed{}` or expression of the answer itself, so `extract` is needed only where that
    picks the wrong part. Samples are compared by `workers` processes; each starts with its first sample.
    """

    Config = MathConfig
    requires = (Requirement(key="import:math_verify", reason="it does the comparison (extra 'tasks')"),)

    def __init__(self, config: MathConfig) -> None:
        super().__init__(config)
        self._idle: asyncio.Queue[_Worker] | None = None
        self._workers: list[_Worker] = []

    async def setup(self) -> None:
        """See `Reward.setup`."""
        self._workers = [_Worker() for _ in range(self.config.workers)]
        self._idle = asyncio.Queue()
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def score(self, samples: Sequence[Sample]) -> list[Score | RewardError]:
        """See `Reward.score`."""
        if self._idle is None:
            await self.setup()
        return list(await asyncio.gather(*(self._score(sample) for sample in samples)))

    async def close(self) -> None:
        """Ends the workers."""
        workers, self._workers, self._idle = self._workers, [], None
        for worker in workers:
            await worker.stop()

    async def _score(self, sample: Sample) -> Score | RewardError:
        try:
            gold = references(sample)
            answer = extract_answer(self.config, sample.response)
            if answer is None:
                return 0.0
            if self.config.boxed:
                answer = f"\\boxed{{{answer}}}"
            request = {"gold": gold, "answer": answer, "seconds": self.config.verify_seconds}
            async with self._worker() as worker:
                return await worker.ask(request, self.config.timeout)
        except RewardError as error:
            return named(error, sample)

    @contextlib.asynccontextmanager
    async def _worker(self) -> AsyncIterator[_Worker]:
        assert self._idle is not None
        idle = self._idle
        worker = await idle.get()
        try:
            yield worker
        finally:
            idle.put_nowait(worker)


class _Worker:
    """One child process, started when it is first asked, replaced after a failure."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, request: dict[str, Any], timeout: float) -> float:
        """The child's verdict. Raises `RewardError` when it has none; cancelled or failed, the child is killed."""
        try:
            async with asyncio.timeout(timeout):
                answer = await self._exchange(json.dumps(request).encode() + b"\n")
        except TimeoutError:
            await self.stop()
            raise RewardError(
                f"math-verify did not answer within {timeout:g} s on {request['answer'][-200:]!r}"
            ) from None
        except BaseException:
            await self.stop()
            raise
        if "error" in answer:
            raise RewardError(f"math-verify failed on {request['answer'][-200:]!r}: {answer['error']}")
        return float(answer["score"])

    async def _exchange(self, line: bytes) -> dict[str, Any]:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "miles_core.rollout.rewards.math_worker",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LINE_LIMIT,
                start_new_session=True,  # Ctrl-C is the controller's to handle; the child ends with its stdin
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            await process.stdin.drain()
            answer = await process.stdout.readline()
        except (ConnectionError, ValueError) as error:
            raise RewardError(f"the math worker broke its pipe: {error}") from error
        if not answer:
            raise RewardError(f"the math worker died with status {await process.wait()}")
        return dict(json.loads(answer))

    async def stop(self) -> None:
        """Kill the child and wait for it. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        await process.wait()
        assert process.stdin is not None
        process.stdin.close()
