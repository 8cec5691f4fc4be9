"""Broken HTTP requests from whole ones: a pure function of seed and number, so that each can be made again."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Attempt", "Valid", "attempt"]


@dataclasses.dataclass(frozen=True)
class Valid:
    """A request that the server answers; `body` None for none."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: Any = None

    def data(self) -> bytes:
        return b"" if self.body is None else json.dumps(self.body).encode()


@dataclasses.dataclass(frozen=True)
class Attempt:
    """Bytes for a socket, and what was done to them."""

    kind: str
    data: bytes


_SNIPPETS = [
    b"null", b"true", b"false", b"0", b"-0", b"-1", b"1.5", b"1e999", b"-1e999", b"1e-999", b"NaN", b"Infinity",
    b"2147483648", b"9223372036854775808", b"-9223372036854775809", b"1" * 400, b'""', b"[]", b"{}", b"[[]]",
    b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\u0000"', b'"\x00"', b'"\xed\xa0\x80"', b'"\xff\xfe"', b'"\xc3"',
    b'"\xef\xbb\xbf"', b'{"":{}}',
    b'"<|im_end|>"', b'"<tool_call>"', b'"user"', b'"tool"', b'"' + b"x" * 20_000 + b'"', b"[" * 5000 + b"]" * 5000,
    b'{"a":' * 3000 + b"1" + b"}" * 3000, b"[" + b"0," * 3000 + b"0]", b"[" * 100_000, b"'x'", b"undefined",
    b'{"type":"text","text":1}', b'[{"type":"image_url"}]', b'{"role":"user","role":"tool"}', b'"1e5"',
]  # fmt: skip
_MARK = "\u00a7here\u00a7"


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        found += _places(one, (*path, key))
    return found


def _replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _replaced(value[path[0]], path[1:], new)
    return copy


def wire(valid: Valid, body: bytes, *, framing: Sequence[bytes] | None = None) -> bytes:
    """The request as bytes; `framing` are header lines in the place of the right content-length."""
    lines = [f"{valid.method} {valid.path} HTTP/1.1".encode(), b"host: here"]
    lines += [f"{name}: {value}".encode() for name, value in valid.headers]
    lines += [b"content-length: %d" % len(body)] if framing is None else framing
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


# What is done to a request: each takes a random source, the request, and all of them.


def _wrong_value(r: random.Random, valid: Valid, _: Sequence[Valid]) -> bytes:
    if valid.body is None:
        return wire(valid, r.choice(_SNIPPETS))
    path = r.choice(_places(valid.body))
    text = json.dumps(_replaced(valid.body, path, _MARK))
    return wire(valid, text.encode().replace(json.dumps(_MARK).encode(), r.choice(_SNIPPETS)))


def _duplicate_key(r: random.Random, valid: Valid, _: Sequence[Valid]) -> bytes:
    body = valid.body if isinstance(valid.body, dict) and valid.body else {"a": 1}
    again = b'"%s": %s' % (r.choice(list(body)).encode(), r.choice(_SNIPPETS))
    whole = json.dumps(body).encode()
    return wire(valid, whole[:-1] + b", " + again + b"}" if r.random() < 0.5 else b"{" + again + b", " + whole[1:])


def _unknown_key(r: random.Random, valid: Valid, _: Sequence[Valid]) -> bytes:
    names = [
        "n",
        "stream",
        "tools",
        "seed",
        "stop",
        "temperature",
        "max_tokens",
        "previous_response_id",
        "\u0000",
        "x" * 99,
    ]
    body = valid.data()[:-1] + b', "%s": %s}' % (r.choice(names).encode(), r.choice(_SNIPPETS))
    return wire(valid, body)


def _cut_json(r: random.Random, valid: Valid, _: Sequence[Valid]) -> bytes:
    body = valid.data()
    return wire(valid, body[: r.randrange(len(body) + 1)])


def _noisy(r: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(r.choice([1, 1, 2, 4, 16])):
        at = r.randrange(len(out) + 1)
        match r.randrange(4):
            case 0 if at < len(out):
                out[at] = r.randrange(256)
            case 1:
                out[at:at] = r.choice(_SNIPPETS[:30])
            case 2:
                del out[at : at + r.randrange(1, 20)]
            case _:
                out[at:at] = bytes([r.choice(b'\x00\x0a\x0d "\\{}[],:\x80\xff')]) * r.choice([1, 1, 3])
    return bytes(out)


def _noisy_body(r: random.Random, valid: Valid, _: Sequence[Valid]) -> bytes:
    return wire(valid, _noisy(r, valid.data()))


def _noisy_request(r: random.Random, valid: Valid, _: Sequence[Valid]) -> bytes:
    return _noisy(r, wire(valid, valid.data()))


def _cut_request(r: random.Random, valid: Valid, _: Sequence[Valid]) -> bytes:
    data = wire(valid, valid.data())
    return data[: r.randrange(len(data))]


def _wrong_length(r: random.Random, valid: Valid, _: Sequence[Valid]) -> bytes:
    body = valid.data()
    right = b"content-length: %d" % len(body)
    framing = r.choice(
        [
            [b"content-length: %d" % max(0, len(body) + r.choice([-7, -1, 1, 9, 10_000]))],
            [b"content-length: -1"],
            [b"content-length: +5"],
            [b"content-length: 0x10"],
            [b"content-length: 99999999999"],
            [b"content-length: 999999999999999999999999999999"],
            [b"content-length:"],
            [b"content-length: 1,2"],
            [right, b"content-length: 3"],
            [right, b"transfer-encoding: chunked"],
            [b"transfer-encoding: gzip, chunked"],
            [b"transfer-encoding: identity"],
            [],
        ]
    )
    return wire(valid, body, framing=framing)


def _chunked(r: random.Random, valid: Valid, _: Sequence[Valid]) -> bytes:
    body, pieces = valid.data(), []
    while body:
        size = r.choice([1, 3, 50, 1000])
        pieces.append(b"%x\r\n%s\r\n" % (len(body[:size]), body[:size]))
        body = body[size:]
    chunks = b"".join(pieces) + r.choice(
        [b"0\r\n\r\n", b"0\r\nx: y\r\n\r\n", b"zz\r\n", b"-1\r\n\r\n", b"f" * 20 + b"\r\n", b"0\r\n"]
    )
    return wire(valid, _noisy(r, chunks) if r.random() < 0.2 else chunks, framing=[b"transfer-encoding: chunked"])


def _bad_header(r: random.Random, valid: Valid, _: Sequence[Valid]) -> bytes:
    line = r.choice(
        [
            b"x" * 20_000 + b": y",
            b"x: " + b"y" * 100_000,
            b"no colon",
            b": no name",
            b"sp ace: x",
            b"nul: \x00",
            b"high: \xff\xfe\x80",
            b"fold: a\r\n b",
            b"authorization: Bearer",
            b"authorization: Bearer \xe9\xff",
            b"authorization: Basic " + b"QQ" * 2000,
            b"x-api-key: \xed\xa0\x80",
            b"x-session-id: ../../etc",
            b"x-session-id: \xff",
            b"x-request-timeout: nan",
            b"x-request-timeout: -1",
            b"x-request-timeout: 1e999",
            b"x-smg-routing-key: " + b"k" * 5000,
            b"idempotency-key: same",
            b"expect: 100-continue",
            b"expect: 500-whatever",
            b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: x",
            b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAA",
            b"host: \x01\r\nhost: two",
            b"content-type: application/x-www-form-urlencoded",
            b"content-type: text/plain; charset=utf-16",
            b"content-encoding: gzip",
            b"connection: close",
            b"\r\n".join(b"h%d: %d" % (i, i) for i in range(500)),
        ]
    )
    whole = wire(valid, valid.data())
    return whole.replace(b"\r\n", b"\r\n" + line + b"\r\n", 1)


def _bad_line(r: random.Random, valid: Valid, _: Sequence[Valid]) -> bytes:
    path = valid.path.encode()
    line = r.choice(
        [
            b"POST " + b"/x" * 40_000 + b" HTTP/1.1",
            b"POST " + path + b"?" + b"a=b&" * 9000 + b" HTTP/1.1",
            b"POST " + path + b"/../../" * 50 + b" HTTP/1.1",
            b"POST " + path + b"%00%ff%2e%2e%2f HTTP/1.1",
            b"POST " + path + b"\xff\xfe HTTP/1.1",
            b"POST http://elsewhere" + path + b" HTTP/1.1",
            b"POST /" + path + b" HTTP/1.1",
            b"POST " + path.replace(b"/", b"//") + b" HTTP/1.1",
            b"OPTIONS * HTTP/1.1",
            b"CONNECT there:1 HTTP/1.1",
            b"TRACE " + path + b" HTTP/1.1",
            b"PATCH " + path + b" HTTP/1.1",
            b"BREW " + path + b" HTTP/1.1",
            b"post " + path + b" HTTP/1.1",
            b"GET " + path + b" HTTP/1.0",
            b"POST " + path + b" HTTP/1.0",
            b"POST " + path + b" HTTP/9.9",
            b"PRI * HTTP/2.0",
            b"POST " + path,
            b"POST  " + path + b"  HTTP/1.1",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"",
        ]
    )
    return line + wire(valid, valid.data()).partition(b"\r\n")[1] + wire(valid, valid.data()).partition(b"\r\n")[2]


def _pipelined(r: random.Random, valid: Valid, others: Sequence[Valid]) -> bytes:
    many = [valid, *r.choices(others, k=r.choice([1, 2, 5]))]
    data = b"".join(wire(one, one.data()) for one in many)
    return _noisy(r, data) if r.random() < 0.3 else data


def _as_it_is(_: random.Random, valid: Valid, __: Sequence[Valid]) -> bytes:
    return wire(valid, valid.data())


_DONE: dict[str, tuple[int, Callable[[random.Random, Valid, Sequence[Valid]], bytes]]] = {
    "wrong value": (8, _wrong_value),
    "duplicate key": (2, _duplicate_key),
    "unknown key": (3, _unknown_key),
    "cut JSON": (2, _cut_json),
    "noisy body": (4, _noisy_body),
    "noisy request": (4, _noisy_request),
    "cut request": (2, _cut_request),
    "wrong length": (3, _wrong_length),
    "chunked": (2, _chunked),
    "bad header": (4, _bad_header),
    "bad request line": (3, _bad_line),
    "pipelined": (2, _pipelined),
    "as it is": (2, _as_it_is),
}
"""How often each is chosen, relative to the others."""


def attempt(seed: int, number: int, valid: Sequence[Valid]) -> Attempt:
    """Attempt `number` of a seed over these requests."""
    r = random.Random(f"{seed}:{number}")
    kind = r.choices(list(_DONE), [weight for weight, _ in _DONE.values()])[0]
    return Attempt(kind, _DONE[kind][1](r, r.choice(valid), valid))
