"""The block format against a decoder that reads it word by word, from its description."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_transport_diskdelta import codec


def slow_decode(base: bytes, block: bytes, width: int, encoding: str) -> tuple[bytes, int]:
    """The new bytes, and how many values changed."""
    words = [base[i : i + width] for i in range(0, len(base), width)]
    position = changes = 0
    while position < len(block):
        index, count, *sizes = struct.unpack_from(f"<QI{1 + width}I", block, position)
        position += struct.calcsize(f"<QI{1 + width}I")
        streams = []
        for size in sizes:
            streams.append(zstandard.ZstdDecompressor().decompress(block[position : position + size]))
            position += size
        at, seen = index * codec.FRAME_BYTES // width - 1, 0
        for gap in streams[0]:
            if gap == 255:
                at += 255
                continue
            at += gap + 1
            value = bytes(plane[seen] for plane in streams[1:])
            words[at] = bytes(a ^ b for a, b in zip(words[at], value, strict=True)) if encoding == "xor" else value
            seen += 1
        assert seen == count
        changes += count
    return b"".join(words), changes


@pytest.fixture(params=[None, (512, 64)], ids=["as shipped", "small frames"])
def frames(request, monkeypatch):
    if request.param is not None:
        monkeypatch.setattr(codec, "FRAME_BYTES", request.param[0])
        monkeypatch.setattr(codec, "_BLOCK_BYTES", request.param[1])


@st.composite
def pairs(draw):
    width = draw(st.sampled_from([1, 2, 4, 8]))
    count = draw(st.one_of(st.integers(0, 40), st.integers(0, 600)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base = rng.integers(0, 256, count * width, dtype=np.uint8)
    new = base.copy()
    share = draw(st.sampled_from([0.0, 0.001, 0.02, 0.5, 1.0]))
    touched = np.flatnonzero(rng.random(len(new)) < share)
    new[touched] = rng.integers(0, 256, len(touched), dtype=np.uint8)
    return base, new, width


@settings(deadline=None, max_examples=60)
@given(pair=pairs(), encoding=st.sampled_from(["xor", "overwrite"]))
def _law(pair, encoding):
    base, new, width = pair
    pieces, checksum = codec.encode(base, new, width, encoding)
    block = b"".join(pieces)
    changed = np.count_nonzero((base != new).reshape(-1, width).any(axis=1))
    assert slow_decode(base.tobytes(), block, width, encoding) == (new.tobytes(), changed)
    assert checksum == xxhash.xxh3_128_hexdigest(new.tobytes())
    assert bool(pieces) == bool(changed)
    target = base.copy()
    assert codec.apply(target, memoryview(block), width, encoding) == checksum
    assert target.tobytes() == new.tobytes()
    codec.apply(target, memoryview(block), width, encoding)  # once more
    assert target.tobytes() == (base if encoding == "xor" else new).tobytes()


@pytest.mark.usefixtures("frames")
def test_what_is_encoded_is_applied():
    _law()


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (np.array([0.0, 1.0], np.float32), np.array([-0.0, 1.0], np.float32)),
        (np.array([0x7FC00001], np.uint32), np.array([0x7FC00002], np.uint32)),
        (np.array([0x7FF8000000000001], np.uint64), np.array([0x7FF0000000000001], np.uint64)),
        (np.array([0x7FC1, 0x8000, 0x3F80], np.uint16), np.array([0xFFC1, 0x0000, 0x3F80], np.uint16)),
        (np.array(-0.0, np.float32), np.array(0.0, np.float32)),
    ],
    ids=["minus zero", "payload of a NaN", "signalling NaN", "bfloat16", "0-d"],
)
def test_bytes_are_compared_and_not_values(before, after, encoding):
    base, new = before.reshape(-1).view(np.uint8).copy(), after.reshape(-1).view(np.uint8)
    pieces, _ = codec.encode(base, new, before.itemsize, encoding)
    assert pieces
    codec.apply(base, memoryview(b"".join(pieces)), before.itemsize, encoding)
    assert base.tobytes() == new.tobytes()


def test_positions_are_64_bit():
    index = 1 << 33
    header = struct.pack("<QI3I", index, 1, 0, 0, 0)
    with pytest.raises(codec.CorruptBlock, match=str(index)):
        codec.apply(np.zeros(8, np.uint8), memoryview(header), 2, "xor")


def test_a_tensor_that_changed_much_is_too_dense():
    base, new = np.zeros(800, np.uint8), np.zeros(800, np.uint8)
    new[: 2 * 101] = 1
    with pytest.raises(codec.TooDense):
        codec.encode(base, new, 2, "xor", whole_above=0.25)
    new[200:] = 0
    codec.encode(base, new, 2, "xor", whole_above=0.25)


@settings(deadline=None, max_examples=80)
@given(pair=pairs(), encoding=st.sampled_from(["xor", "overwrite"]), data=st.data())
def test_a_damaged_block_is_an_error_or_a_wrong_checksum(pair, encoding, data):
    base, new, width = pair
    pieces, checksum = codec.encode(base, new, width, encoding)
    block = bytearray(b"".join(pieces))
    if not block:
        return
    at = data.draw(st.integers(0, len(block) - 1))
    if data.draw(st.booleans()):
        block[at] ^= data.draw(st.integers(1, 255))
    else:
        del block[at:]
    target = base.copy()
    try:
        found = codec.apply(target, memoryview(block), width, encoding)
    except codec.CorruptBlock:
        return
    assert found == xxhash.xxh3_128_hexdigest(target.tobytes())
    assert (found == checksum) == (target.tobytes() == new.tobytes())
