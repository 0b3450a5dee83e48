"""The protections against faults: the file and the text of each, and the tests that need it.

``*.toml`` beside this file list them by area. ``scripts/prove`` removes one at a time and requires
that its tests fail.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Protection:
    """``text`` occurs once in ``file``; with ``instead`` in its place ``tests`` must fail."""

    area: str
    rows: tuple[str, ...]
    file: str
    what: str
    text: str
    instead: str
    tests: tuple[str, ...]


def protections() -> Iterator[Protection]:
    """All of them, in the order of areas and files."""
    for path in sorted(HERE.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["protection"]:
            yield Protection(
                area=path.stem,
                rows=tuple(entry["rows"]),
                file=entry["file"],
                what=entry["what"],
                text=entry["text"].strip("\n"),
                instead=entry["instead"].strip("\n"),
                tests=tuple(entry["tests"]),
            )
