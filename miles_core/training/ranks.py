"""This process's place among the trainer processes of a run, and the few things that they do together.

One process needs no process group, and makes none.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from miles_core.contracts.backends import BackendStart
from miles_core.errors import NumericsError

__all__ = ["Ranks", "open_rendezvous"]

_TIMEOUT = datetime.timedelta(minutes=10)


def open_rendezvous() -> tuple[Any, str]:
    """A store on a free loopback port, and its address. It lives as long as the first value does."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
    return store, f"127.0.0.1:{store.port}"


class Ranks:
    """`rank` of `size` processes. Collectives are called by all of them, in one order, or not at all."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @classmethod
    def join(cls, start: BackendStart, device: torch.device) -> Ranks:
        """Meet the other ranks at `start.rendezvous`, or, when it is empty, where `torchrun` says (MASTER_ADDR and
        MASTER_PORT). A process group that exists already is used as it is.

        What is in host memory travels over gloo, what is on GPUs over NCCL.
        """
        if start.world_size > 1 and not dist.is_initialized():
            store = None
            if start.rendezvous:
                host, _, port = start.rendezvous.rpartition(":")
                store = TCPStore(host, int(port), is_master=False, timeout=_TIMEOUT)
            dist.init_process_group(
                "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
                store=store,
                rank=start.rank,
                world_size=start.world_size,
                timeout=_TIMEOUT,
                device_id=None if device.type == "cpu" else device,
            )
        return cls(start.rank, start.world_size)

    def another_group(self) -> Any:
        """A group of the same ranks for another thread: collectives of one group must come in one order. None for one
        rank."""
        return dist.new_group(backend="gloo", timeout=_TIMEOUT) if self.size > 1 else None

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place. What only one rank holds (the others have 0) arrives bit for bit."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def sums(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Sums of numbers that every rank has under the same names, in float64."""
        names = sorted(numbers)
        total = self.sum(torch.tensor([numbers[name] for name in names], dtype=torch.float64))
        return dict(zip(names, total.tolist(), strict=True))

    def any(self, here: bool) -> bool:
        """Whether it is so on any rank."""
        return bool(self.sum(torch.tensor(int(here))))

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def raise_together(self, error: NumericsError | None) -> None:
        """Raise on every rank what any of them met, so that none waits for one that has given up."""
        if self.any(error is not None):
            raise NumericsError("; ".join(str(e) for e in self.gather(error) if e is not None))
