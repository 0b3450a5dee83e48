"""The types of values in a configuration file: sizes, durations, numbers, paths and sections."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from monarch.config.document import shown
from monarch.text import parse_bytes, parse_seconds

# Offsets and counters are signed 64-bit numbers in the kernel and the formats.
_LARGEST = 2**63 - 1


def size_of(value: object) -> int:
    if isinstance(value, str):
        return parse_bytes(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError(f"{shown(value)} is not a size; write it like 500MB, 800GiB or 2T")


def _duration(value: object) -> float:
    if isinstance(value, str):
        return parse_seconds(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise ValueError(f"{shown(value)} is not a duration; write it like 250ms, 30s, 10m or 7d")


def whole_number(value: object) -> object:
    # pydantic would accept a bool as a number, and YAML reads words such as `yes` as a bool.
    if isinstance(value, bool):
        raise ValueError("must be a whole number")
    return value


def expand(text: str) -> Path:
    """A path as written in a file: ``~`` and ``$NAME`` expanded. ValueError for an unset name."""
    expanded = os.path.expandvars(os.path.expanduser(text))
    unset = re.search(r"\$(\w+|\{[^}]*\})", expanded)
    if unset is not None and unset[0] in text:
        raise ValueError(f"{unset[0]} is not set in the environment; set it or write the path out")
    if text.startswith("~") and expanded.startswith("~"):
        raise ValueError(f"{text.split('/', 1)[0]} has no home directory; write the path out")
    return Path(expanded)


def _path(value: object) -> Path:
    if isinstance(value, str):
        if not value.strip():
            raise ValueError("is empty; give a path")
        value = expand(value)
    if not isinstance(value, Path):
        raise ValueError("must be a path")
    if "\0" in str(value):
        raise ValueError("contains a NUL byte, which no path may")
    if not value.is_absolute():
        raise ValueError(f"{str(value)!r} is relative; write an absolute path")
    return value


Size = Annotated[int, BeforeValidator(size_of), Field(ge=0, le=_LARGEST)]
# A longer time is a mistake.
Duration = Annotated[float, BeforeValidator(_duration), Field(gt=0, le=366 * 86400)]
CommitInterval = Annotated[float, BeforeValidator(_duration), Field(ge=0, le=300)]
PositiveSize = Annotated[int, BeforeValidator(size_of), Field(ge=1, le=_LARGEST)]
# Each is a thread; a larger number is a mistake.
Count = Annotated[int, BeforeValidator(whole_number), Field(ge=1, le=4096)]
NameCount = Annotated[int, BeforeValidator(whole_number), Field(ge=1, le=2**40)]
AbsolutePath = Annotated[Path, BeforeValidator(_path)]
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
