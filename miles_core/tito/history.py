"""A request's messages, read only as far as they are new.

A harness repeats its whole history in every request, and only its end differs from what the session has seen. Where
its bytes tell that (`bodies`), the repeated part is not even parsed; elsewhere one checksum over its JSON costs little
beside converting and digesting every message of it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import orjson
import xxhash

if TYPE_CHECKING:
    from miles_core.tito.bodies import Body, Written
    from miles_core.tito.tree import Node

__all__ = ["History", "Known"]

Message = Mapping[str, Any]


class History(Sequence[Message]):
    """The messages that `convert(raw[i], i)` gives, each converted when it is first read.

    `convert` raises `BadRequestError` for what a client got wrong; it is a pure function.
    """

    def __init__(self, raw: Sequence[Any], convert: Callable[[Any, int], Message] | None = None) -> None:
        """Without `convert` the raw messages are the messages."""
        self.body: Body | None = None
        """Where the raw messages come from; those that it repeats are read from it when they are asked for."""
        self._raw = raw
        self._convert = convert
        self._read: dict[int, Message] = {}
        self._hashed = (0, self._start())

    def __len__(self) -> int:
        return len(self._raw)

    @overload
    def __getitem__(self, index: int) -> Message: ...

    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...

    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        if isinstance(index, slice):
            return [self._at(i) for i in range(*index.indices(len(self._raw)))]
        return self._at(range(len(self._raw))[index])

    def _at(self, index: int) -> Message:
        found = self._read.get(index)
        if found is None:
            raw = self._raw[index]
            if raw is None:
                raw = self._whole()[index]
            found = self._read[index] = raw if self._convert is None else self._convert(raw, index)
        return found

    def _whole(self) -> Sequence[Any]:
        """The raw messages, also those that are known."""
        if self.body is not None and self.body.known is not None and self._raw[0] is None:
            self._raw = self.body.messages()
        return self._raw

    def fingerprint(self, count: int) -> bytes:
        """Of the first `count` messages as the client wrote them: equal for equal messages that are converted alike.
        Asked for a longer part, it goes on where the last one ended."""
        covered, state = self._hashed
        if count < covered:
            covered, state = 0, self._start()
        if count > covered:  # the inside of one JSON list, whatever the parts in which it is read
            state.update(b"," * bool(covered) + orjson.dumps(list(self._whole()[covered:count]))[1:-1])
        self._hashed = (count, state)
        return state.digest()

    def _start(self) -> xxhash.xxh3_128:
        return xxhash.xxh3_128(b"" if self._convert is None else self._convert.__module__.encode())


class Known:
    """The history of a session's last turn, `node`: the digests of its messages, by how they were written, or by one
    fingerprint of them all."""

    def __init__(self, node: Node, identity: bytes, history: History, digests: tuple[bytes, ...]) -> None:
        self.node = node
        self.written: Written | None = None if history.body is None else history.body.written()
        self._identity = identity
        self._digests = digests
        self._fingerprint = history.fingerprint(len(digests)) if self.written is None else None

    def repeated(self, identity: bytes, history: History) -> tuple[bytes, ...]:
        """The digests of the first messages of `history`: all of ours when it begins with them, otherwise none."""
        count = len(self._digests)
        if self._identity != identity or len(history) < count:
            return ()
        if self.written is not None:
            same = history.body is not None and history.body.known is self.written
        else:
            same = history.fingerprint(count) == self._fingerprint
        return self._digests if same else ()
