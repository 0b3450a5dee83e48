"""The messages of the control socket: one request and its replies, each a line of JSON.

    client   {"verb": "warm", "params": {"paths": ["train"], "wait": true}}
    daemon   {"progress": {"done": 10, "total": 200, "bytes_done": 4096, "bytes_total": 81920}}
    daemon   {"ok": true, "result": {...}}
       or    {"ok": false, "error": "what, where", "hint": "what to do", "exit_code": 5}

Each connection has one request, any number of progress lines, and one last line. Lines are
ASCII; names that are not UTF-8 have surrogate escapes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice
from typing import Any, NoReturn, TypeVar

from monarch.errors import MonarchError

# Enough for some ten thousand paths; the limit bounds the memory for a peer.
MAX_LINE_BYTES = 1 << 20
# The rows that one field of an answer names.
_MOST_ROWS = 1000
_ROWS_BYTES = 64 * 1024

T = TypeVar("T")

# A message as decoded JSON. ``exit_code`` identifies the class of an error (errors.py).
Message = dict[str, Any]


class MalformedError(MonarchError):
    """A line that is not a message, or is too long."""


def encode(message: Message) -> bytes:
    """The message as one line. Raises MalformedError if it is too long."""
    line = json.dumps(message, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise MalformedError(f"the message is longer than {MAX_LINE_BYTES} bytes")
    return line


def first_rows(rows: Iterable[T], *, least: int = 0) -> list[T]:
    """The first of ``rows``, texts or dataclasses, as many as one field of an answer can have: any
    user may make names of thousands of bytes, and one of them takes up to six in JSON. ``least``
    of them are named, however long they are."""
    found: list[T] = []
    room = _ROWS_BYTES
    for row in islice(rows, _MOST_ROWS):
        room -= len(json.dumps(row, default=asdict))
        if room < 0 and len(found) >= least:
            break
        found.append(row)
    return found


def decode(line: bytes) -> Any:
    """The value in a line. Raises MalformedError if it is not JSON."""
    try:
        return json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedError("the line is not JSON") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def parse_request(line: bytes) -> tuple[str, Message]:
    """The verb and the parameters of a request. Raises MalformedError for any other line."""
    match decode(line):
        case {"verb": str(verb), "params": dict(params), **rest} if not rest:
            return verb, params
    raise MalformedError('a request is {"verb": TEXT, "params": {...}}')


def failure(error: MonarchError) -> Message:
    """The last line for a client whose request failed with ``error``."""
    message, hint = str(error.args[0]), error.hint
    return {"ok": False, "error": message, "hint": hint, "exit_code": error.exit_code}
