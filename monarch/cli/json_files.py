"""JSON files that a user names: read with a limit, and refused in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from monarch.errors import UsageError
from monarch.text import MiB, escape_text, format_bytes, is_encodable

# Many times the largest file that a command writes.
MOST_BYTES = 64 * MiB


def read_json(path: Path, *, made_by: str) -> Any:
    """The value in a file that the command ``made_by`` writes. Raises OSError, and UsageError if
    the file is too large, or is not JSON."""
    name = escape_text(os.fspath(path))
    # The pipe of a shell, as /dev/stdin, has a writer and no path; one with a path may have none.
    if path.is_fifo() and os.path.exists(os.path.realpath(path)):
        raise UsageError(f"{name} is not a regular file", hint=f"`{made_by}` writes one")
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    what = f"it is larger than {format_bytes(MOST_BYTES)}"
    if len(content) <= MOST_BYTES:
        try:
            value = json.loads(content)
            if is_encodable(json.dumps(value, ensure_ascii=False)):
                return value
            what = "it has an unpaired surrogate"
        except RecursionError:
            what = "it is nested too deeply"
        except ValueError as error:
            what = f"it is not JSON: {error}"
    raise UsageError(
        f"{name} cannot be used: {escape_text(what)}", hint=f"`{made_by}` writes such a file"
    )
