"""Where a rank computes."""

from __future__ import annotations

import os

import torch

from miles_core.training.settings import Device

__all__ = ["device_of"]


def device_of(choice: Device, rank: int) -> torch.device:
    """The device of this rank: the CPU, or the GPU of its number on this host (`torchrun` says LOCAL_RANK). `auto` is
    a GPU where there is one. Raises `ValueError` when there are not enough."""
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if choice == "cpu" or (choice == "auto" and not available):
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", rank))
    if local >= available:
        raise ValueError(
            f"backend.device = {choice!r}: rank {local} of this host needs a GPU of its own, and torch finds "
            f'{available}; start fewer processes (backend.nproc), or set backend.device = "cpu"'
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
