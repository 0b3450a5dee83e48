"""The directory of a pack: its files, and whether it is a pack, an unfinished or a damaged one."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from monarch.errors import NewerPack, PackError
from monarch.packs.format import CHUNK_MAGIC, FORMAT, require_version
from monarch.packs.index import HEADER_BYTES, Index
from monarch.posix.files import closing_fd
from monarch.posix.openat2 import open_beneath
from monarch.text import escape_text

DESCRIPTION: Final = b"pack.json"
INDEX: Final = b"index"
# The index in the state directory of a mount, to be read at this node.
KEPT_INDEX: Final = "pack-index"
TREE: Final = b"chunks/tree.chunk"
# The mark of a pack that is being written (output.py), and the beginning of its content.
MARK: Final = b"building"
_MARKED = f'{{"format": "{FORMAT}"'.encode()
# The remedy for a damaged index or description.
REBUILD: Final = "`monarch pack index --rebuild {}` makes the index again from the chunks"

# The description is a few hundred bytes.
_MOST_DESCRIPTION = 64 * 1024
_READ = os.O_RDONLY | os.O_NONBLOCK


@contextmanager
def naming(path: bytes) -> Iterator[None]:
    """Puts the directory of a pack before the message of a PackError."""
    try:
        yield
    except PackError as error:
        name = escape_text(os.fsdecode(path))
        raise type(error)(f"{name}: {error.args[0]}", hint=error.hint) from error


def is_pack(path: bytes) -> bool:
    """Whether the directory ``path`` has the description of a pack, of any version."""
    try:
        with closing_fd(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
            return isinstance(read_description(root), dict)
    except (OSError, PackError):
        return False


def require_complete(path: bytes) -> None:
    """Raises PackError if the directory ``path``, which ``is_pack`` does not take for a pack, has
    the files of one: it is unfinished, or its description is missing or damaged."""
    name = escape_text(os.fsdecode(path))
    with suppress(OSError), closing_fd(os.open(path, os.O_PATH | os.O_DIRECTORY)) as root:
        if _begins(root, MARK, _MARKED):
            raise PackError(
                f"{name}: the pack is not finished", hint="run the command `monarch pack` again"
            )
        if _begins(root, TREE, CHUNK_MAGIC):
            try:
                read_description(root)
            except FileNotFoundError:
                what, hint = "pack.json of the pack is missing", REBUILD.format(name)
            except OSError as error:
                what, hint = f"pack.json: {error.strerror}", "name a pack that you may read"
            except PackError as error:
                what, hint = str(error.args[0]), REBUILD.format(name)
            else:
                return
            raise PackError(f"{name}: {what}", hint=hint)


def _begins(root: int, name: bytes, content: bytes) -> bool:
    """Whether a regular file of a directory begins with ``content``."""
    try:
        with closing_fd(open_beneath(root, name, _READ)) as fd:
            return stat.S_ISREG(os.fstat(fd).st_mode) and os.read(fd, len(content)) == content
    except OSError:
        return False


def read_description(root: int) -> dict[str, Any]:
    """The fields of the description, as they stand. Raises OSError, PackError."""
    with closing_fd(open_beneath(root, DESCRIPTION, _READ)) as fd:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise PackError("pack.json is not a regular file")
        text = os.read(fd, _MOST_DESCRIPTION + 1)
    try:
        raw = json.loads(text) if len(text) <= _MOST_DESCRIPTION else None
    except (ValueError, RecursionError):
        raw = None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise PackError("pack.json does not describe a pack")
    return raw


def require_known(root: int) -> None:
    """Raises NewerPack if a newer Monarch has written the description, the mark or the index of a
    pack: it must not be written by this one. What is missing or damaged is passed over."""
    for require in (_require_known_description, _require_known_mark, _require_known_index):
        try:
            require(root)
        except NewerPack:
            raise
        except (OSError, PackError, ValueError, RecursionError):
            continue


def _require_known_description(root: int) -> None:
    require_version(read_description(root).get("version"), "it has")


def _require_known_mark(root: int) -> None:
    with closing_fd(open_beneath(root, MARK, _READ)) as fd:
        raw = json.loads(os.read(fd, _MOST_DESCRIPTION).partition(b"\n")[0])
    if isinstance(raw, dict) and raw.get("format") == FORMAT:
        require_version(raw.get("version"), "it has")


def _require_known_index(root: int) -> None:
    with closing_fd(open_beneath(root, INDEX, _READ)) as fd:
        # The header alone is never a whole index.
        Index(os.read(fd, HEADER_BYTES))
