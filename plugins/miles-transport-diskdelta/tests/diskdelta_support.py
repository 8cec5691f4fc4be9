"""Small models whose weights are a function of the version, and what a reader must hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from miles_transport_diskdelta.replica import Replica
from miles_transport_diskdelta.writer import RawTensor

SHAPES = {
    "embed": ("bfloat16", np.uint16, (61, 33)),
    "odd": ("uint8", np.uint8, (1001,)),
    "norm": ("float32", np.uint32, (7,)),
    "scale": ("float32", np.uint32, ()),
    "empty": ("float32", np.uint32, (0, 5)),
    "still": ("float64", np.uint64, (40,)),
}


def arrays(version: int, *, seed: int = 0) -> dict[str, np.ndarray]:
    """About one element in fifty differs from the version before; `norm` as a whole, `still` never."""
    found = {}
    for number, (name, (_, kind, shape)) in enumerate(SHAPES.items()):
        rng = np.random.default_rng([seed, number])
        array = rng.integers(0, np.iinfo(kind).max, shape, dtype=kind)
        flat = array.reshape(-1)
        if name != "still":
            positions = np.arange(len(flat))
            moves = version if name == "norm" else (version + 49 - positions % 50) // 50
            flat += np.asarray(moves, dtype=kind)
        found[name] = flat.reshape(shape)
    return found


def raw(version: int, *, seed: int = 0) -> Iterator[RawTensor]:
    for name, array in arrays(version, seed=seed).items():
        yield name, SHAPES[name][0], array.shape, np.frombuffer(array.tobytes(), np.uint8)


def holds(replica: Replica, version: int, *, seed: int = 0) -> bool:
    expected = {name: array.tobytes() for name, array in arrays(version, seed=seed).items()}
    return {name: data.tobytes() for name, data in replica.bytes_of().items()} == expected


def new_reader(directory: Path, name: str = "reader") -> Replica:
    return Replica(directory / name)
