"""Laws of weight transports: the engine's own checksums, nothing reported before the commit; of staged ones, nothing
visible before it either.

PYTEST_DONT_REWRITE: a broken law is told by its own sentence, not by a diff of tensors.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.contracts.transports import Published, WeightReceiver, WeightSender
from miles_core.data.checksums import checksum
from miles_core.errors import PublishError
from miles_core.testing.kit import Case, Check
from miles_core.testing.stub_engine import StubEngine, hashed_script, stub_engine

if TYPE_CHECKING:
    import torch

__all__ = ["CHECKS"]


async def a_version_says_what_it_holds(case: Case) -> None:
    import torch

    async with _ends(case) as (sender, _, _, _):
        published = sender.send(3, _weights(3))
        assert published.version == 3, f"version 3 was sent, and is published as {published.version}"
        held = {t.name: (t.dtype, t.shape, t.nbytes, t.checksum) for t in published.tensors}
        for name, tensor in _weights(3):
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
            expected = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), len(data), checksum(data))
            assert held.get(name) == expected, f"{name} is published as {held.get(name)}, expected {expected}"
        assert len(held) == len(list(_weights(3))), f"tensors were added: {sorted(held)}"


async def staged_then_committed(case: Case) -> None:
    async with _ends(case) as (sender, receiver, url, engine):
        for version in (1, 2):
            published = sender.send(version, _weights(version))
            staged = dict(await receiver.stage(url, published))
            expected = _checksums(published)
            if receiver.in_place:
                await _transfer(sender, receiver, url, published)
                assert engine.weights == expected, "after the transfer the engine holds other weights than were sent"
            else:
                assert staged == expected, "stage() gives other checksums than those that were sent"
            assert engine.version == version - 1, f"version {version} is served before its commit"
            await receiver.commit(url, published)
            assert engine.version == version, f"after the commit of version {version} the engine has {engine.version}"
            assert engine.weights == expected, "the engine serves other weights than those that were sent"


async def checksums_are_the_engines_own(case: Case) -> None:
    async with _ends(case) as (sender, receiver, url, engine):
        if receiver.in_place:
            return  # the transaction asks the engine itself
        published = sender.send(1, _weights(1))
        engine.corrupt_staging = True
        try:
            staged = dict(await receiver.stage(url, published))
        except PublishError:
            return
        assert staged != _checksums(published), (
            "an engine that got corrupted bytes is reported with the checksums that were sent: nothing was verified"
        )


async def a_discarded_version_is_gone(case: Case) -> None:
    async with _ends(case) as (sender, receiver, url, engine):
        first = sender.send(1, _weights(1))
        await receiver.stage(url, first)
        if receiver.in_place:
            await _transfer(sender, receiver, url, first)
        await receiver.commit(url, first)
        second = sender.send(2, _weights(2))
        await receiver.stage(url, second)
        await receiver.discard(url, second)
        assert engine.staged is None, "a discarded version is still staged at the engine"
        assert engine.version == 1, f"after a discard the engine serves version {engine.version}, not 1"
        try:
            await receiver.discard(url, second)
        except Exception as error:
            raise AssertionError(f"discarding what is not staged raises {type(error).__name__}: {error}") from error


async def the_version_before_stays_readable(case: Case) -> None:
    async with _ends(case) as (sender, receiver, url, _):
        if receiver.in_place:
            return  # there is one set of weights, at the engine
        first = sender.send(1, _weights(1))
        sender.send(2, _weights(2))
        try:
            staged = dict(await receiver.stage(url, first))
        except PublishError as error:
            raise AssertionError(
                f"once version 2 is sent, an engine can no longer get version 1, which it may have to keep: {error}"
            ) from error
        assert staged == _checksums(first), "version 1 reads otherwise once version 2 is sent"


async def an_engine_that_cannot_is_a_publish_error(case: Case) -> None:
    async with _ends(case) as (sender, receiver, url, _):
        published = sender.send(1, _weights(1))
        try:
            await receiver.commit(url, published)
        except PublishError:
            return
        except Exception as error:
            raise AssertionError(
                f"an engine that refuses a commit raises {type(error).__name__}; expected PublishError"
            ) from error
        raise AssertionError("committing a version that was never staged is said to have worked")


async def close_is_idempotent_and_leaves_no_file(case: Case) -> None:
    async with _ends(case) as (sender, receiver, _, _):
        published = sender.send(1, _weights(1))
        for end in ("sender", "sender", "receiver", "receiver"):
            try:
                sender.close() if end == "sender" else await receiver.close()
            except Exception as error:
                raise AssertionError(
                    f"close() of the {end} raises when it is called again: {type(error).__name__}: {error}"
                ) from error
        for value in published.address.values():
            assert not (isinstance(value, str) and value.startswith("/") and Path(value).exists()), (
                f"{value} is left behind when the sender is closed"
            )


CHECKS: tuple[Check, ...] = (
    a_version_says_what_it_holds,
    staged_then_committed,
    checksums_are_the_engines_own,
    a_discarded_version_is_gone,
    the_version_before_stays_readable,
    an_engine_that_cannot_is_a_publish_error,
    close_is_idempotent_and_leaves_no_file,
)


async def _transfer(sender: WeightSender, receiver: WeightReceiver, url: str, published: Published) -> None:
    """Both ends of an in-place transfer, at once."""
    session = await receiver.connect([url], published)
    await asyncio.gather(
        asyncio.to_thread(sender.transfer, published, _weights(published.version), session),
        receiver.receive(url, published, session),
    )


def _weights(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Two dtypes, a scalar, a tensor without elements, one that is not contiguous."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    yield "model.embed_tokens.weight", torch.randn(33, 8, generator=generator)
    yield "model.norm.weight", torch.randn(5, generator=generator).to(torch.bfloat16)
    yield "model.turned.weight", torch.randn(3, 7, generator=generator).t()
    yield "model.empty", torch.zeros(0, 4)
    yield "model.scale", torch.tensor(-0.0)


def _checksums(published: Published) -> dict[str, str]:
    return {tensor.name: tensor.checksum for tensor in published.tensors}


@contextlib.asynccontextmanager
async def _ends(case: Case) -> AsyncIterator[tuple[WeightSender, WeightReceiver, str, StubEngine]]:
    """Sender, receiver, and a stub engine that speaks the transport's protocol: the example's, or the core's own."""
    stub: type[StubEngine] = case.example.inputs[0] if case.example.inputs else StubEngine
    engine = stub(hashed_script(10, 2))
    transport = case.create()
    directory = case.new_directory()
    async with stub_engine(engine) as url:
        sender, receiver = transport.sender(directory), transport.receiver(directory)
        try:
            yield sender, receiver, url, engine
        finally:
            await receiver.close()
            sender.close()
