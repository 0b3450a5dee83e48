"""The messages of hints, byte by byte, and messages that are not valid."""

from __future__ import annotations

import errno
import random
from array import array

import pytest

from monarch.errors import Refused
from monarch.foresight.messages import (
    LEAST_LIMIT,
    MISSES,
    MOST_BYTES,
    MOST_ENTRIES,
    MOST_LIMIT,
    NO_DESCRIPTOR,
    SAMPLES,
    SHARDS,
    SOURCE_KIB,
    WHOLE,
    Begin,
    Count,
    End,
    Limit,
    Message,
    Piece,
    Progress,
    decode,
    encode_begin,
    encode_count,
    encode_end,
    encode_limit,
    encode_piece,
    encode_progress,
    entries_of_a_piece,
    request_number,
)


def test_each_byte_of_a_message_is_where_the_documentation_says() -> None:
    assert encode_begin(Begin(0x01020304, 7, SHARDS, 9)) == bytes.fromhex(
        "01 01 00 00 04030201 07000000 02000000 0900000000000000"
    )
    assert encode_piece(5, 3, [1, 0xFFFFFFFF]) == bytes.fromhex(
        "01 02 04 00 05000000 0300000000000000 01000000 ffffffff"
    )
    assert encode_piece(5, 3, [1, 1 << 32]) == bytes.fromhex(
        "01 02 08 00 05000000 0300000000000000 0100000000000000 0000000001000000"
    )
    assert encode_progress(5, 0x0102) == bytes.fromhex("01 03 00 00 05000000 0201000000000000")
    assert encode_end(5) == bytes.fromhex("01 04 00 00 05000000")
    assert encode_limit(0.25, 0x01020304) == bytes.fromhex(
        "01 05 00 00 00000000 90d00300 00000000 0403020100000000"
    )
    assert encode_count(SOURCE_KIB) == bytes.fromhex("01 06 00 00 00000000 0200000000000000")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (encode_begin(Begin(1, NO_DESCRIPTOR, SAMPLES, 0)), Begin(1, NO_DESCRIPTOR, SAMPLES, 0)),
        (encode_piece(1, 0, []), Piece(1, 0, array("I"))),
        (encode_piece(2, 8, [5, 5, 7]), Piece(2, 8, array("I", [5, 5, 7]))),
        (encode_piece(2, 8, [5, 1 << 33, 7]), Piece(2, 8, array("I", [5, 0, 7]))),
        (encode_progress(3, MOST_ENTRIES), Progress(3, MOST_ENTRIES)),
        (encode_end(0xFFFFFFFF), End(0xFFFFFFFF)),
        (encode_limit(0.0, 0), Limit(0, 0)),
        (encode_limit(1.0, LEAST_LIMIT), Limit(WHOLE, LEAST_LIMIT)),
        (encode_count(MISSES), Count(MISSES)),
    ],
)
def test_a_message_is_decoded_as_it_was_encoded(message: bytes, said: Message) -> None:
    assert decode(message) == said


def test_the_longest_pieces_fit_into_a_message() -> None:
    assert MOST_BYTES - 4 < len(encode_piece(1, 0, [1] * entries_of_a_piece(4))) <= MOST_BYTES
    assert MOST_BYTES - 8 < len(encode_piece(1, 0, [1 << 40] * entries_of_a_piece(8))) <= MOST_BYTES


def test_the_number_of_the_ioctl_holds_direction_size_and_type() -> None:
    number = request_number(MOST_BYTES)
    assert number & 0xFFFF == 0xE901
    assert number >> 16 & MOST_BYTES == MOST_BYTES
    assert number < 1 << 32


@pytest.mark.parametrize(
    ("message", "number"),
    [
        (b"", errno.EINVAL),
        (bytes(7), errno.EINVAL),
        (bytes(8), errno.EINVAL),
        (b"\2" + encode_end(1)[1:], errno.EINVAL),
        (encode_limit(1.000001, 0), errno.EINVAL),
        (encode_limit(0.5, LEAST_LIMIT - 1), errno.EINVAL),
        (encode_limit(0.5, MOST_LIMIT + 1), errno.EINVAL),
        (encode_limit(0.5, 0)[:-1], errno.EINVAL),
        (b"\1\5\0\0\1" + encode_limit(0.5, 0)[5:], errno.EINVAL),
        (encode_count(SOURCE_KIB + 1), errno.EINVAL),
        (b"\1\5" + encode_end(1)[2:], errno.EINVAL),
        (b"\1\4\4" + encode_end(1)[3:], errno.EINVAL),
        (b"\1\4\0\1" + encode_end(1)[4:], errno.EINVAL),
        (encode_end(1) + b"\0", errno.EINVAL),
        (encode_begin(Begin(1, 3, 3, 0)), errno.EINVAL),
        (encode_begin(Begin(1, 3, 1, 0))[:-1], errno.EINVAL),
        (encode_begin(Begin(1, 3, 1, MOST_ENTRIES + 1)), errno.E2BIG),
        (encode_progress(1, MOST_ENTRIES + 1), errno.E2BIG),
        (encode_piece(1, MOST_ENTRIES + 1, [1]), errno.E2BIG),
        (encode_piece(1, 0, [1])[:-1], errno.EINVAL),
        (encode_piece(1, 0, [1])[:12], errno.EINVAL),
        (b"\1\2\2\0" + encode_piece(1, 0, [1])[4:], errno.EINVAL),
        (encode_piece(1, 0, [1] * 5000), errno.E2BIG),
    ],
)
def test_an_invalid_message_is_refused(message: bytes, number: int) -> None:
    with pytest.raises(Refused) as refusal:
        decode(message)
    assert refusal.value.errno == number


def test_random_and_damaged_messages_are_refused_or_decoded_and_nothing_else() -> None:
    draw = random.Random(11)
    valid = [
        encode_begin(Begin(1, 3, SAMPLES, 100)),
        encode_piece(1, 0, range(1, 30)),
        encode_piece(1, 0, [1 << 35, 2]),
        encode_progress(1, 7),
        encode_end(1),
    ]
    decoded, refusals = 0, set[int]()
    for _ in range(20_000):
        message = bytearray(draw.choice(valid))
        for _ in range(draw.randrange(4)):
            message[draw.randrange(len(message))] ^= 1 << draw.randrange(8)
        if draw.random() < 0.3:
            del message[draw.randrange(len(message)) :]
        if draw.random() < 0.1:
            message = bytearray(draw.randbytes(draw.randrange(64)))
        try:
            decode(bytes(message))
        except Refused as refusal:
            refusals.add(refusal.errno)
        else:
            decoded += 1
    assert 1000 < decoded < 19_000
    assert refusals == {errno.EINVAL, errno.E2BIG}
