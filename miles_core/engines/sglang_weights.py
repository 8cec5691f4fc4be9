"""What SGLang's `/weights_checker` must answer for the trainer's weights.

SGLang hashes its own parameters, in which projections and experts are fused (`miles_core.data.fusion`). On a CPU it
takes the first 64 bits of SHA-256 over a parameter's bytes; on a GPU a 64-bit hash of positions and 32-bit words
(`sglang/kernels/ops/memory/gpu_tensor_hash.py`, 0.5.23), computed here from the same definition. Both are fed piece by
piece, so that a fused parameter need not come together on the trainer. Torch is imported where it is used.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Protocol

from miles_core.data.fusion import fused_place
from miles_core.errors import PublishError

if TYPE_CHECKING:
    import torch

__all__ = ["SglangWitness", "TileHash"]

_MASK = 0xFFFFFFFF
_TILE = 8192
_CHUNK = 1 << 22
_SEED = 0x243F6A88


class _Hash(Protocol):
    def update(self, tensor: torch.Tensor) -> None: ...

    def hexdigest(self) -> str: ...


class SglangWitness:
    """Sees the trainer's tensors under checkpoint names, and knows SGLang's checksums afterwards.

    `on_gpu`: the servers run on GPUs. Tensors of a fused parameter are hashed in its order; what comes early is held.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self._new: type[TileHash] | type[_Sha] = TileHash if on_gpu else _Sha
        self._hashes: dict[str, _Hash] = {}
        self._next: dict[str, int] = {}
        self._count: dict[str, int] = {}
        self._early: dict[str, dict[int, torch.Tensor]] = {}

    def see(self, name: str, tensor: torch.Tensor) -> None:
        place = fused_place(name)
        parameter = place.parameter
        if parameter not in self._hashes:
            self._hashes[parameter], self._next[parameter], self._count[parameter] = self._new(), 0, place.count
        early = self._early.setdefault(parameter, {})
        early[place.index] = tensor
        while (index := self._next[parameter]) in early:
            self._hashes[parameter].update(early.pop(index))
            self._next[parameter] = index + 1

    def expected(self) -> dict[str, str]:
        for parameter, early in self._early.items():
            seen, count = self._next[parameter], self._count[parameter]
            if early or (count and seen != count):
                raise PublishError(
                    f"{parameter}: the engine keeps it as one tensor, and part {seen} of it is not among the trainer's"
                )
        return {parameter: found.hexdigest() for parameter, found in self._hashes.items()}


class _Sha:
    """First 64 bits of SHA-256."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def update(self, tensor: torch.Tensor) -> None:
        import torch

        host = tensor.detach().to("cpu").contiguous()
        if host.numel():
            self._hash.update(host.view(-1).view(torch.uint8).numpy().data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()[:16]


class TileHash:
    """SGLang's `gpu_tensor_hash`: words are mixed with their position and summed in tiles of 8192; the tiles' sums are
    finalised and summed again. Runs where the tensor is; 32-bit arithmetic in int64."""

    def __init__(self) -> None:
        self._words = 0
        self._tiles: dict[int, tuple[int, int]] = {}

    def update(self, tensor: torch.Tensor) -> None:
        import torch

        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if len(data) % 4:
            raise PublishError(
                f"a tensor of {len(data)} bytes cannot be hashed word by word as SGLang does on a GPU; "
                "publish in float32, or serve on a CPU"
            )
        words = data.view(torch.int32)
        for start in range(0, len(words), _CHUNK):
            self._mix(words[start : start + _CHUNK].long() & _MASK)

    def _mix(self, words: torch.Tensor) -> None:
        import torch

        index = torch.arange(self._words, self._words + len(words), device=words.device) & _MASK
        first, last = self._words // _TILE, (self._words + len(words) - 1) // _TILE
        tile = torch.div(index, _TILE, rounding_mode="floor") - first
        sums = []
        for factor, seed, turn in (
            (0x27D4EB2D, _SEED, 15),
            (0x165667B1, (_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & _MASK, 13),
        ):
            position = ((index * factor + seed) & _MASK) ^ (((index << turn) | (index >> (32 - turn))) & _MASK)
            total = torch.zeros(last - first + 1, dtype=torch.int64, device=words.device)
            sums.append((total.index_add_(0, tile, _fmix(words ^ position)) & _MASK).tolist())
        for number, (one, two) in enumerate(zip(*sums, strict=True), first):
            before = self._tiles.get(number, (0, 0))
            self._tiles[number] = ((before[0] + one) & _MASK, (before[1] + two) & _MASK)
        self._words += len(words)

    def hexdigest(self) -> str:
        if not self._words:
            return f"{0:016x}"
        nbytes = (4 * self._words) & _MASK
        total = sum((_fmix(one ^ nbytes) << 32) | _fmix(two ^ nbytes) for one, two in self._tiles.values())
        return f"{_splitmix(total & 0xFFFFFFFFFFFFFFFF):016x}"


def _fmix(x: Any) -> Any:
    """The finaliser of MurmurHash3 on 32-bit numbers: an int, or an int64 tensor."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & _MASK
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def _splitmix(x: int) -> int:
    """The finaliser of SplitMix64."""
    mask = 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)
