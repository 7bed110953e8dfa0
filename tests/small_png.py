"""Pictures of pages as small files: 256 colours, which pages hardly have more of, in place of 16 million."""

import struct
import zlib
from collections import Counter
from collections.abc import Iterator

COLOURS = 256


def shrink(png: bytes) -> bytes:
    """The same picture with its most frequent colours; others become the nearest. For 8-bit RGB, and
    RGBA, which a browser makes of a page with a dialog and whose alpha is dropped."""
    chunks = list(_split(png))
    width, height, depth, kind = struct.unpack(">IIBB", chunks[0][1][:10])
    assert depth == 8, "8-bit RGB or RGBA"
    step = {2: 3, 6: 4}[kind]
    lines = _unfilter(zlib.decompress(b"".join(data for name, data in chunks if name == b"IDAT")), width, height, step)
    rows = [[line[at : at + 3] for at in range(0, step * width, step)] for line in lines]
    counts: Counter[bytes] = Counter()
    for row in rows:
        counts.update(row)
    palette = [colour for colour, _ in counts.most_common(COLOURS)]
    numbers = {colour: number for number, colour in enumerate(palette)}
    for colour in counts:
        if colour not in numbers:
            numbers[colour] = min(range(COLOURS), key=lambda number: _distance(colour, palette[number]))
    pixels = b"".join(b"\0" + bytes(map(numbers.__getitem__, row)) for row in rows)
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", b"".join(palette)),
        (b"IDAT", zlib.compress(pixels, 9)),
        (b"IEND", b""),
    )
    return png[:8] + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )


def _split(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 8
    while at < len(png):
        (length,) = struct.unpack_from(">I", png, at)
        yield png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        at += length + 12


def _unfilter(data: bytes, width: int, height: int, step: int) -> Iterator[bytes]:
    """Lines of bytes, ``step`` a pixel, without PNG's filters."""
    size = step * width
    above = bytearray(size)
    for number in range(height):
        start = number * (size + 1)
        kind, line = data[start], bytearray(data[start + 1 : start + 1 + size])
        if kind == 2:
            line = bytearray((a + b) & 255 for a, b in zip(line, above, strict=True))
        elif kind:
            for at in range(size):
                left = line[at - step] if at >= step else 0
                corner = above[at - step] if at >= step else 0
                guess = (left, 0, (left + above[at]) // 2, _paeth(left, above[at], corner))[kind - 1]
                line[at] = (line[at] + guess) & 255
        above = line
        yield bytes(line)


def _paeth(left: int, up: int, corner: int) -> int:
    by_left, by_up, by_corner = abs(up - corner), abs(left - corner), abs(left + up - 2 * corner)
    if by_left <= by_up and by_left <= by_corner:
        return left
    return up if by_up <= by_corner else corner


def _distance(one: bytes, other: bytes) -> int:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))
