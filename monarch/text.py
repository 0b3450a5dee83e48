"""Names and messages as one line of printable text."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path


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


def errno_words(number: int | None) -> str:
    """``Input/output error (EIO)``: a text and a symbol that can be searched for."""
    if not number:
        return "an error without a number"
    return f"{os.strerror(number)} ({errno.errorcode.get(number, number)})"


def counted(number: int, one: str, many: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{number:,} {one if number == 1 else many}"


def plain_name(path: Path) -> str:
    """The last component as a plain word, safe in shells, labels and file names."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.name).strip("-._")[:40] or "root"
