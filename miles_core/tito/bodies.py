"""Request bodies, read only as far as they are new.

A harness sends its whole history in every request, written as it was in the last one. So a body is searched for the
bytes of the messages that the session's last turn was asked with, and where they stand again, only what is around them
is parsed: `H C R`, of which `C` is known to be n whole elements of a list, is read as `H "stand-in" R`. When that is
JSON whose `messages` begin with the stand-in, which nobody can guess, then `H` ends just behind the bracket that opens
that list, and the stand-in is to the parser what n elements are: the body means the same with the n elements in its
place.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
from typing import Any

import orjson
import xxhash

from miles_core.tito.dialects.base import expect
from miles_core.tito.turns import BadRequestError

__all__ = ["Body", "Written", "read_json"]

_OPENS = re.compile(rb'"messages"\s*:\s*\[')
_STAND_IN = secrets.token_hex(16)
_QUOTED = f'"{_STAND_IN}"'.encode()
_BEHIND = f'["{_STAND_IN}"'
_DECODER = json.JSONDecoder()


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """The messages of a request as its client wrote them: `count`, in `size` bytes between the brackets of their list,
    which have this xxh3-128 `digest`."""

    count: int
    size: int
    digest: bytes


class Body:
    """A request's JSON object. In `fields` the `messages` that are `known` are None, when the body repeats them."""

    def __init__(self, data: bytes, known: Written | None = None) -> None:
        """Raises `BadRequestError` for what is no JSON object."""
        self._data = data
        opens = _OPENS.search(data)
        self._begin = None if opens is None else opens.end()
        found = None if known is None else self._around(known)
        self.known = None if found is None else known
        """What the body repeats."""
        self.fields = read_json(data) if found is None else found

    def messages(self) -> list[Any]:
        """All of the messages."""
        found: list[Any] = orjson.loads(self._data)["messages"]
        return found

    def written(self) -> Written | None:
        """What the next request may repeat; None when that cannot be told."""
        if self._begin is None:
            return None
        size, count, text = (0, 0, "[") if self.known is None else (self.known.size, self.known.count - 1, _BEHIND)
        begin, end = self._begin, self._begin + size
        try:
            # One character a byte: all that JSON's grammar is about is ASCII.
            found, stop = _DECODER.raw_decode(text + self._data[end:].decode("latin-1"))
        except (ValueError, RecursionError):
            return None
        end += stop - len(text) - 1
        if not found or (self.known is None and _read_around(self._data, begin, end) is None):
            return None
        return Written(count + len(found), end - begin, _digest(self._data, begin, end))

    def _around(self, known: Written) -> dict[str, Any] | None:
        """The fields, when the body repeats what is known."""
        if self._begin is None:
            return None
        begin, end = self._begin, self._begin + known.size
        if _digest(self._data, begin, end) != known.digest:
            return None
        fields = _read_around(self._data, begin, end)
        if fields is not None:
            fields["messages"][:1] = [None] * known.count
        return fields


def read_json(data: bytes) -> dict[str, Any]:
    """A request's JSON object, empty where there is nothing. Raises `BadRequestError`."""
    try:
        return expect(orjson.loads(data or b"{}"), dict, "the body")
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"the body is not JSON: {error}") from error


def _read_around(data: bytes, begin: int, end: int) -> dict[str, Any] | None:
    """The JSON object that `data` is with the stand-in from `begin` to `end`; None when it is none, or another place
    than the beginning of its `messages` was replaced."""
    try:
        found = orjson.loads(b"".join((data[:begin], _QUOTED, data[end:])))
    except orjson.JSONDecodeError:
        return None
    messages = found.get("messages") if isinstance(found, dict) else None
    return found if isinstance(messages, list) and messages and messages[0] == _STAND_IN else None


def _digest(data: bytes, begin: int, end: int) -> bytes:
    return xxhash.xxh3_128_digest(memoryview(data)[begin:end])
