"""The profile of ``monarch analyze run`` that a command reads."""

from __future__ import annotations

import os
from pathlib import Path

import click

from monarch.analysis.profile import Profile, profile_of, result_of
from monarch.cli.json_files import read_json
from monarch.cli.options import FILE
from monarch.errors import UsageError
from monarch.text import escape_text

_MADE_BY = "monarch analyze run"

PROFILE = click.argument("file", metavar="PROFILE", type=FILE)


def read_profile(path: Path) -> Profile:
    """Raises OSError, and UsageError if the file has no profile, or one without conclusions."""
    raw = read_json(path, made_by=_MADE_BY)
    try:
        profile = profile_of(raw)
        result_of(profile)
    except (ValueError, ArithmeticError) as error:
        raise UsageError(
            f"{escape_text(os.fspath(path))} cannot be used: {escape_text(str(error))}",
            hint=f"`{_MADE_BY}` writes such a file",
        ) from error
    return profile
