"""Prompts as JSON, encoded only as far as they are new: each turn of a session sends again all that came before it."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import orjson

from miles_core.contracts.engines import TokenIds

__all__ = ["PromptJson"]


class PromptJson:
    """Holds the last prompt of each routing key and its JSON, of those used last as many as fit into `max_bytes`."""

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self._room = max_bytes
        self._held: OrderedDict[str, tuple[bytes, bytes]] = OrderedDict()

    def encode(self, key: str, ids: TokenIds) -> orjson.Fragment:
        """A JSON list of `ids`. Arrays int32 [n] are held under `key`, unless it is empty."""
        if not key or not isinstance(ids, np.ndarray) or ids.dtype != np.int32:
            return orjson.Fragment(_json(ids))
        raw = ids.tobytes()
        before, text = self._take(key)
        if not before or not raw.startswith(before):
            text = _json(ids)
        elif len(raw) > len(before):
            new = ids[len(before) // ids.itemsize :]
            text = b"".join((memoryview(text)[:-1], b",", memoryview(_json(new))[1:]))
        self._held[key] = (raw, text)
        self._room -= len(raw) + len(text)
        while self._room < 0:
            self._take(next(iter(self._held)))
        return orjson.Fragment(text)

    def _take(self, key: str) -> tuple[bytes, bytes]:
        raw, text = self._held.pop(key, (b"", b""))
        self._room += len(raw) + len(text)
        return raw, text


def _json(ids: TokenIds) -> bytes:
    plain = np.ascontiguousarray(ids) if isinstance(ids, np.ndarray) else ids
    return orjson.dumps(plain, option=orjson.OPT_SERIALIZE_NUMPY)
