"""What changed in a tensor's bytes, as a block of bytes; and back.

A tensor is compared word by word (a word is an element: 1, 2, 4 or 8 bytes), as integers: −0.0 and 0.0 differ, and so
do two NaNs with other payloads. It is cut into *frames* of 32 MiB. Each frame with a change is a header of
little-endian numbers, followed by one zstd stream for the gaps and one for each byte of the values:

| field | type | |
|---|---|---|
| index | uint64 | of the frame: its first word is at `index · 32 MiB / width` |
| changes | uint32 | values that the frame holds |
| sizes | uint32 × (1 + width) | compressed bytes of the gaps, and of each byte plane, lowest byte first |

A gap is the number of unchanged words before a changed one, in 8 bits; 255 means 255 unchanged words and no change yet.
Positions are therefore 64-bit, whatever the size of the tensor. A value is the new word (`overwrite`), or old XOR new
(`xor`), split into byte planes: the planes of neighbouring floats that moved by little are nearly constant.

Both directions work in blocks that stay in the processor's cache, and feed the checksum from there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

__all__ = ["FRAME_BYTES", "CorruptBlock", "Encoding", "TooDense", "apply", "encode"]

Encoding = Literal["xor", "overwrite"]
Bytes = NDArray[np.uint8]

FRAME_BYTES = 32 << 20
_BLOCK_BYTES = 1 << 20
_SKIP = 255
_LEVEL = 1


class CorruptBlock(ValueError):
    """A block is not what `encode` makes of a tensor of this size."""


class TooDense(Exception):
    """More has changed than the share allows: the tensor is smaller when written whole."""


def encode(
    base: Bytes, new: Bytes, width: int, encoding: Encoding, *, whole_above: float = 1.0
) -> tuple[list[bytes], str]:
    """The block (in pieces) that makes `new` of `base`, and the xxh3-128 of `new`. No piece: nothing changed.

    Both are uint8 [n] with n a multiple of `width`. Raises `TooDense` when more than the share `whole_above` of the
    words differ.
    """
    pieces: list[bytes] = []
    hasher = xxhash.xxh3_128()
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    allowed, changes = int(whole_above * (len(new) // width)), 0
    for index, start in enumerate(range(0, len(new), FRAME_BYTES)):
        stop = min(start + FRAME_BYTES, len(new))
        words, values = _changes(base[start:stop], new[start:stop], width, encoding, hasher)
        if not len(words):
            continue
        changes += len(words)
        if changes > allowed:
            raise TooDense
        planes = [compressor.compress(_gaps(words).data)]
        planes += [compressor.compress(np.ascontiguousarray(plane).data) for plane in _planes(values, width)]
        pieces += [struct.pack(_header(width), index, len(words), *map(len, planes)), *planes]
    return pieces, hasher.hexdigest()


def _changes(
    base: Bytes, new: Bytes, width: int, encoding: Encoding, hasher: Any
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Positions of the words that differ, int64 ascending, and their values."""
    found: list[NDArray[np.int64]] = []
    values: list[NDArray[Any]] = []
    for start in range(0, len(new), _BLOCK_BYTES):
        old_block, new_block = base[start : start + _BLOCK_BYTES], new[start : start + _BLOCK_BYTES]
        hasher.update(new_block.data)
        even = len(new_block) // 8 * 8
        for begin, end, lane in ((0, even, 8), (even, len(new_block), width)):
            words, chosen = _differing(old_block[begin:end], new_block[begin:end], lane, width, encoding)
            if len(words):
                found.append(words + (start + begin) // width)
                values.append(chosen)
    if not found:
        return np.empty(0, np.int64), np.empty(0, f"<u{width}")
    return np.concatenate(found), np.concatenate(values)


def _differing(
    old: Bytes, new: Bytes, lane: int, width: int, encoding: Encoding
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Positions and values of differing words: `lane` bytes at a time first, then inside of the lanes that differ."""
    old_lanes, new_lanes = old.view(f"<u{lane}"), new.view(f"<u{lane}")
    lanes = np.flatnonzero(old_lanes != new_lanes)
    chosen = new_lanes[lanes]
    moved = old_lanes[lanes] ^ chosen
    if lane == width:
        return lanes, moved if encoding == "xor" else chosen
    shift = (lane // width).bit_length() - 1
    words_of = moved.view(f"<u{width}")
    within = np.flatnonzero(words_of != 0)
    values = words_of if encoding == "xor" else chosen.view(f"<u{width}")
    return (lanes[within >> shift] << shift) + (within & ((1 << shift) - 1)), values[within]


def _gaps(words: NDArray[np.int64]) -> NDArray[np.uint8]:
    gaps = np.empty_like(words)
    gaps[0] = words[0]
    np.subtract(words[1:], words[:-1], out=gaps[1:])
    gaps[1:] -= 1
    large = np.flatnonzero(gaps >= _SKIP)
    skips = gaps[large] // _SKIP
    gaps[large] -= skips * _SKIP
    return np.insert(gaps.astype(np.uint8), np.repeat(large, skips), _SKIP)


def _planes(values: NDArray[Any], width: int) -> Iterator[NDArray[np.uint8]]:
    """Each byte of the words, lowest first: uint8 [n], not contiguous."""
    columns = values.view(np.uint8).reshape(-1, width)
    return (columns[:, k] for k in range(width))


def apply(target: Bytes, block: memoryview, width: int, encoding: Encoding) -> str:
    """Change `target` (uint8 [n], the base's bytes) in place; the xxh3-128 of what it is then.

    Raises `CorruptBlock`; frames before the corrupt one have been applied then.
    """
    hasher = xxhash.xxh3_128()
    frames = _frames(block, width, -(-len(target) // FRAME_BYTES))
    following = next(frames, None)
    for index, start in enumerate(range(0, len(target), FRAME_BYTES)):
        part = target[start : start + FRAME_BYTES]
        if following is not None and following[0] == index:
            _, count, streams = following
            _apply_frame(part, count, streams, width, encoding, hasher)
            following = next(frames, None)
        else:
            hasher.update(part.data)
    return hasher.hexdigest()


def _frames(block: memoryview, width: int, limit: int) -> Iterator[tuple[int, int, list[memoryview]]]:
    """(index, changes, compressed streams) of each frame, indices ascending and under `limit`."""
    header = struct.Struct(_header(width))
    position, last = 0, -1
    while position < len(block):
        if len(block) - position < header.size:
            raise CorruptBlock("it ends inside a frame's header")
        index, count, *sizes = header.unpack_from(block, position)
        position += header.size
        if not last < index < limit:
            raise CorruptBlock(f"frame {index} follows frame {last} of {limit}")
        if sum(sizes) > len(block) - position:
            raise CorruptBlock(f"it ends inside frame {index}")
        streams = []
        for size in sizes:
            streams.append(block[position : position + size])
            position += size
        last = index
        yield index, count, streams


def _apply_frame(
    part: Bytes, count: int, streams: list[memoryview], width: int, encoding: Encoding, hasher: Any
) -> None:
    word = np.dtype(f"<u{width}")
    most = len(part) // width
    if not 0 < count <= most:
        raise CorruptBlock(f"{count} changes in a frame of {most} words")
    decompressor = zstandard.ZstdDecompressor()
    words = _positions(_unpacked(decompressor, streams[0], count + most // _SKIP))
    if len(words) != count:
        raise CorruptBlock(f"{len(words)} gaps for {count} changes")
    if int(words[-1]) >= most:
        raise CorruptBlock(f"a change at word {int(words[-1])} of {most}")
    values = np.zeros(count, word)
    for stream in reversed(streams[1:]):
        plane = _unpacked(decompressor, stream, count)
        if len(plane) != count:
            raise CorruptBlock(f"{len(plane)} bytes for {count} changes")
        if width > 1:
            values <<= 8
        values |= plane
    view = part.view(word)
    per_block = _BLOCK_BYTES // width
    ends = np.searchsorted(words, np.arange(per_block, most + per_block, per_block, dtype=np.int32))
    begin = 0
    for number, end in enumerate(ends.tolist()):
        block = view[number * per_block : (number + 1) * per_block]
        chosen = (words[begin:end] - number * per_block).astype(np.intp)
        if encoding == "xor":
            block[chosen] ^= values[begin:end]
        else:
            block[chosen] = values[begin:end]
        hasher.update(block.data)
        begin = end


def _positions(gaps: NDArray[np.uint8]) -> NDArray[np.int32]:
    """The words that changed: 255 moves by 255, a smaller gap by one more than itself, onto a change. A frame has
    less than 2³¹ words."""
    changes = gaps != _SKIP
    words = np.cumsum(gaps + changes.view(np.uint8), dtype=np.int32)
    words -= 1
    return words if changes.all() else words[changes]


def _unpacked(decompressor: zstandard.ZstdDecompressor, stream: memoryview, most: int) -> NDArray[np.uint8]:
    """Decompressed, never into more than `most` bytes."""
    try:
        if zstandard.frame_content_size(stream) > most:
            raise CorruptBlock("a stream is larger than its frame allows")
        return np.frombuffer(decompressor.decompress(stream, max_output_size=most), np.uint8)
    except zstandard.ZstdError as error:
        raise CorruptBlock(str(error)) from error


def _header(width: int) -> str:
    return f"<QI{1 + width}I"
