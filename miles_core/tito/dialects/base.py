"""What the dialects share: the protocol that they follow, and reading JSON that a client wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import orjson

from miles_core.tito.turns import BadRequestError, Reply, TurnRequest

__all__ = [
    "Dialect",
    "StreamWriter",
    "event",
    "expect",
    "get",
    "no_constraint",
    "one_of_one",
    "refuse_fields",
    "stop_strings",
    "text_blocks",
]

T = TypeVar("T")

_NUMBERS = ("temperature", "top_p", "min_p", "top_k", "seed")


class StreamWriter(Protocol):
    """The server-sent events of one streamed reply, in order: `start`, any number of `delta`, then `finish`; or `error`
    at any point, and nothing behind it."""

    def start(self) -> bytes: ...

    def delta(self, reasoning: str, content: str) -> bytes:
        """Text that the client has not got yet."""
        ...

    def finish(self, reply: Reply) -> bytes: ...

    def error(self, status: int, message: str, code: str) -> bytes: ...


class Dialect(Protocol):
    """One wire format. Everything that a client can get wrong is a `BadRequestError`."""

    late: bool
    """Whether the turns that it reads have a `History` over the body's `messages`, which looks at none of them before
    it is asked for it."""

    def read(self, body: Mapping[str, Any]) -> TurnRequest:
        """The turn that a request body asks for."""
        ...

    def answer(self, request: TurnRequest, reply: Reply) -> Mapping[str, Any]:
        """The body of the answer to a request that is not streamed."""
        ...

    def stream(self, request: TurnRequest) -> StreamWriter: ...

    def error(self, status: int, message: str, code: str) -> Mapping[str, Any]:
        """The body of an answer with an error status."""
        ...


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event (WHATWG HTML, section 9.2)."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + orjson.dumps(data) + b"\n\n"


def expect(value: Any, kind: type[T] | tuple[type[T], ...], where: str) -> T:
    """`value`, when it is of `kind`. A bool is no number. Raises `BadRequestError` that names the place."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kind) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join(
            {"str": "a string", "dict": "an object", "list": "a list"}.get(k.__name__, k.__name__) for k in kinds
        )
        raise BadRequestError(f"{where}: expected {names}, found {type(value).__name__}")
    return value


def get(body: Mapping[str, Any], key: str, kind: type[T] | tuple[type[T], ...], default: T) -> T:
    """`body[key]`, or `default` when it is absent or null."""
    value = body.get(key)
    return default if value is None else expect(value, kind, key)


def optional(body: Mapping[str, Any], key: str, kind: type[T] | tuple[type[T], ...]) -> T | None:
    """`body[key]`, None when it is absent or null."""
    value = body.get(key)
    return None if value is None else expect(value, kind, key)


def numbers(body: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters that every dialect calls alike. Raises `BadRequestError` outside their ranges."""
    if body.keys().isdisjoint(_NUMBERS):
        return {}
    read: dict[str, Any] = {name: optional(body, name, (int, float)) for name in ("temperature", "top_p", "min_p")}
    read |= {name: optional(body, name, int) for name in ("top_k", "seed")}
    for name, low, high in (("temperature", 0, 100), ("top_p", 1e-9, 1), ("min_p", 0, 1), ("seed", -(2**63), 2**63)):
        value = read[name]
        if value is not None and not low <= value <= high:
            raise BadRequestError(f"{name}: {value} is outside {low:g} to {high:g}")
    if read["top_k"] is not None and not -1 <= read["top_k"] < 1 << 31:
        raise BadRequestError(f"top_k: {read['top_k']} is outside -1 to 2147483647")
    if read["seed"] is not None:
        read["seed"] &= 0x7FFF_FFFF
    return read


def limit(body: Mapping[str, Any], *keys: str) -> int | None:
    """The token limit, under the first of `keys` that is there. Raises `BadRequestError` below 1."""
    for key in keys:
        value = optional(body, key, int)
        if value is not None:
            if value < 1:
                raise BadRequestError(f"{key}: {value} is below 1")
            return value
    return None


def stop_strings(value: Any, where: str) -> tuple[str, ...]:
    """Stop strings: one, several or none. Raises `BadRequestError` for an empty one, which ends every reply."""
    if value is None:
        return ()
    found = [value] if isinstance(value, str) else expect(value, list, where)
    for item in found:
        if not isinstance(item, str) or not item:
            raise BadRequestError(f"{where}: expected strings that are not empty")
    return tuple(found)


def refuse_fields(body: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Raises `BadRequestError` for a field that would change tokens, unless it has its neutral value."""
    if body.keys().isdisjoint(fields):
        return
    for name, neutral in fields.items():
        value = body.get(name)
        if value is not None and value != neutral and value not in ([], {}):
            raise BadRequestError(
                f"{name}: refused, because it would change which tokens are read or sampled; leave it out",
                code="refused",
            )


def one_of_one(body: Mapping[str, Any], *names: str) -> None:
    """Raises `BadRequestError` when more than one answer is asked for."""
    for name in names:
        if body.get(name) not in (None, 1):
            raise BadRequestError(f"{name}: {body[name]!r}, but a session's turn has one answer", code="refused")


def no_constraint(choice: Any, where: str, allowed: Sequence[Any], *, offered: bool) -> None:
    """Raises `BadRequestError` for a tool choice that the sampler would have to enforce."""
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if kind is not None and kind not in allowed and offered:
        raise BadRequestError(
            f"{where}: {kind!r} would force or forbid tool calls, and a policy samples freely; use 'auto'",
            code="refused",
        )


def text_blocks(value: Any, where: str, kinds: Sequence[str] = ("text",)) -> str | list[dict[str, Any]]:
    """Content as a string, or as text blocks. Raises `BadRequestError` for others: a text model cannot see them."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    blocks = []
    for index, block in enumerate(expect(value, list, where)):
        kind = expect(block, dict, f"{where}[{index}]").get("type")
        if kind not in kinds:
            raise BadRequestError(f"{where}[{index}]: a block of type {kind!r}; allowed: {', '.join(kinds)}")
        blocks.append({"type": "text", "text": expect(block.get("text"), str, f"{where}[{index}].text")})
    return blocks
