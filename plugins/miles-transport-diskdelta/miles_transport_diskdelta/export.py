"""Replicas as safetensors files (https://huggingface.co/docs/safetensors: header length, JSON header, data)."""

from __future__ import annotations

from pathlib import Path

import orjson

from miles_transport_diskdelta.replica import Replica

__all__ = ["write_safetensors"]

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def write_safetensors(path: Path, replica: Replica) -> None:
    """Write what `replica` holds. Raises `ValueError` for a dtype that the format does not have."""
    unknown = sorted({t.dtype for t in replica.tensors} - _DTYPES.keys())
    if unknown:
        raise ValueError(f"safetensors has no dtype {unknown[0]}; it has {', '.join(_DTYPES)}")
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    # No gaps are allowed: widest elements first keeps all of them aligned.
    ordered = sorted(replica.tensors, key=lambda t: (-_bytes_of(_DTYPES[t.dtype]), t.name))
    for tensor in ordered:
        end = position + tensor.nbytes
        header[tensor.name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    slices = replica.bytes_of()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered:
            file.write(slices[tensor.name].data)


def _bytes_of(kind: str) -> int:
    digits = kind.lstrip("BFIU").split("_")[0]
    return int(digits) // 8 if digits.isdigit() else 1
