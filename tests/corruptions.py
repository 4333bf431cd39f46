"""Random damage to a file: cut off, flipped bits, bytes added, removed or replaced."""

import random
from collections.abc import Iterator

_STRANGE = (
    b"",
    b"\0",
    b"\xff",
    b"\xef\xbb\xbf",
    b"\r",
    b"\r\n",
    b"\n\n",
    b"\n\r",
    b'"',
    b"nan",
    b"-inf",
    b"1e999",
    b"-1",
    b"99999999999999999999",
    b":",
    b",",
    b" ",
    b"\t",
    b"#",
    b"x",
    "é".encode(),
    "é".encode()[:1],
    b"A" * 2000,
)


def corruptions(data: bytes, number: int, seed: int) -> Iterator[bytes]:
    """Yield `number` damaged versions of a file, the same ones for the same seed."""
    draw = random.Random(seed)
    damages = (_cut, _flipped, _inserted, _removed, _replaced, _doubled, _shuffled, _overwritten)
    yield from [b"", data[: len(data) // 2], bytes(len(data)), data[::-1]][:number]
    for i in range(number - 4):
        broken = damages[i % len(damages)](data, draw)
        if draw.random() < 0.2:
            broken = damages[draw.randrange(len(damages))](broken, draw)
        yield broken


def _span(data: bytes, draw: random.Random, longest: int) -> tuple[int, int]:
    begin = draw.randrange(len(data) + 1)
    return begin, min(len(data), begin + draw.randrange(1, longest + 1))


def _cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _flipped(data: bytes, draw: random.Random) -> bytes:
    broken = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        if broken:
            broken[draw.randrange(len(broken))] ^= 1 << draw.randrange(8)
    return bytes(broken)


def _inserted(data: bytes, draw: random.Random) -> bytes:
    place = draw.choice((0, len(data), draw.randrange(len(data) + 1)))
    return data[:place] + draw.choice(_STRANGE) + data[place:]


def _removed(data: bytes, draw: random.Random) -> bytes:
    begin, end = _span(data, draw, 64)
    return data[:begin] + data[end:]


def _replaced(data: bytes, draw: random.Random) -> bytes:
    begin, end = _span(data, draw, 4)
    return data[:begin] + draw.choice(_STRANGE) + data[end:]


def _doubled(data: bytes, draw: random.Random) -> bytes:
    begin, end = _span(data, draw, 256)
    return data[:end] + data[begin:]


def _shuffled(data: bytes, draw: random.Random) -> bytes:
    begin, end = _span(data, draw, 16)
    part = list(data[begin:end])
    draw.shuffle(part)
    return data[:begin] + bytes(part) + data[end:]


def _overwritten(data: bytes, draw: random.Random) -> bytes:
    begin, end = _span(data, draw, 8)
    return data[:begin] + draw.randbytes(end - begin) + data[end:]
