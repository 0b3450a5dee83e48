"""The secret of a job, and the ports that its members use.

Tokens and proofs are computed from the secret (``hello.py``), so that the secret itself is in no
configuration of the engine and in no request.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path

from monarch.errors import UsageError
from monarch.posix.private_directory import open_private
from monarch.text import escape_text

VARIABLE = "MONARCH_PEERS_SECRET"
_LEAST_BYTES = 16
_MOST_BYTES = 4096
# Below the ports that Linux gives to outgoing connections (32768 to 60999).
_FIRST_PORT = 20_000
_PORTS = 10_000
# The ports that a member tries one after the other.
_TRIES = 8


def read_secret(file: Path | None, environ: Mapping[str, str]) -> bytes:
    """The secret of the job, from ``file`` or, without one, from the environment. Raises UsageError
    if there is none, if it is short, or if other users can read the file."""
    if file is None:
        secret = os.fsencode(environ.get(VARIABLE, "")).strip()
        if not secret:
            raise UsageError(
                f"the nodes have no secret: neither peers.secret_file nor {VARIABLE} is set",
                hint="make one for each job: `head -c 32 /dev/urandom | base64`",
            )
        where = VARIABLE
    else:
        where = f"secret file {os.fspath(file)!r}"
        secret = read_private(file, where, _MOST_BYTES + 1).strip()
    if not _LEAST_BYTES <= len(secret) <= _MOST_BYTES:
        raise UsageError(f"{where}: a secret has {_LEAST_BYTES} to {_MOST_BYTES} bytes")
    return secret


def read_private(file: Path, where: str, most: int) -> bytes:
    """The first ``most`` bytes of a file, which messages call ``where``. Raises UsageError if it
    cannot be read, or if other users can read it."""
    try:
        fd = open_private(file, os.O_RDONLY)
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if status.st_uid not in (0, os.geteuid()):
            raise UsageError(
                f"{where}: it is of uid {status.st_uid}, which can read and change it",
                hint="make it as the user that mounts, or as root",
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            shown = escape_text(shlex.quote(os.fspath(file)))
            raise UsageError(f"{where}: other users can read it", hint=f"chmod 600 {shown}")
        return os.read(fd, most)
    finally:
        os.close(fd)


def ports_of(secret: bytes, port: int) -> list[int]:
    """The ports at which a member may listen, the preferred one first: from ``port`` on, or, if it
    is 0, some that follow from the secret, so that jobs on one node rarely meet."""
    if port:
        return [port + number for number in range(_TRIES) if port + number <= 65535]
    digest = hmac.new(secret, b"monarch peers ports", hashlib.sha256).digest()
    first = int.from_bytes(digest[:8], "big")
    return [_FIRST_PORT + (first + number) % _PORTS for number in range(_TRIES)]
