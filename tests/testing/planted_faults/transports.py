"""Faults of weight transports."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from miles_core.contracts.transports import WeightReceiver, WeightSender
from miles_core.errors import PublishError
from miles_core.sync.shared_memory import SharedMemoryTransport
from planted_faults import scaffolded

Good = scaffolded("weight_transports")
GOOD = (Good, SharedMemoryTransport)


class _Sender(WeightSender):
    def __init__(self, inner):
        self.inner = inner

    def send(self, version, weights):
        return self.inner.send(version, weights)

    def close(self):
        self.inner.close()


class _Receiver(WeightReceiver):
    def __init__(self, inner):
        self.inner = inner

    async def stage(self, url, published):
        return await self.inner.stage(url, published)

    async def commit(self, url, published):
        await self.inner.commit(url, published)

    async def discard(self, url, published):
        await self.inner.discard(url, published)

    async def close(self):
        await self.inner.close()


class _Wrapped(SharedMemoryTransport):
    sending = _Sender
    receiving = _Receiver

    def sender(self, run_directory):
        return self.sending(super().sender(run_directory))

    def receiver(self, run_directory):
        return self.receiving(super().receiver(run_directory))


class Halves(_Wrapped):
    """Sends float32 as bf16."""

    class sending(_Sender):  # noqa: N801
        def send(self, version, weights):
            import torch

            return super().send(version, ((name, tensor.to(torch.bfloat16)) for name, tensor in weights))


class LosesEmpty(_Wrapped):
    """Leaves tensors without elements out."""

    class sending(_Sender):  # noqa: N801
        def send(self, version, weights):
            return super().send(version, ((name, tensor) for name, tensor in weights if tensor.numel()))


class OnePhase(_Wrapped):
    """Staging is committing."""

    class receiving(_Receiver):  # noqa: N801
        async def stage(self, url, published):
            staged = await super().stage(url, published)
            await super().commit(url, published)
            return staged

        async def commit(self, url, published):
            return


class NeverCommits(_Wrapped):
    """Says that it committed."""

    class receiving(_Receiver):  # noqa: N801
        async def commit(self, url, published):
            return


class Echoes(_Wrapped):
    """Reports what it sent."""

    class receiving(_Receiver):  # noqa: N801
        async def stage(self, url, published):
            await super().stage(url, published)
            return {tensor.name: tensor.checksum for tensor in published.tensors}


class KeepsDiscarded(_Wrapped):
    """Forgets nothing."""

    class receiving(_Receiver):  # noqa: N801
        async def discard(self, url, published):
            return


class DiscardsOnce(_Wrapped):
    """Raises when there is nothing to forget."""

    class receiving(_Receiver):  # noqa: N801
        gone = False

        async def discard(self, url, published):
            if self.gone:
                raise PublishError("nothing is staged")
            self.gone = True
            await super().discard(url, published)


class OneBuffer(_Wrapped):
    """The version before makes room."""

    class sending(_Sender):  # noqa: N801
        last = None

        def send(self, version, weights):
            if self.last is not None:
                Path(self.last.address["path"]).write_bytes(b"\0" * 4096)
            self.last = super().send(version, weights)
            return self.last


class LeaksErrors(_Wrapped):
    """Raises what the network raised."""

    class receiving(_Receiver):  # noqa: N801
        async def commit(self, url, published):
            try:
                await super().commit(url, published)
            except PublishError as error:
                raise OSError("409") from error


class ClosesOnce(_Wrapped):
    """A second close fails."""

    class sending(_Sender):  # noqa: N801
        closed = False

        def close(self):
            if self.closed:
                raise RuntimeError("closed")
            self.closed = True
            super().close()


class LeavesFiles(_Wrapped):
    """Leaves its last version behind, in the run directory."""

    class sending(_Sender):  # noqa: N801
        def send(self, version, weights):
            published = super().send(version, weights)
            return dataclasses.replace(published, address={**published.address, "copy": __file__})


FAULTS = {
    "a_version_says_what_it_holds": (Halves, LosesEmpty),
    "staged_then_committed": (OnePhase, NeverCommits),
    "checksums_are_the_engines_own": (Echoes,),
    "a_discarded_version_is_gone": (KeepsDiscarded, DiscardsOnce),
    "the_version_before_stays_readable": (OneBuffer,),
    "an_engine_that_cannot_is_a_publish_error": (LeaksErrors, NeverCommits),
    "close_is_idempotent_and_leaves_no_file": (ClosesOnce, LeavesFiles),
}
