"""Sizes and durations, and escaped text that hostile names cannot break."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.text import (
    GiB,
    KiB,
    MiB,
    PiB,
    TiB,
    escape_text,
    format_bytes,
    parse_bytes,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("500MB", 500_000_000),
        ("800GiB", 800 * GiB),
        ("800gib", 800 * GiB),
        ("2T", 2 * TiB),
        (" 1.5 KiB ", 1536),
        ("0.1KB", 100),
        ("4k", 4 * KiB),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_are_read_exactly(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text",
    ["", "10GBB", "-5GiB", "+5", "1e9", "GiB", "1,5GB", "1..5G", "5 G B", "0x10", "٣GB", "∞"],
)
def test_a_text_that_is_not_a_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size; write it like"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["9223372036854775808", "8192PiB", "9" * 5000])
def test_a_size_beyond_64_bits_is_refused_in_a_short_line(text: str) -> None:
    assert parse_bytes("9223372036854775807") == (1 << 63) - 1
    with pytest.raises(ValueError, match="is more bytes than a file system can have") as raised:
        parse_bytes(text)
    assert len(str(raised.value)) < 100


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250ms", 0.25),
        ("30s", 30),
        ("30", 30),
        ("10m", 600),
        ("10min", 600),
        ("1.5h", 5400),
        ("7d", 604800),
    ],
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "10x", "-1s", "s", "1m30s", "1 year", "nan", "inf"])
def test_a_text_that_is_not_a_duration_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration; write it like"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        *((0, "0 B"), (999, "999 B"), (1536, "1.5 KiB"), (MiB, "1 MiB"), (3 * TiB, "3 TiB")),
        *((999.4, "999 B"), (999.7 * KiB, "0.976 MiB"), (999.6 * GiB, "0.976 TiB")),
        *((5_000_000_000_000_000, "4.44 PiB"), (2000 * PiB, "2,000 PiB")),
    ],
)
@pytest.mark.finding("B13")
def test_sizes_are_written_short(count: float, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(0, 1 << 59))
def test_a_size_written_short_reads_back_within_its_three_digits(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=6e-3)
    assert "e+" not in format_bytes(count)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (b"plain name.jpg", "plain name.jpg"),
        ("grüße-猫".encode(), "grüße-猫"),
        (b"a\nb\r\tc", "a\\nb\\r\\tc"),
        (b"\x1b[2J\x07", "\\x1b[2J\\x07"),
        (b"caf\xe9", "caf\\xe9"),
        ("a\u202eb\u2028c\U000e0001".encode(), "a\\u202eb\\u2028c\\U000e0001"),
    ],
)
def test_names_are_shown_on_one_line_without_control(name: bytes, shown: str) -> None:
    assert escape_text(os.fsdecode(name)) == shown


@given(st.binary(max_size=255))
def test_any_name_is_shown_printable(name: bytes) -> None:
    shown = escape_text(os.fsdecode(name))
    assert shown.isprintable()
    shown.encode("utf-8")
