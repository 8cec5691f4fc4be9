"""Where the buckets of an in-place update land: in the weights themselves, where a bucket can be their memory.

The first bucket of its kind is received into new memory, and the parameters it holds go over to that; the next one with
the same tensors, a version later, is received right there. A bucket with a tensor that cannot do that (a part of a
parameter, on a GPU, or out of alignment) is received beside them, and copied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .weights import WeightStore

__all__ = ["Landing", "Place"]

_Described = tuple[tuple[str, str, tuple[int, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Memory for one bucket, uint8 [n], and its tensors as views of it. ``adopt``: they are to be the parameters."""

    data: torch.Tensor
    tensors: dict[str, torch.Tensor]
    adopt: bool


class Landing:
    """Memory for buckets, kept from session to session as long as each of them has the same tensors."""

    def __init__(self, weights: WeightStore) -> None:
        self._weights = weights
        self._adopted: dict[_Described, torch.Tensor] = {}
        self._used: set[_Described] = set()
        self._beside = torch.empty(0, dtype=torch.uint8)

    def prepare(self, described: Sequence[tuple[str, str, Sequence[int]]]) -> Place:
        """A place for a bucket of (name, dtype, shape)."""
        key = tuple((name, dtype, tuple(shape)) for name, dtype, shape in described)
        ends = [0, *accumulate(math.prod(shape) * _dtype(dtype).itemsize for _, dtype, shape in key)]
        adopt = all(self._weights.adopts(name, start) for (name, _, _), start in zip(key, ends, strict=False))
        if adopt:
            self._used.add(key)
            if key not in self._adopted:
                self._adopted[key] = torch.empty(ends[-1], dtype=torch.uint8)
            data = self._adopted[key]
        else:
            if self._beside.numel() < ends[-1]:
                self._beside = torch.empty(ends[-1], dtype=torch.uint8)
            data = self._beside[: ends[-1]]
        views = {
            name: data[start:end].view(_dtype(dtype)).view(shape)
            for (name, dtype, shape), start, end in zip(key, ends, ends[1:], strict=False)
        }
        return Place(data=data, tensors=views, adopt=adopt)

    def tidy(self) -> None:
        """A session has ended: let go of what it did not use, and of the memory beside the weights."""
        self._adopted = {key: data for key, data in self._adopted.items() if key in self._used}
        self._used = set()
        self._beside = torch.empty(0, dtype=torch.uint8)


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found
