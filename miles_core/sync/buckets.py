"""Buckets: the tensors of a plan in parts that travel as one piece of bytes.

Both ends compute them from the plan alone. A bucket holds tensors of one dtype (so that every one of them is aligned),
the tensors of experts stand apart from the others, and those that an engine keeps as one parameter stay together.
"""

from __future__ import annotations

from collections.abc import Sequence

from miles_core.contracts.transports import TensorInfo
from miles_core.data.fusion import fused_place, is_expert

__all__ = ["BUCKET_BYTES", "Bucket", "buckets_of"]

BUCKET_BYTES = 512 << 20

Bucket = tuple[TensorInfo, ...]


def buckets_of(tensors: Sequence[TensorInfo], limit: int) -> list[Bucket]:
    """Buckets of at most `limit` bytes (one unit that is larger is a bucket of its own), in the order in which a stream
    in plan order completes them. Within a bucket: plan order."""
    units: dict[tuple[bool, str, str], list[TensorInfo]] = {}
    for tensor in tensors:
        key = (is_expert(tensor.name), tensor.dtype, fused_place(tensor.name).unit)
        units.setdefault(key, []).append(tensor)
    buckets: list[list[TensorInfo]] = []
    filling: dict[tuple[bool, str], list[TensorInfo]] = {}
    for (expert, dtype, _), unit in units.items():
        bucket = filling.get((expert, dtype))
        if bucket is None or sum(t.nbytes for t in (*bucket, *unit)) > limit:
            bucket = filling[expert, dtype] = []
            buckets.append(bucket)
        bucket += unit
    position = {tensor.name: index for index, tensor in enumerate(tensors)}
    ordered = [tuple(sorted(bucket, key=lambda t: position[t.name])) for bucket in buckets]
    return sorted(ordered, key=lambda bucket: position[bucket[-1].name])
