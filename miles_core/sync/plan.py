"""The plan of a version: names, dtypes, shapes and checksums of its tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_core.contracts.transports import TensorInfo
from miles_core.data.checksums import checksum

if TYPE_CHECKING:
    import torch

__all__ = ["describe", "described", "host_bytes"]


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in row-major order; without a copy when it is contiguous on the CPU."""
    import torch

    host = tensor.detach().to("cpu").contiguous()
    return memoryview(host.view(-1).view(torch.uint8).numpy().data if host.numel() else b"")


def described(name: str, tensor: torch.Tensor, found: str) -> TensorInfo:
    """What a plan says of one tensor, whose bytes have the checksum `found`."""
    return TensorInfo(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        nbytes=tensor.numel() * tensor.element_size(),
        checksum=found,
    )


def describe(name: str, tensor: torch.Tensor) -> TensorInfo:
    """The same, with the checksum computed here."""
    return described(name, tensor, checksum(host_bytes(tensor)))
