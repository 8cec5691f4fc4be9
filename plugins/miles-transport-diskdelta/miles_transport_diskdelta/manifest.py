"""`manifest.json`: what one entry of a chain is, and how its files are read.

The document holds `format` (1), `sequence`, `version`, `digest`, `base` (`sequence` and `digest` of the entry before,
or null), `files` (name → bytes) and `tensors`, each with `name`, `dtype`, `shape`, `nbytes`, `checksum` and, where
there is a base, `delta`. Last comes `checksum`, the xxh3-128 of the document without it: no digit can change unseen.

| file | holds |
|---|---|
| `delta.bin` | blocks, where `delta` says: `encoding`, `offset`, `stored` (bytes), `stored_checksum`, `base_checksum` |
| `full.bin` | every tensor's bytes in the order of `tensors`, each at a multiple of 64 |
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import orjson
import xxhash

from miles_core.contracts.transports import TensorInfo
from miles_core.errors import PublishError
from miles_core.sync.staging import aligned_offsets

__all__ = [
    "DELTA",
    "FULL",
    "MANIFEST",
    "ChainError",
    "Entry",
    "Part",
    "Reference",
    "digest_of",
    "layout",
    "width_of",
]

MANIFEST, DELTA, FULL = "manifest.json", "delta.bin", "full.bin"
_FORMAT = 1


class ChainError(PublishError):
    """An entry of a chain is missing, incomplete, damaged or of another chain."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """One state of the weights: where it stands in the chain, and the digest of its tensors."""

    sequence: int
    digest: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """How one tensor is made of the base's. `same`: it is the base's; `whole`: its bytes as they are."""

    encoding: Literal["same", "whole", "xor", "overwrite"]
    offset: int
    stored: int
    stored_checksum: str
    base_checksum: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One complete version in a chain. `parts` stand beside `tensors` where there is a base, else there are none."""

    sequence: int
    version: int
    base: Reference | None
    tensors: tuple[TensorInfo, ...]
    parts: tuple[Part, ...]
    files: Mapping[str, int]

    @property
    def reference(self) -> Reference:
        return Reference(sequence=self.sequence, digest=digest_of(self.tensors))

    @property
    def is_full(self) -> bool:
        return FULL in self.files

    def dump(self) -> bytes:
        """The file's content."""
        tensors: list[dict[str, Any]] = [dataclasses.asdict(tensor) for tensor in self.tensors]
        for tensor, part in zip(tensors, self.parts, strict=False):
            tensor["delta"] = dataclasses.asdict(part)
        document = {
            "format": _FORMAT,
            "sequence": self.sequence,
            "version": self.version,
            "digest": self.reference.digest,
            "base": None if self.base is None else dataclasses.asdict(self.base),
            "files": dict(self.files),
            "tensors": tensors,
        }
        document["checksum"] = xxhash.xxh3_128_hexdigest(orjson.dumps(document))
        return orjson.dumps(document)

    @classmethod
    def load(cls, path: Path, sequence: int) -> Entry:
        """Read the manifest of entry `sequence`, in the directory `path`, and the sizes of its files. Raises
        `ChainError`."""
        try:
            document = orjson.loads((path / MANIFEST).read_bytes())
            told = document.pop("checksum")
            if xxhash.xxh3_128_hexdigest(orjson.dumps(document)) != told:
                raise ChainError(f"{path / MANIFEST}: its checksum is not that of its content; it was changed")
            if document["format"] != _FORMAT:
                raise ChainError(f"{path / MANIFEST}: format {document['format']}, this release reads {_FORMAT}")
            if document["sequence"] != sequence:
                raise ChainError(f"{path}: calls itself entry {document['sequence']}; it stands in another's place")
            entry = cls._parsed(document)
            for name, size in entry.files.items():
                found = (path / name).stat().st_size
                if found != size:
                    raise ChainError(f"{path / name}: {found} bytes, its manifest says {size}")
        except OSError as error:
            raise ChainError(f"{path}: {error.strerror}: {error.filename}") from error
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ChainError(f"{path / MANIFEST}: no manifest: {type(error).__name__}: {error}") from error
        return entry

    @classmethod
    def _parsed(cls, document: dict[str, Any]) -> Entry:
        parts = tuple(Part(**delta) for t in document["tensors"] if (delta := t.pop("delta", None)) is not None)
        tensors = tuple(TensorInfo(**{**t, "shape": tuple(t["shape"])}) for t in document["tensors"])
        base = None if document["base"] is None else Reference(**document["base"])
        return cls(
            sequence=document["sequence"],
            version=document["version"],
            base=base,
            tensors=tensors,
            parts=parts,
            files=document["files"],
        )


def digest_of(tensors: Sequence[TensorInfo]) -> str:
    """xxh3-128 over names, dtypes, shapes and checksums: two entries with one digest hold the same weights."""
    return xxhash.xxh3_128_hexdigest(orjson.dumps([[t.name, t.dtype, t.shape, t.checksum] for t in tensors]))


def layout(tensors: Sequence[TensorInfo]) -> tuple[dict[str, int], int]:
    """Offset of each tensor in a full file, and the size of the file (at least 1, so that it can be mapped)."""
    offsets, end = aligned_offsets(tensor.nbytes for tensor in tensors)
    return dict(zip((tensor.name for tensor in tensors), offsets, strict=True)), max(end, 1)


def width_of(tensor: TensorInfo) -> int:
    """Bytes of a word to compare: an element, where that is 1, 2, 4 or 8 bytes."""
    count = math.prod(tensor.shape)
    size = tensor.nbytes // count if count else 1
    return size if size in (1, 2, 4, 8) else 1
