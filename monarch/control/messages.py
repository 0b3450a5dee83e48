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
from dataclasses import dataclass
from typing import Any, NoReturn

from monarch.errors import MonarchError

# Enough for some ten thousand paths; the limit bounds the memory for a peer.
MAX_LINE_BYTES = 1 << 20


class MalformedError(MonarchError):
    """A line that is not a message, or is too long."""


@dataclass(frozen=True, slots=True)
class Request:
    verb: str
    params: dict[str, Any]

    def encode(self) -> bytes:
        """The message as one line. Raises MalformedError if it is too long."""
        return _line({"verb": self.verb, "params": self.params})


@dataclass(frozen=True, slots=True)
class Progress:
    progress: dict[str, Any]

    def encode(self) -> bytes:
        return _line({"progress": self.progress})


@dataclass(frozen=True, slots=True)
class Result:
    result: dict[str, Any]

    def encode(self) -> bytes:
        return _line({"ok": True, "result": self.result})


@dataclass(frozen=True, slots=True)
class Failure:
    """``exit_code`` identifies the class of the error (errors.py)."""

    error: str
    hint: str
    exit_code: int

    def encode(self) -> bytes:
        return _line(
            {"ok": False, "error": self.error, "hint": self.hint, "exit_code": self.exit_code}
        )


Reply = Progress | Result | Failure


def parse_request(line: bytes) -> Request:
    """Parses a request. Raises MalformedError for any other line."""
    match _object(line):
        case {"verb": str(verb), "params": dict(params), **rest} if not rest:
            return Request(verb, params)
    raise MalformedError('a request is {"verb": TEXT, "params": {...}}')


def parse_reply(line: bytes) -> Reply:
    """Parses a reply. Raises MalformedError for any other line."""
    match _object(line):
        case {"progress": dict(progress), **rest} if not rest:
            return Progress(progress)
        case {"ok": True, "result": dict(result), **rest} if not rest:
            return Result(result)
        case {
            "ok": False,
            "error": str(error),
            "hint": str(hint),
            "exit_code": int(exit_code),
            **rest,
        } if not rest:
            return Failure(error, hint, exit_code)
    raise MalformedError("the answer is not known to this version of monarch")


def _line(message: dict[str, Any]) -> bytes:
    line = json.dumps(message, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise MalformedError(f"the message is longer than {MAX_LINE_BYTES} bytes")
    return line


def _object(line: bytes) -> Any:
    try:
        return json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedError("the line is not JSON") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
