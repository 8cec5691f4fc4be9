"""The embedded engine's two-phase weight protocol, for every staged transport: an engine maps a file that holds a whole
version, verifies it beside the one in use, and goes over to it between two of its steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.contracts.transports import TensorInfo
from miles_core.errors import EngineError, PublishError
from miles_core.http import JsonHttp

if TYPE_CHECKING:
    from miles_core.contracts.engines import PauseMode

__all__ = ["StagingEngines", "aligned", "aligned_offsets"]

_ALIGNMENT = 64


def aligned(position: int) -> int:
    """The next place where a tensor may begin in a file that engines map."""
    return position + -position % _ALIGNMENT


def aligned_offsets(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where tensors of these sizes begin in a file that holds them in order, and where the last one ends, in bytes."""
    offsets, end = [], 0
    for nbytes in sizes:
        offsets.append(aligned(end))
        end = offsets[-1] + nbytes
    return offsets, end


class StagingEngines:
    """Calls to engines that map files. Whatever an engine refuses is a `PublishError`; one that is gone has an
    `EngineUnavailable` among its causes."""

    def __init__(self, *, deadline: float = 300.0) -> None:
        """`deadline` in seconds, of one call."""
        self.http = JsonHttp(deadline=deadline)

    async def stage(
        self, url: str, path: Path | str, tensors: Sequence[TensorInfo], offsets: Sequence[int], version: int
    ) -> Mapping[str, str]:
        """Let the engine map and verify `path`; the checksums of what it found there."""
        entries = [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "offset": offset,
                "nbytes": tensor.nbytes,
                "checksum": tensor.checksum,
            }
            for tensor, offset in zip(tensors, offsets, strict=True)
        ]
        body = {"path": str(path), "tensors": entries, "weight_version": version}
        return await self._checksums(url, "/stage_weights", body, f"staging version {version}")

    async def commit(self, url: str, version: int) -> None:
        """Make the staged version the one in use. The engine is paused."""
        await self._call(url, "/commit_weights", {"weight_version": version}, f"committing version {version}")

    async def switch(self, url: str, version: int, mode: PauseMode) -> Mapping[str, str]:
        """The same between two steps of an engine that runs; the checksums of what it serves then."""
        body = {"weight_version": version, "mode": mode}
        return await self._checksums(url, "/switch_weights", body, f"switching to version {version}")

    async def discard(self, url: str, version: int) -> None:
        """Forget what is staged."""
        await self.http.call("POST", f"{url}/discard_weights", {"weight_version": version}, deadline=10.0)

    async def close(self) -> None:
        await self.http.close()

    async def _checksums(self, url: str, path: str, body: Mapping[str, object], what: str) -> Mapping[str, str]:
        answer = await self._call(url, path, body, what)
        found = answer.get("checksums") if isinstance(answer, dict) else None
        if not isinstance(found, dict):
            raise PublishError(f"{what}: {url}{path} answered {str(answer)[:200]}, expected checksums by name")
        return found

    async def _call(self, url: str, path: str, body: Mapping[str, object], what: str) -> object:
        try:
            answer: object = await self.http.call("POST", url + path, body)
        except EngineError as error:
            raise PublishError(f"{what}: {error}") from error
        return answer
