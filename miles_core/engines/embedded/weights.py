"""Publishing a version into the engine: stage (map and verify), then commit (swap), or discard.

Names are those of the checkpoint, as ``save_pretrained`` writes them. transformers 5 may hold several checkpoint
tensors in one parameter (the experts of a layer), so each checkpoint name is bound either to a whole parameter,
which a commit points at the mapped file without copying, or to a strided part of one, which it copies into.
Tied parameters are bound once; their second name may be sent too, with the same bytes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from miles_core.data.checksums import checksum, over_threads

from .mapped import MappedFiles
from .protocol import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np
    from transformers import PreTrainedModel

    from .mapped import Hold

_DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "bfloat16", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
}

_ALIGNMENT = 64
"""Bytes: where a parameter's memory begins, as torch allocates it, is a multiple of it."""


class ChecksumError(Exception):
    """The bytes of a tensor are not those that the sender described (HTTP 409)."""


class WrongStateError(Exception):
    """The command does not fit what the engine is doing: nothing staged, not paused (HTTP 409)."""


@dataclass(frozen=True, kw_only=True)
class Binding:
    """Where a checkpoint tensor lives in the model."""

    owner: torch.Tensor
    """A parameter or buffer of the model."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    whole: bool
    """The tensor is all of ``owner``, in its own layout."""

    @property
    def view(self) -> torch.Tensor:
        """The checkpoint tensor, as the model holds it now."""
        return self.owner.data if self.whole else self.owner.data.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A verified version, mapped and not in use yet."""

    version: str
    tensors: dict[str, torch.Tensor]
    checksums: dict[str, str]
    hold: Hold
    """Keeps the sender from the file as long as the version is staged, or in use."""
    seconds: float


class WeightStore:
    """The model's weights under checkpoint names.

    Raises:
        ValueError: the model packs checkpoint tensors in a way that is not a strided view of a parameter.
    """

    def __init__(self, model: PreTrainedModel, *, threads: int = 1) -> None:
        """``threads`` hash."""
        self._device = next(model.parameters()).device
        self._bindings, self._tied = _bind(model)
        self._threads = threads
        self._files = MappedFiles()
        self._in_use: Hold | None = None

    @property
    def names(self) -> list[str]:
        """Checkpoint names, tied ones once."""
        return list(self._bindings)

    def stage(self, path: str, described: object, version: str) -> Staged:
        """Map ``path`` and verify every tensor described in it; the model is not touched.

        ``described`` is a list of {name, dtype, shape, offset, nbytes, checksum}: byte offset and size in the
        file, and the xxh3-128 of those bytes in hexadecimal.

        Raises:
            BadRequestError: names, shapes, dtypes or ranges do not fit the model or the file.
            ChecksumError: bytes differ from their checksum.
        """
        start = time.perf_counter()
        entries = _parse_entries(described)
        self._check_names(entries)
        try:
            hold = self._files.hold(path)
        except BlockingIOError:
            raise WrongStateError(f"path: {path!r} is being written; stage it when its sender has finished") from None
        except (OSError, ValueError) as error:
            raise BadRequestError(f"path: cannot map {path!r}: {error}") from error
        parts = {name: self._slice(name, entry, hold.data) for name, entry in entries.items()}
        found = over_threads(
            lambda raw: checksum(raw.data), [*parts.values()], [*map(len, parts.values())], self._threads
        )
        checksums = dict(zip(parts, found, strict=True))
        for name, entry in entries.items():
            if checksums[name] != entry["checksum"]:
                raise ChecksumError(
                    f"{name}: the bytes read have xxh3-128 {checksums[name]}, the sender's had {entry['checksum']}; "
                    "the weights in use stay"
                )
        tensors = {
            name: torch.from_numpy(raw).view(_DTYPES[entries[name]["dtype"]]).view(entries[name]["shape"])
            for name, raw in parts.items()
            if name in self._bindings
        }
        for tied, source in self._tied.items():
            if tied in checksums and checksums[tied] != checksums[source]:
                raise BadRequestError(f"{tied}: tied to {source} in this model, but sent with other bytes")
        seconds = time.perf_counter() - start
        return Staged(version=version, tensors=tensors, checksums=checksums, hold=hold, seconds=seconds)

    @torch.no_grad()
    def commit(self, staged: Staged) -> None:
        """Make a staged version the model's weights. Whole parameters on the CPU become views of the file."""
        for name, tensor in staged.tensors.items():
            binding = self._bindings[name]
            if binding.whole and self._device.type == "cpu":
                binding.owner.data = tensor
            else:
                binding.view.copy_(tensor)
        self._in_use = staged.hold

    def check(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        """Whether a tensor fits the model.

        Raises:
            BadRequestError: it does not.
        """
        if name not in self._bindings and name not in self._tied:
            raise BadRequestError(f"{name}: the model has no such tensor. The names are those of the checkpoint")
        held = self._bindings[self._tied.get(name, name)].view
        if _DTYPES.get(dtype) != held.dtype or tuple(shape) != tuple(held.shape):
            raise BadRequestError(
                f"{name}: {dtype} {list(shape)}, but the model's is {str(held.dtype)[6:]} {list(held.shape)}"
            )

    def adopts(self, name: str, offset: int) -> bool:
        """Whether a tensor at this offset of a block of memory can be the parameter, without being copied into it."""
        return (
            self._device.type == "cpu" and self._bindings[self._tied.get(name, name)].whole and offset % _ALIGNMENT == 0
        )

    @torch.no_grad()
    def write(self, tensors: Mapping[str, torch.Tensor], *, adopt: bool) -> None:
        """Write over weights in use. A tied tensor is written once, under whichever name it comes.

        ``adopt``: the parameters become these tensors, which `adopts` allowed, and nobody else writes to.
        """
        self._files.forget()
        for name, tensor in tensors.items():
            binding = self._bindings[self._tied.get(name, name)]
            if adopt:
                binding.owner.data = tensor
            else:
                binding.view.copy_(tensor)

    def checksums(self) -> dict[str, str]:
        """Return the xxh3-128 of what the model holds, by checkpoint name."""
        sizes = [binding.view.numel() * binding.view.element_size() for binding in self._bindings.values()]
        found = over_threads(lambda held: _checksum(held.view), [*self._bindings.values()], sizes, self._threads)
        return dict(zip(self._bindings, found, strict=True))

    def _check_names(self, given: Iterable[str]) -> None:
        names = set(given)
        missing = [name for name in self._bindings if name not in names]
        unexpected = sorted(names - set(self._bindings) - set(self._tied))
        if missing or unexpected:
            problems = [
                f"{what} {len(some)}: {', '.join(some[:5])}{', …' if len(some) > 5 else ''}"
                for what, some in (("missing", missing), ("unexpected", unexpected))
                if some
            ]
            raise BadRequestError(f"tensors: {'; '.join(problems)}. The names are those of the checkpoint")

    def _slice(self, name: str, entry: Mapping[str, Any], data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the bytes of one tensor, or say what about its description does not fit."""
        held = self._bindings[self._tied.get(name, name)].view
        dtype = _DTYPES.get(entry["dtype"])
        if dtype != held.dtype:
            raise BadRequestError(f"{name}: dtype {entry['dtype']}, but the engine runs in {str(held.dtype)[6:]}")
        if tuple(entry["shape"]) != tuple(held.shape):
            raise BadRequestError(f"{name}: shape {entry['shape']}, but the model's is {list(held.shape)}")
        offset, nbytes = entry["offset"], entry["nbytes"]
        if nbytes != held.numel() * held.element_size():
            raise BadRequestError(
                f"{name}: {nbytes} bytes, but its shape and dtype take {held.numel() * held.element_size()}"
            )
        if offset < 0 or offset + nbytes > len(data) or offset % held.element_size():
            raise BadRequestError(
                f"{name}: offset {offset} with {nbytes} bytes is outside the file ({len(data)} bytes) or not a "
                f"multiple of {held.element_size()}"
            )
        return data[offset : offset + nbytes]


def _parse_entries(described: object) -> dict[str, dict[str, Any]]:
    if not isinstance(described, list) or not described:
        raise BadRequestError("tensors: a non-empty list of {name, dtype, shape, offset, nbytes, checksum} is required")
    kinds = {"name": str, "dtype": str, "shape": list, "offset": int, "nbytes": int, "checksum": str}
    entries: dict[str, dict[str, Any]] = {}
    for index, entry in enumerate(described):
        for key, kind in kinds.items():
            if not isinstance(entry, dict) or not isinstance(entry.get(key), kind):
                raise BadRequestError(f"tensors[{index}]: {key} ({kind.__name__}) is required")
        if entry["name"] in entries:
            raise BadRequestError(f"tensors[{index}]: {entry['name']} is given twice")
        entries[entry["name"]] = entry
    return entries


def _checksum(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return checksum(flat.numpy().data)


def _bind(model: PreTrainedModel) -> tuple[dict[str, Binding], dict[str, str]]:
    """Return the binding of each checkpoint name, and tied names with the name that holds them."""
    tied_modules: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    bindings: dict[str, Binding] = {}
    owners: dict[str, torch.Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers()),
    }
    tied: dict[str, str] = {}
    names_of: dict[str, str] = {}
    for name in model.state_dict():
        owner = owners[name]
        if name in tied_modules and owner is owners[tied_modules[name]]:
            continue
        found = _trace(model, name, owner)
        bindings |= found
        if len(found) == 1:
            names_of[name] = next(iter(found))
    for name, source in tied_modules.items():
        if name in owners and owners[name] is owners[source]:
            tied[name] = names_of[source]
    return bindings, tied


def _trace(model: PreTrainedModel, name: str, owner: torch.Tensor) -> dict[str, Binding]:
    """Return which strided part of ``owner`` each checkpoint tensor made from it is.

    Sends the numbers 0 to n - 1 through transformers' own conversion: where a number comes out, that element
    of the parameter went. A parameter that comes out as it went in is whole.
    """
    converted = revert_weight_conversion(model, {name: owner.data})
    if len(converted) == 1:
        ((checkpoint_name, tensor),) = converted.items()
        if tensor.data_ptr() == owner.data_ptr() and tensor.shape == owner.shape:
            return {
                checkpoint_name: Binding(
                    owner=owner, shape=tuple(owner.shape), stride=owner.stride(), offset=0, whole=True
                )
            }
    numbers = torch.arange(owner.numel()).view(owner.shape)
    bindings = {}
    for checkpoint_name, places in revert_weight_conversion(model, {name: numbers}).items():
        offset = int(places.flatten()[0])
        stride = tuple(
            int(places.select(dim, 1).flatten()[0]) - offset if size > 1 else 1 for dim, size in enumerate(places.shape)
        )
        if not torch.equal(numbers.flatten().as_strided(tuple(places.shape), stride, offset), places):
            raise ValueError(
                f"{checkpoint_name} is not a strided part of {name} in {type(model).__name__}; the embedded engine "
                "cannot update this model in place; serve it with SGLang"
            )
        bindings[checkpoint_name] = Binding(
            owner=owner, shape=tuple(places.shape), stride=stride, offset=offset, whole=False
        )
    return bindings
