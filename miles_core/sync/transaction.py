"""The publish transaction: stage and verify on every engine, then pause, commit, verify again, resume.

Nothing is visible before every engine has acknowledged every tensor with a matching checksum. A failure before the
commit leaves all engines on the version before; a failure in the commit is reported with the engines it concerns.
Engines are never left paused.
"""

from __future__ import annotations

import asyncio
import time

from miles_core.contracts.engines import EngineFleet, PauseMode
from miles_core.contracts.events import VersionPublished
from miles_core.contracts.transports import Published, WeightReceiver
from miles_core.errors import PublishError
from miles_core.sync.checksums import differences

__all__ = ["publish"]


async def publish(
    published: Published, receiver: WeightReceiver, fleet: EngineFleet, *, mode: PauseMode, transport: str
) -> VersionPublished:
    """Make every engine of the fleet serve `published`. Raises `PublishError`; then no engine serves the new version,
    or the error names those that do."""
    begin = time.perf_counter()
    expected = {tensor.name: tensor.checksum for tensor in published.tensors}
    urls = fleet.urls
    results = await asyncio.gather(*(receiver.stage(url, published) for url in urls), return_exceptions=True)
    problems: list[str] = []
    for url, result in zip(urls, results, strict=True):
        if isinstance(result, BaseException):
            problems.append(f"{url}: {result}")
        else:
            problems += [f"{url}: {sentence}" for sentence in differences(expected, dict(result))]
    if problems:
        await asyncio.gather(*(receiver.discard(url, published) for url in urls), return_exceptions=True)
        raise PublishError(
            f"version {published.version} was not published, the engines keep the version before: "
            + "; ".join(problems)
        )
    staged = time.perf_counter()
    async with fleet.paused(mode):
        commits = await asyncio.gather(*(receiver.commit(url, published) for url in urls), return_exceptions=True)
        failed = [f"{u}: {r}" for u, r in zip(urls, commits, strict=True) if isinstance(r, BaseException)]
        if failed:
            took = [u for u, r in zip(urls, commits, strict=True) if not isinstance(r, BaseException)]
            raise PublishError(
                f"version {published.version} was staged and verified, but not committed by {'; '.join(failed)}"
                + (f" (committed by {', '.join(took)})" if took else "")
            )
        held = await asyncio.gather(*(fleet.checksums(url) for url in urls))
        for url, checksums in zip(urls, held, strict=True):
            wrong = differences(expected, dict(checksums))
            if wrong:
                raise PublishError(f"version {published.version}: {url} holds other weights: {'; '.join(wrong[:5])}")
    end = time.perf_counter()
    return VersionPublished(
        version=published.version,
        transport=transport,
        nbytes=published.nbytes,
        engines=len(urls),
        seconds=published.seconds + end - begin,
        paused_seconds=end - staged,
        verify_seconds=end - begin,
    )
