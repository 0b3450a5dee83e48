"""Names, messages, sizes and durations as text: one printable line, or as people write them."""

from __future__ import annotations

import errno
import os
import re
from decimal import Decimal
from pathlib import Path

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30
TiB = 1 << 40
PiB = 1 << 50
# Numbers of bytes have 64 bits with a sign.
MOST_BYTES = (1 << 63) - 1

_BYTES = {
    **{"": 1, "B": 1},
    **{"K": KiB, "M": MiB, "G": GiB, "T": TiB, "P": PiB},
    **{"KIB": KiB, "MIB": MiB, "GIB": GiB, "TIB": TiB, "PIB": PiB},
    **{"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15},
}
_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def escape_text(text: str) -> str:
    """``text`` on one line, safe for a terminal.

    Control and other unprintable characters become ``\\n``, ``\\xNN`` or ``\\uNNNN``; a byte that
    is not UTF-8 (from ``os.fsdecode``) becomes ``\\xNN``.
    """
    return text if text.isprintable() else "".join(map(_escape_character, text))


def _escape_character(character: str) -> str:
    if character.isprintable():
        return character
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    if code < 0x80:
        return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character, f"\\x{code:02x}")
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def is_encodable(text: str) -> bool:
    """Whether a file can have the text. The escapes of JSON and YAML can name an unpaired surrogate
    of UTF-16, which has no bytes."""
    try:
        text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def errno_words(number: int | None) -> str:
    """``Input/output error (EIO)``: a text and a symbol that can be searched for."""
    if not number:
        return "an error without a number"
    return f"{os.strerror(number)} ({errno.errorcode.get(number, number)})"


def counted(number: int, one: str, many: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{number:,} {one if number == 1 else many}"


def counted_changes(changes: int, files: int, nbytes: int) -> str:
    """Changes that wait: ``2 files, 5 MiB``, or ``1 change of names`` without files."""
    if files:
        return f"{counted(files, 'file', 'files')}, {format_bytes(nbytes)}"
    return counted(changes, "change of names", "changes of names")


def plain_name(path: Path) -> str:
    """The last component as a plain word, safe in shells, labels and file names."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.name).strip("-._")[:40] or "root"


# -- sizes like ``800GiB`` and ``1.5 TB``, durations like ``250ms`` and ``7d`` ---------------------


def parse_bytes(text: str) -> int:
    """``"800GiB"`` as bytes. A bare K, M, G or T is binary, as for ``dd`` and ``lvcreate``.

    Raises ValueError, with examples, if ``text`` is not a size.
    """
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None or match[2].upper() not in _BYTES:
        raise ValueError(f"{text!r} is not a size; write it like 500MB, 800GiB or 2T")
    size = int(Decimal(match[1]) * _BYTES[match[2].upper()])
    if size > MOST_BYTES:
        raise ValueError(f"{text[:40]!r} is more bytes than a file system can have")
    return size


def parse_seconds(text: str) -> float:
    """``"250ms"``, ``"10m"`` or ``"7d"`` as seconds. Raises ValueError if it is none."""
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None or match[2].lower() not in _SECONDS:
        raise ValueError(f"{text!r} is not a duration; write it like 250ms, 30s, 10m or 7d")
    return float(match[1]) * _SECONDS[match[2].lower()]


def format_bytes(count: float) -> str:
    """Bytes with three significant digits and a binary unit: ``1.46 GiB``."""
    if abs(round(count)) < 1000:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        count /= 1024
        # 999.7 rounds to 1000, which is shown in the next unit.
        if abs(round(count)) < 1000:
            return f"{count:.3g} {unit}"
    return f"{count:,.0f} PiB"
