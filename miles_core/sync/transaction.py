"""The publish transaction: one protocol for every transport; `miles_core.contracts.transports` has its table of calls.

The law: at every moment every engine that requests are routed to serves the weights of exactly the version that it
reports, and none stays paused. Engines that cannot be reached are drained, and the others go on without them; a wrong
checksum or a refusal stops a staged publish before anything is visible. An in-place transfer has no version before to
fall back to: it is sent once more, and an engine that still does not hold every tensor is drained. Engines that were
drained are told the version of every later publish, and take part again once they hold it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from miles_core.contracts.engines import EngineFleet, PauseMode
from miles_core.contracts.events import VersionPublished
from miles_core.contracts.transports import Published, WeightReceiver
from miles_core.errors import EngineError, EngineUnavailable, EnvironmentFailure, PublishError
from miles_core.sync.checksums import differences

__all__ = ["Transfer", "publish"]

Transfer = Callable[[Mapping[str, object]], Awaitable[None]]
"""`WeightSender.transfer` of a version, from the controller; takes the session."""

_LISTED = 5
_ATTEMPTS = 2


async def publish(
    published: Published,
    receiver: WeightReceiver,
    fleet: EngineFleet,
    *,
    mode: PauseMode,
    transport: str,
    transfer: Transfer | None = None,
    urls: Sequence[str] | None = None,
) -> VersionPublished:
    """Make the engines (default: all of the fleet) serve `published`. `transfer` is for in-place transports.

    Raises `PublishError`: then the version did not advance; no engine that is routed to serves it, or the error names
    those that do.
    """
    async with fleet.publishing:
        return await _Publish(published, receiver, fleet, transfer, urls or fleet.urls).run(mode, transport)


class _Publish:
    """One publish under way. `urls` are the engines that still take part."""

    def __init__(
        self,
        published: Published,
        receiver: WeightReceiver,
        fleet: EngineFleet,
        transfer: Transfer | None,
        urls: Sequence[str],
    ) -> None:
        self.published = published
        self.receiver = receiver
        self.fleet = fleet
        self.transfer = transfer
        self.urls = list(urls)
        self.gone: dict[str, str] = {}
        self.verify_seconds = 0.0

    async def run(self, mode: PauseMode, transport: str) -> VersionPublished:
        begin = time.perf_counter()
        await self._stage()
        paused = time.perf_counter()
        if self.receiver.atomic and mode != "abort":
            await self._switch(mode)
        else:
            await self._while_paused(mode)
        end = time.perf_counter()
        return VersionPublished(
            version=self.published.version,
            transport=transport,
            nbytes=self.published.nbytes,
            engines=len(self.urls),
            seconds=self.published.seconds + end - begin,
            paused_seconds=end - paused,
            verify_seconds=self.verify_seconds,
            drained=tuple(sorted(self.gone)),
        )

    async def _while_paused(self, mode: PauseMode) -> None:
        async with self.fleet.paused(mode, list(self.urls)) as failures:
            await self._sort_out("could not be paused", failures)
            if self.receiver.in_place:
                await self._in_place()
            else:
                await self._commit_staged()
            if mode != "in_place":
                await self._each("could not be flushed", self.fleet.flush)
            self._admit()

    def _admit(self) -> None:
        for url in self.urls:
            self.fleet.admit(url, self.published.version)

    # Staged transports.

    async def _stage(self) -> None:
        """Bring the version beside the one in use, and compare what arrived with what was sent."""
        expected = {tensor.name: tensor.checksum for tensor in self.published.tensors}
        results = await asyncio.gather(*(self._stage_one(url) for url in self.urls), return_exceptions=True)
        failures: dict[str, Exception] = {}
        for url, result in zip(self.urls, results, strict=True):
            if isinstance(result, Exception):
                failures[url] = result
            elif isinstance(result, BaseException):
                raise result
            elif not self.receiver.in_place and (wrong := differences(expected, dict(result))):
                failures[url] = PublishError("; ".join(wrong[:_LISTED]))
        await self._sort_out("was not staged", failures)

    async def _stage_one(self, url: str) -> Mapping[str, str]:
        """Staging may take minutes; an engine that is gone is found in seconds."""
        staging = asyncio.ensure_future(self.receiver.stage(url, self.published))
        try:
            await self.fleet.probe(url)
            return await staging
        finally:
            staging.cancel()  # where it has not ended
            await asyncio.gather(staging, return_exceptions=True)

    async def _switch(self, mode: PauseMode) -> None:
        results = await asyncio.gather(
            *(self.receiver.switch(url, self.published, mode) for url in self.urls), return_exceptions=True
        )
        failures = {u: r for u, r in zip(self.urls, results, strict=True) if isinstance(r, Exception)}
        expected = self.published.checksums
        wrong: dict[str, Exception] = {}
        for url, held in zip(self.urls, results, strict=True):
            if isinstance(held, Mapping):
                if found := differences(expected, dict(held)):
                    wrong[url] = PublishError("; ".join(found[:_LISTED]))
            elif not isinstance(held, Exception):
                raise held
        await self._judge(failures, wrong)
        self._admit()

    async def _commit_staged(self) -> None:
        results = await asyncio.gather(
            *(self.receiver.commit(url, self.published) for url in self.urls), return_exceptions=True
        )
        failures = {u: r for u, r in zip(self.urls, results, strict=True) if isinstance(r, Exception)}
        await self._judge(failures, await self._verify([url for url in self.urls if url not in failures]))

    async def _judge(self, failures: Mapping[str, Exception], wrong: Mapping[str, Exception]) -> None:
        """Drain the engines that failed to commit, or hold something else."""
        took = [url for url in self.urls if url not in failures and url not in wrong]
        for url, error in {**failures, **wrong}.items():  # what they serve now is not known, whatever they report
            await self._drain(url, f"version {self.published.version} was not committed: {error}")
        refused = [f"{url}: {error}" for url, error in failures.items() if not _unreachable(error)]
        refused += [f"{url} holds other weights: {error}" for url, error in wrong.items() if not _unreachable(error)]
        if refused or not took:
            taken = f" (committed by {', '.join(took)})" if took else ""
            raise PublishError(
                f"version {self.published.version} was staged and verified, but not committed by "
                f"{'; '.join(refused or self.gone)}{taken}"
            )

    # In-place transports.

    async def _in_place(self) -> None:
        """Write over what the engines hold; those that do not end up with every tensor are drained."""
        assert self.transfer is not None, "an in-place transport needs the sender's transfer"
        problems: dict[str, Exception] = {}
        try:
            for attempt in range(1, _ATTEMPTS + 1):
                problems, sender_is_gone = await self._attempt()
                for url, error in list(problems.items()):
                    if _unreachable(error):
                        await self._drain(url, f"it went away in a transfer: {error}")
                        del problems[url]
                if not problems or sender_is_gone or attempt == _ATTEMPTS or not self.urls:
                    break
            for url, error in problems.items():
                await self._drain(url, f"it may hold a part of version {self.published.version}: {error}")
            if not self.urls:
                reasons = "; ".join(f"{url}: {reason}" for url, reason in self.gone.items())
                raise PublishError(
                    f"version {self.published.version} was not published, and no engine is left that holds a verified "
                    f"version: {reasons}"
                )
            failures = {}
            results = await asyncio.gather(
                *(self.receiver.commit(url, self.published) for url in self.urls), return_exceptions=True
            )
            failures = {u: r for u, r in zip(self.urls, results, strict=True) if isinstance(r, Exception)}
            for url, error in failures.items():  # it holds the new weights, and reports the version before
                await self._drain(url, f"it did not take the number of version {self.published.version}: {error}")
            if not self.urls:
                raise PublishError(
                    f"version {self.published.version} was not committed: "
                    + "; ".join(f"{url}: {error}" for url, error in failures.items())
                )
        except BaseException as failure:
            for url in list(self.urls):
                await self._drain(url, f"publishing version {self.published.version} failed: {failure}")
            raise

    async def _attempt(self) -> tuple[dict[str, Exception], bool]:
        """Transfer to all engines and verify them: what is wrong with which, and whether the sender is gone."""
        assert self.transfer is not None
        session = await self.receiver.connect(list(self.urls), self.published)
        sent, *received = await asyncio.gather(
            self.transfer(session),
            *(self.receiver.receive(url, self.published, session) for url in self.urls),
            return_exceptions=True,
        )
        if isinstance(sent, BaseException) and not isinstance(sent, Exception):
            raise sent
        problems = {u: r for u, r in zip(self.urls, received, strict=True) if isinstance(r, Exception)}
        problems |= await self._verify([url for url in self.urls if url not in problems])
        if problems:
            await self._discard(self.urls)
            problems = {url: await self._told_apart(url, error) for url, error in problems.items()}
        if isinstance(sent, Exception):
            problems = {url: _because(error, sent) for url, error in problems.items()}
        return problems, isinstance(sent, EnvironmentFailure)

    async def _told_apart(self, url: str, error: Exception) -> Exception:
        """An engine that waited for another one's sake did not answer in time either, but is there."""
        if _unreachable(error):
            try:
                await self.fleet.probe(url)
            except EngineError:
                return error
            return PublishError(f"{error}; it answers again")
        return error

    # Both.

    async def _verify(self, urls: Sequence[str]) -> dict[str, Exception]:
        """Ask engines for the checksums of what they hold: those that differ or do not answer, and why."""
        begin = time.perf_counter()
        expected = self.published.checksums
        answers = await asyncio.gather(*(self.fleet.checksums(url) for url in urls), return_exceptions=True)
        self.verify_seconds += time.perf_counter() - begin
        problems: dict[str, Exception] = {}
        for url, answer in zip(urls, answers, strict=True):
            if isinstance(answer, Exception):
                problems[url] = answer
            elif isinstance(answer, BaseException):
                raise answer
            elif wrong := differences(expected, dict(answer)):
                problems[url] = PublishError("; ".join(wrong[:_LISTED]))
        return problems

    async def _each(self, what: str, call: Callable[[str], Awaitable[None]]) -> None:
        """Call every engine; those that fail are drained."""
        results = await asyncio.gather(*(call(url) for url in self.urls), return_exceptions=True)
        failures = {u: r for u, r in zip(self.urls, results, strict=True) if isinstance(r, Exception)}
        for url, error in failures.items():
            await self._drain(url, f"{what}: {error}")

    async def _sort_out(self, what: str, failures: Mapping[str, Exception]) -> None:
        """Nothing is visible yet: drain what cannot be reached; anything else stops the publish, everywhere."""
        refused = [f"{url} {what}: {error}" for url, error in failures.items() if not _unreachable(error)]
        for url, error in failures.items():
            if _unreachable(error):
                await self._drain(url, f"it {what}: {error}")
        if refused or not self.urls:
            await self._discard(self.urls)
            raise PublishError(
                f"version {self.published.version} was not published, the engines keep the version before: "
                + "; ".join(refused or [f"{url}: {reason}" for url, reason in self.gone.items()])
            )

    async def _discard(self, urls: Sequence[str]) -> None:
        await asyncio.gather(*(self.receiver.discard(url, self.published) for url in urls), return_exceptions=True)

    async def _drain(self, url: str, reason: str) -> None:
        if url in self.urls:
            self.urls.remove(url)
        self.gone[url] = reason
        await self.fleet.drain(url, reason)


def _unreachable(error: BaseException | None) -> bool:
    """Whether the engine did not answer, anywhere in the chain of causes."""
    while error is not None:
        if isinstance(error, EngineUnavailable):
            return True
        error = error.__cause__
    return False


def _because(error: Exception, sender: Exception) -> Exception:
    """The engine's error, with the sender's."""
    told = PublishError(f"{error} (the sender: {sender})")
    told.__cause__ = error
    return told
